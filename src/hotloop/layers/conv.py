"""2-D convolution, NHWC by HWIO, with a backward pass that stays fast inside a loop on the CPU.

XLA:CPU brings a convolution into the layout of its fast kernel only in a program's entry computation, and the gradient
convolutions that autodiff makes are not in that layout: inside `lax.scan` they fall to naive loops, tens of times slower.
Here both gradients are written as convolutions in the canonical layout. Other platforms keep the built-in gradient.
docs/layers.md has the measurements. Grouped convolutions are elsewhere.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from hotloop.layers.paths import Operation

Padding = Literal["SAME", "VALID"]
Pads = tuple[tuple[int, int], tuple[int, int]]
LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv2d(
    x_NHWC: Float[Array, "N H W C"],
    kernel_HWIO: Float[Array, "kh kw C O"],
    *,
    stride: int = 1,
    padding: Padding = "SAME",
) -> Float[Array, "N Ho Wo O"]:
    """Convolve; `SAME` gives ceil(size / stride) rows and columns, `VALID` uses only whole windows."""
    return _conv2d(x_NHWC, kernel_HWIO, stride, padding_of(x_NHWC, kernel_HWIO, stride, padding))


def padding_of(x_NHWC: Array, kernel_HWIO: Array, stride: int, padding: Padding) -> Pads:
    """The rows and columns of zeros that `padding` stands for, as ((top, bottom), (left, right))."""
    rows, columns = lax.padtype_to_pads(x_NHWC.shape[1:3], kernel_HWIO.shape[:2], (stride, stride), padding)
    return rows, columns


def _plain(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv2d(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
    return forward(x, kernel, stride=stride, pads=pads)


def _remember(x: Array, kernel: Array, stride: int, pads: Pads) -> tuple[Array, tuple[Array, Array]]:
    return forward(x, kernel, stride=stride, pads=pads), (x, kernel)


def _backward(stride: int, pads: Pads, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return (
        input_gradient(x, kernel, dy, stride=stride, pads=pads),
        kernel_gradient(x, kernel, dy, stride=stride, pads=pads),
    )


_conv2d.defvjp(_remember, _backward)


def _built_in_dx(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> Array:
    dx: Array = jax.vjp(lambda x: _plain(x, kernel, stride=stride, pads=pads), x)[1](dy)[0]
    return dx


def _built_in_dw(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> Array:
    dw: Array = jax.vjp(lambda kernel: _plain(x, kernel, stride=stride, pads=pads), kernel)[1](dy)[0]
    return dw


def _is_product(kernel: Array, stride: int, pads: Pads) -> bool:
    """A 1x1 kernel with stride 1 and no padding is one matrix product over the channels."""
    return kernel.shape[:2] == (1, 1) and stride == 1 and pads == ((0, 0), (0, 0))


def _canonical_forward(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
    if _is_product(kernel, stride, pads):
        return (x.reshape(-1, x.shape[-1]) @ kernel[0, 0]).reshape(*x.shape[:3], -1)
    return _plain(x, kernel, stride=stride, pads=pads)


def _canonical_dx(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> Array:
    """Convolve the cotangent, spread out by the stride, with the kernel turned round and its channels swapped."""
    if _is_product(kernel, stride, pads):
        return (dy.reshape(-1, dy.shape[-1]) @ kernel[0, 0].T).reshape(x.shape)
    turned = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    edges = [
        _edges(size, k, low, out, stride)
        for size, k, (low, _), out in zip(x.shape[1:3], kernel.shape[:2], pads, dy.shape[1:3], strict=True)
    ]
    return lax.conv_general_dilated(
        dy, turned, (1, 1), edges, lhs_dilation=(stride, stride), dimension_numbers=LAYOUT
    )


def _edges(size: int, k: int, low: int, out: int, stride: int) -> tuple[int, int]:
    """Padding of the spread cotangent so that the result has the input's `size`; what no window saw gets zeros."""
    before = k - 1 - low
    spread = (out - 1) * stride + 1
    return before, size + k - 1 - spread - before


def _canonical_dw(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> Array:
    """Convolve input and cotangent with the batch as the channels: (C,H,W,N) by (H,W,N,O) gives (C,kh,kw,O)."""
    if _is_product(kernel, stride, pads):
        return (x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1]))[None, None]
    edges = [
        (low, (out - 1) * stride + k - size - low)
        for size, k, (low, _), out in zip(x.shape[1:3], kernel.shape[:2], pads, dy.shape[1:3], strict=True)
    ]
    dw_CHWO = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0),
        dy.transpose(1, 2, 0, 3),
        (1, 1),
        edges,
        rhs_dilation=(stride, stride),
        dimension_numbers=LAYOUT,
    )
    return dw_CHWO.transpose(1, 2, 0, 3)


forward = Operation("conv2d", _plain)
input_gradient = Operation("conv2d input gradient", _built_in_dx)
kernel_gradient = Operation("conv2d kernel gradient", _built_in_dw)
forward.register("canonical", "cpu", _canonical_forward)
input_gradient.register("canonical", "cpu", _canonical_dx)
kernel_gradient.register("canonical", "cpu", _canonical_dw)
