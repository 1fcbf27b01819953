"""The authors' RMSProp, as an optax transform without a learning rate: epsilon 1, outside the root.

v <- 0.9 v + 0.1 g^2, step g / (1 + sqrt v); in the first update v is g^2 itself, so that the step is
g / (1 + |g|). With an epsilon of 1 the scale of a gradient matters: losses are summed over the batch. It knows
no schedule and no groups.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

DECAY, EPSILON = 0.9, 1.0


class Slots(NamedTuple):
    """The running mean of squared gradients, and the number of updates so far."""

    mean_square: Any
    updates: Array


def init(params: Any) -> Slots:
    """Slots that have seen nothing; the first update replaces them."""
    return Slots(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))


def step(gradients: Any, slots: Slots) -> tuple[Any, Slots]:
    """g / (1 + sqrt v) for each gradient, and the new slots."""
    decay = jnp.where(slots.updates == 0, 0.0, DECAY)
    mean_square = jax.tree.map(
        lambda v, g: decay.astype(v.dtype) * v + (1 - decay.astype(v.dtype)) * g * g,
        slots.mean_square,
        gradients,
    )
    steps = jax.tree.map(lambda g, v: g / (EPSILON + jnp.sqrt(v)), gradients, mean_square)
    return steps, Slots(mean_square, slots.updates + 1)
