"""Adding a bias to rows, with a gradient that a CPU sums fast.

The gradient of a bias is a sum over rows. XLA's CPU reduction over the first axis takes 6 ms for [64, 17736] where the
product with a vector of ones takes 0.2; other platforms sum. No activations.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from hotloop.layers.paths import Operation


@jax.custom_vjp
def with_bias(x: Float[Array, "*rows O"], bias: Float[Array, " O"]) -> Float[Array, "*rows O"]:
    """`x + bias`."""
    return x + bias


def _remember(x: Array, bias: Array) -> tuple[Array, Array]:
    return x + bias, bias


def _backward(bias: Array, dy: Array) -> tuple[Array, Array]:
    return dy, column_sums(dy.reshape(-1, dy.shape[-1])).astype(bias.dtype)


with_bias.defvjp(_remember, _backward)


def _summed(x: Array) -> Array:
    return x.sum(0)


def _ones_product(x: Array) -> Array:
    return jnp.matmul(jnp.ones(len(x), x.dtype), x, precision="highest")


column_sums = Operation("column sums", _summed)
column_sums.register("ones", "cpu", _ones_product)
