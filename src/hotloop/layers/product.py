"""The matrix product `x @ kernel` that dense and recurrent layers share, with its two gradients.

Each of the three products is an `Operation`, so that a faster library can take one over for a platform. Sums are made
in float32 (float64 for float64 inputs) and rounded once. No biases, no activations.
"""

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from hotloop.layers.materialise import materialised
from hotloop.layers.paths import Operation

Turned = Callable[[Array], Array]
FEW_ROWS = (
    8  # up to here a sum of outer products beats a matrix product: 21 us against 34 for 5 rows, 128 by 512
)


def wide(dtype: DTypeLike) -> jnp.dtype:
    """The type in which sums over values of `dtype` are made."""
    return jnp.promote_types(dtype, jnp.float32)


@jax.custom_vjp
def product(x: Float[Array, "*rows I"], kernel: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """`x @ kernel` in the wide type of `x`, whatever the number of leading axes."""
    y: Array = forward(x, kernel)
    return y


def _remember(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return forward(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    dy = dy.astype(x.dtype)
    return input_gradient(dy, kernel).astype(x.dtype), kernel_gradient(x, dy).astype(kernel.dtype)


product.defvjp(_remember, _backward)


def turned(kernel: Float[Array, "I O"], rows: int, platform: str) -> Turned:
    """`dy -> dy @ kernel.T` for a loop: what can be prepared before the loop is done here, once.

    On the CPU one row goes as kernel times vector (2 us against 7 for [1, 512] by [512, 128]); for more rows the
    transposed kernel is written out first, else each turn does it again (4.5 us against 25 for 4 rows).
    """
    if platform == "cpu" and rows == 1:
        return lambda dy: forward(kernel, dy[0].astype(kernel.dtype))[None]
    across = materialised(kernel.T) if platform == "cpu" else kernel.T
    return lambda dy: forward(dy.astype(kernel.dtype), across)


def _forward(x: Array, kernel: Array) -> Array:
    return jnp.matmul(x, kernel, preferred_element_type=wide(x.dtype))


def _input_gradient(dy: Array, kernel: Array) -> Array:
    return jnp.matmul(dy, kernel.T, preferred_element_type=wide(dy.dtype))


def _kernel_gradient(x: Array, dy: Array) -> Array:
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return jnp.matmul(x.T, dy, preferred_element_type=wide(x.dtype))


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


forward = Operation("product", _forward)
input_gradient = Operation("product input gradient", _input_gradient)
kernel_gradient = Operation("product kernel gradient", _kernel_gradient)
kernel_gradient.register("outer", "cpu", _outer_kernel_gradient)
