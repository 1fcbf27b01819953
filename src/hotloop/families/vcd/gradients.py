"""The pull of the objective on the encoder's outputs, by the formulas of the paper (appendix C).

With f(z) = log p(x, z) + |(z - mean) / spread|^2 / 2 the divergence of one image is
-log p(x, z0) - d/2 + f(zT). Its gradient in mean and spread has three parts: through z0, by the score of q0
(less a control variate), and explicit in f. Nothing flows through the sampler. Losses are summed over the
batch, so a row's pull is its own.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from hotloop.families.vcd.density import LOG_TWO_PI
from hotloop.mcmc import hmc


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
