"""An exponential moving average of weights (and of what a model keeps beside them), moved once a weight update.

Averages are float32, whatever the type of the weights: a sixteen-bit average that moves by a thousandth at a time would
not move. They are trees like those that they are averages of, in stages as elsewhere. It knows no model.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

WARM_UP = 10
"""An average's decay is at most (1 + n) / (10 + n) after n updates, as in TensorFlow's ExponentialMovingAverage: the
first weights, which are random, are soon forgotten."""


def decay_at(decay: float, updates: Array) -> Array:
    """The decay (float32) of the update that comes after so many."""
    n = jnp.asarray(updates).astype(jnp.float32)
    return jnp.minimum(jnp.float32(decay), (1 + n) / (WARM_UP + n))


def start(tree: Any) -> Any:
    """The average before the first update: a copy, as a state that is donated may hold no array twice."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), tree)


def move(average: Any, tree: Any, decay: Array) -> Any:
    """decay * average + (1 - decay) * tree, leaf by leaf."""
    leaves, structure = jax.tree.flatten(average)
    others = jax.tree.leaves(tree)
    moved = [
        old + (1 - decay) * (new.astype(old.dtype) - old) for old, new in zip(leaves, others, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)
