"""The formulas of the persistent kernels, on one tile of rows and units, forward and backward in time.

They are those of `recurrence.py` written for a tile: `z` are the input sums of its gates, `products` those of the
state before (None for a zero state), all in float32. Tests hold them to float64.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

Gates = Sequence[Array]


def logistic(sums: Array) -> Array:
    """By the hyperbolic tangent, which the GPU has in one instruction."""
    return 0.5 * jnp.tanh(0.5 * sums) + 0.5


def kept_share(sums: Array) -> Array:
    """The logistic function to float32's accuracy, for gates by which a state is multiplied step after step: the one
    above is within 2.4e-4, which a gate near 1 would add up to a quarter of the state over a thousand steps."""
    return 1 / (1 + jnp.exp(-sums))


def plus(z: Gates, products: Gates | None) -> list[Array]:
    return list(z) if products is None else [a + b for a, b in zip(z, products, strict=True)]


def lstm(sums: Gates, c: Array | None) -> tuple[Array, Array]:
    """h and c after the step; no c before it means zero."""
    i, f, g, o = sums
    new = logistic(i) * jnp.tanh(g)
    c = new if c is None else kept_share(f) * c + new
    return logistic(o) * jnp.tanh(c), c


def mix(update_sum: Array, candidate_sum: Array, h: Array | None) -> Array:
    """A GRU's h after the step."""
    update, candidate = kept_share(update_sum), jnp.tanh(candidate_sum)
    kept = (1 - update) * candidate
    return kept if h is None else update * h + kept


def reset_after(z: Gates, products: Gates | None, bias: Array) -> list[Array]:
    """The sums of both gates and of the candidate, and what of the candidate's the reset gate acts on."""
    of_candidate = bias if products is None else products[2] + bias
    reset, update = plus(z[:2], None if products is None else products[:2])
    return [reset, update, z[2] + logistic(reset) * of_candidate, of_candidate]


def rnn_back(sums: Gates, dh: Array) -> Array:
    h = jnp.tanh(sums[0])
    return dh * (1 - h * h)


def lstm_back(sums: Gates, c: Array, dh: Array, dc: Array) -> tuple[list[Array], Array]:
    """The sums' gradient, and that of the c before the step, which is `c`."""
    i, f, g, o = logistic(sums[0]), kept_share(sums[1]), jnp.tanh(sums[2]), logistic(sums[3])
    tanh_c = jnp.tanh(f * c + i * g)
    dc = dc + dh * o * (1 - tanh_c * tanh_c)
    dz = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)]
    return dz, dc * f


def candidate_back(sums: Gates, h: Array, dh: Array) -> tuple[Array, Array, Array]:
    """A GRU's gradients of the update and candidate sums, and what goes straight to the h before, which is `h`."""
    update, candidate = kept_share(sums[1]), jnp.tanh(sums[2])
    d_update = dh * (h - candidate) * update * (1 - update)
    return d_update, dh * (1 - update) * (1 - candidate * candidate), dh * update


def reset_back(sums: Gates, acted_on: Array, d_reset: Array) -> Array:
    """The reset sum's gradient, where the gate multiplied `acted_on` and the result's gradient is `d_reset`."""
    reset = logistic(sums[0])
    return d_reset * acted_on * reset * (1 - reset)
