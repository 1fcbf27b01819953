"""The objective's pull on the encoder's outputs, by the formulas of the paper (appendix C), and the control variate.

With f(z) = log p(x, z) + |(z - mean) / spread|^2 / 2 the divergence of one image is -log p(x, z0) - d/2 + f(zT). Its
gradient in mean and spread has three parts: through z0, by the score of q0 (less a control variate), and explicit in f.
Nothing flows through the sampler. Losses are summed over the batch, so a row's pull is its own.

The control variate, which keeps gradients calm, is a running mean of f(zT), one for all images or one for each. It is
kept as `shared` + `own[image]`, so that an update touches a batch's entries and nothing else, whatever the number of
images: while it is shared, `own` is zero and `shared` moves; afterwards `shared` rests and `own` moves.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hotloop.families.vcd.networks import LOG_TWO_PI
from hotloop.mcmc import hmc

Variate = dict[str, Array]


class Draw(NamedTuple):
    """What one update knows of each row."""

    mean: Array
    spread: Array
    eta: Array
    start: hmc.State
    end: hmc.State

    @property
    def f(self) -> Array:
        """f(zT)."""
        distance = jnp.square((self.end.position - self.mean) / self.spread).sum(-1)
        return self.end.log_density + 0.5 * distance

    @property
    def vcd(self) -> Array:
        """The divergence by one sample; single values may be negative, the mean is not."""
        return self.f - self.start.log_density - self.mean.shape[-1] / 2

    @property
    def entropy(self) -> Array:
        """Of q0, exactly."""
        return jnp.log(self.spread).sum(-1) + 0.5 * self.mean.shape[-1] * (LOG_TWO_PI + 1)


def encoder_pull(method: str, draw: Draw, control: Array) -> tuple[Array, Array]:
    """d loss / d mean and d loss / d spread of each row."""
    mean, spread, eta = draw.mean, draw.spread, draw.eta
    through = -draw.start.gradient
    if method in ("kl", "hoffman"):
        return through, through * eta - 1 / spread
    weight = (draw.f - control)[:, None]
    away = (draw.end.position - mean) / spread
    pull_mean = through + (weight * eta - away) / spread
    pull_spread = through * eta + (weight * (eta * eta - 1) - away * away) / spread
    return pull_mean, pull_spread


def init_variate(kind: str, images: int) -> Variate:
    """Zero for every image; `none` keeps nothing."""
    if kind == "none":
        return {}
    shared = {"shared": jnp.zeros(())}
    return shared if kind == "global" else {**shared, "own": jnp.zeros(images)}


def read_variate(state: Variate, index: Array, like: Array) -> Array:
    """The variate of each row's image, as it stands before the update."""
    if not state:
        return jnp.zeros_like(like)
    if "own" in state:
        return state["shared"] + state["own"][index]
    return jnp.broadcast_to(state["shared"], like.shape)


def move_variate(state: Variate, index: Array, f: Array, decay: float, shared_phase: Any) -> Variate:
    """The variate after an update: c <- decay c + (1 - decay) f, with the batch's mean while it is shared.

    A batch that runs over the end of a pass may hold an image twice. Both rows start from the same value; the
    later one is kept, on every device.
    """
    if not state:
        return {}
    moved_shared = decay * state["shared"] + (1 - decay) * f.mean()
    if "own" not in state:
        return {"shared": moved_shared}
    shared = jnp.where(shared_phase, moved_shared, state["shared"])
    target = decay * (state["shared"] + state["own"][index]) + (1 - decay) * f - state["shared"]
    rows = jnp.where(shared_phase, 0.0, target)
    return {"shared": shared, "own": _write_rows(state["own"], index, rows)}


def _write_rows(own: Array, index: Array, rows: Array) -> Array:
    """The entries at `index` replaced; where batches fill a pass exactly, no index comes twice."""
    if len(own) % len(index) == 0:
        return own.at[index].set(rows, unique_indices=True)
    return own.at[last_of_each(index, len(own))].set(rows, mode="drop")


def last_of_each(index: Array, images: int) -> Array:
    """The indices with every row but an image's last one sent past the end, where a write is dropped."""
    places = jnp.arange(len(index), dtype=jnp.int32)
    last = jnp.zeros(images, jnp.int32).at[index].max(places)
    return jnp.where(last[index] == places, index, images)


def mean_variate(state: Variate) -> Array:
    """Over all images."""
    if not state:
        return jnp.zeros(())
    return state["shared"] + state["own"].mean() if "own" in state else state["shared"]
