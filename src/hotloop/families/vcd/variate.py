"""The control variate: a running mean of f(zT), one for all images or one for each, that keeps gradients calm.

Kept as `shared` + `own[image]`, so that an update touches a batch's entries and nothing else, whatever the
number of images: while the variate is shared, `own` is zero and `shared` moves; afterwards `shared` rests and
`own` moves. It knows neither the model nor what f is.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

State = dict[str, Array]


def init(kind: str, images: int) -> State:
    """Zero for every image; `none` keeps nothing."""
    if kind == "none":
        return {}
    shared = {"shared": jnp.zeros(())}
    return shared if kind == "global" else {**shared, "own": jnp.zeros(images)}


def value(state: State, index: Array, like: Array) -> Array:
    """The variate of each row's image, as it stands before the update."""
    if not state:
        return jnp.zeros_like(like)
    if "own" in state:
        return state["shared"] + state["own"][index]
    return jnp.broadcast_to(state["shared"], like.shape)


def moved(state: State, index: Array, f: Array, decay: float, shared_phase: Any) -> State:
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
    return {"shared": shared, "own": _written(state["own"], index, rows)}


def _written(own: Array, index: Array, rows: Array) -> Array:
    """The entries at `index` replaced; where batches fill a pass exactly, no index comes twice."""
    if len(own) % len(index) == 0:
        return own.at[index].set(rows, unique_indices=True)
    return own.at[last_of_each(index, len(own))].set(rows, mode="drop")


def last_of_each(index: Array, images: int) -> Array:
    """The indices with every row but an image's last one sent past the end, where a write is dropped."""
    places = jnp.arange(len(index), dtype=jnp.int32)
    last = jnp.zeros(images, jnp.int32).at[index].max(places)
    return jnp.where(last[index] == places, index, images)


def mean(state: State) -> Array:
    """Over all images."""
    if not state:
        return jnp.zeros(())
    return state["shared"] + state["own"].mean() if "own" in state else state["shared"]
