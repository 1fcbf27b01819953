"""The fully connected layer, and its parts: the product `x @ kernel`, which recurrent layers share, and a bias.

Each product is an `Operation`, so that a faster library can take one over for a platform. Sums are made in float32
(float64 for float64 inputs) and rounded once.
"""

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from hotloop.layers.paths import Operation, materialise

Params = dict[str, Array]
TransposedProduct = Callable[[Array], Array]
# Up to here a sum of outer products beats a matrix product: 21 us against 34 for 5 rows, 128 by 512.
FEW_ROWS = 8


def wide(dtype: DTypeLike) -> jnp.dtype:
    """The type in which sums over values of `dtype` are made."""
    return jnp.promote_types(dtype, jnp.float32)


@jax.custom_vjp
def product(x: Float[Array, "*rows I"], kernel: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """`x @ kernel` in the wide type of `x`, whatever the number of leading axes."""
    y: Array = matmul(x, kernel)
    return y


def _product_gradients(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    dy = dy.astype(x.dtype)
    return input_gradient(dy, kernel).astype(x.dtype), kernel_gradient(x, dy).astype(kernel.dtype)


product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), _product_gradients)


def prepare_transposed(kernel: Float[Array, "I O"], rows: int, platform: str) -> TransposedProduct:
    """`dy -> dy @ kernel.T` for a loop: what can be prepared before the loop is done here, once.

    On the CPU one row goes as kernel times vector (2 us against 7 for [1, 512] by [512, 128]); for more rows the
    transposed kernel is written out first, else each turn does it again (4.5 us against 25 for 4 rows).
    """
    if platform == "cpu" and rows == 1:
        return lambda dy: matmul(kernel, dy[0].astype(kernel.dtype))[None]
    across = materialise(kernel.T) if platform == "cpu" else kernel.T
    return lambda dy: matmul(dy.astype(kernel.dtype), across)


def _matmul(x: Array, kernel: Array) -> Array:
    return jnp.matmul(x, kernel, preferred_element_type=wide(x.dtype))


def _kernel_gradient(x: Array, dy: Array) -> Array:
    return _matmul(x.reshape(-1, x.shape[-1]).T, dy.reshape(-1, dy.shape[-1]))


def _outer_kernel_gradient(x: Array, dy: Array) -> Array:
    """For few rows, elementwise: XLA fuses it with the weight update and never writes the gradient out."""
    rows = prod(x.shape[:-1])
    if rows > FEW_ROWS:
        return _kernel_gradient(x, dy)
    x = x.reshape(rows, -1, 1).astype(wide(x.dtype))
    dy = dy.reshape(rows, 1, -1).astype(wide(dy.dtype))
    total = x[0] * dy[0]
    for row in range(1, rows):
        total += x[row] * dy[row]
    return total


matmul = Operation(_matmul)
input_gradient = Operation(lambda dy, kernel: _matmul(dy, kernel.T))
kernel_gradient = Operation(_kernel_gradient, cpu=("outer", _outer_kernel_gradient))


@jax.custom_vjp
def with_bias(x: Float[Array, "*rows O"], bias: Float[Array, " O"]) -> Float[Array, "*rows O"]:
    """`x + bias`, with a gradient that a CPU sums fast."""
    return x + bias


def _bias_gradients(bias: Array, dy: Array) -> tuple[Array, Array]:
    return dy, column_sums(dy.reshape(-1, dy.shape[-1])).astype(bias.dtype)


with_bias.defvjp(lambda x, bias: (x + bias, bias), _bias_gradients)


# XLA's CPU reduction over the first axis takes 6 ms for [64, 17736], the product with a vector of ones 0.2.
column_sums = Operation(
    lambda x: x.sum(0),
    cpu=("ones", lambda x: jnp.matmul(jnp.ones(len(x), x.dtype), x, precision="highest")),
)


def init_dense(key: Array, inputs: int, outputs: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Glorot-uniform kernel [I, O] and a zero bias [O], drawn in float32 and then rounded to `dtype`."""
    limit = (6.0 / (inputs + outputs)) ** 0.5
    kernel = jax.random.uniform(key, (inputs, outputs), jnp.float32, -limit, limit)
    return {"kernel": kernel.astype(dtype), "bias": jnp.zeros(outputs, dtype)}


def dense(params: Params, x: Float[Array, "*batch I"]) -> Float[Array, "*batch O"]:
    """`x @ kernel + bias`, summed in float32 (or float64) and rounded once to the type of `x`."""
    return (product(x, params["kernel"]) + params["bias"]).astype(x.dtype)
