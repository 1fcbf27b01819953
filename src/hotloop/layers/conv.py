"""2-D convolution, NHWC by HWIO, with a backward pass that stays fast inside a loop on the CPU.

XLA:CPU brings a convolution into the layout of its fast kernel only in a program's entry computation, and the
gradient convolutions that autodiff makes are not in that layout: inside `lax.scan` they fall to naive loops, tens of
times slower. Here both gradients are written as convolutions in the canonical layout. Other platforms keep the
built-in gradients. docs/layers.md has the measurements; grouped convolutions are in grouped_conv.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from hotloop.layers.paths import Operation

Padding = Literal["SAME", "VALID"]
Pads = tuple[tuple[int, int], tuple[int, int]]
Convolve = Callable[..., Array]
LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv2d(
    x_NHWC: Float[Array, "N H W C"],
    kernel_HWIO: Float[Array, "kh kw C O"],
    *,
    stride: int = 1,
    padding: Padding = "SAME",
) -> Float[Array, "N Ho Wo O"]:
    """Convolve; `SAME` gives ceil(size / stride) rows and columns, `VALID` uses only whole windows."""
    return conv2d_padded(x_NHWC, kernel_HWIO, stride, padding_of(x_NHWC, kernel_HWIO, stride, padding))


def padding_of(x_NHWC: Array, kernel_HWIO: Array, stride: int, padding: Padding) -> Pads:
    """The rows and columns of zeros that `padding` stands for, as ((top, bottom), (left, right))."""
    rows, columns = lax.padtype_to_pads(x_NHWC.shape[1:3], kernel_HWIO.shape[:2], (stride, stride), padding)
    return rows, columns


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv2d_padded(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
    """Convolve with the padding given in rows and columns."""
    y: Array = forward(x, kernel, stride=stride, pads=pads)
    return y


def _remember(x: Array, kernel: Array, stride: int, pads: Pads) -> tuple[Array, tuple[Array, Array]]:
    return conv2d_padded(x, kernel, stride, pads), (x, kernel)


def _backward(stride: int, pads: Pads, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    settings = {"stride": stride, "pads": pads}
    return input_gradient(*saved, dy, **settings), kernel_gradient(*saved, dy, **settings)


conv2d_padded.defvjp(_remember, _backward)


def input_gradient_of(convolve: Convolve) -> Convolve:
    """`(x, kernel, dy) -> dx` for `convolve(x, kernel)`, as JAX derives it."""

    def dx(x: Array, kernel: Array, dy: Array, **settings: Any) -> Array:
        gradient: Array = jax.vjp(lambda x: convolve(x, kernel, **settings), x)[1](dy)[0]
        return gradient

    return dx


def kernel_gradient_of(convolve: Convolve) -> Convolve:
    """`(x, kernel, dy) -> dkernel` for `convolve(x, kernel)`, as JAX derives it."""

    def dkernel(x: Array, kernel: Array, dy: Array, **settings: Any) -> Array:
        gradient: Array = jax.vjp(lambda kernel: convolve(x, kernel, **settings), kernel)[1](dy)[0]
        return gradient

    return dkernel


def _plain(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT)


def _is_product(kernel: Array, stride: int, pads: Pads) -> bool:
    """A 1x1 kernel with stride 1 and no padding is one matrix product over the channels."""
    return kernel.shape[:2] == (1, 1) and stride == 1 and pads == ((0, 0), (0, 0))


def _canonical_forward(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
    if _is_product(kernel, stride, pads):
        return (x.reshape(-1, x.shape[-1]) @ kernel[0, 0]).reshape(*x.shape[:3], -1)
    return _plain(x, kernel, stride=stride, pads=pads)


def _canonical_dx(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> Array:
    """Convolve the cotangent, spread by the stride, with the kernel turned round and its channels swapped."""
    if _is_product(kernel, stride, pads):
        return (dy.reshape(-1, dy.shape[-1]) @ kernel[0, 0].T).reshape(x.shape)
    turned = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    edges = spread_edges(x, kernel, dy, stride, pads)
    return lax.conv_general_dilated(
        dy, turned, (1, 1), edges, lhs_dilation=(stride, stride), dimension_numbers=LAYOUT
    )


def spread_edges(x: Array, kernel: Array, dy: Array, stride: int, pads: Pads) -> Pads:
    """Padding of the cotangent, spread by the stride, that leads back to the size of `x` in a VALID convolution."""
    edges = []
    for size, k, (low, _), out in zip(x.shape[1:3], kernel.shape[:2], pads, dy.shape[1:3], strict=True):
        before = k - 1 - low
        spread = (out - 1) * stride + 1
        edges.append((before, size + k - 1 - spread - before))
    return edges[0], edges[1]


def _canonical_dw(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> Array:
    """Convolve with the batch as the channels: x as (C,H,W,N) by dy as (H,W,N,O) gives (C,kh,kw,O)."""
    if _is_product(kernel, stride, pads):
        return (x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1]))[None, None]
    edges = [
        (low, (out - 1) * stride + k - size - low)
        for size, k, (low, _), out in zip(x.shape[1:3], kernel.shape[:2], pads, dy.shape[1:3], strict=True)
    ]
    x_CHWN, dy_HWNO = x.transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3)
    dw_CHWO = lax.conv_general_dilated(
        x_CHWN, dy_HWNO, (1, 1), edges, rhs_dilation=(stride, stride), dimension_numbers=LAYOUT
    )
    return dw_CHWO.transpose(1, 2, 0, 3)


def _folded(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
    """The same for a wide kernel two pixels apart over few channels: each 2x2 pixels become channels of one.

    A GPU's matrix units want many channels: a ResNet's first convolution, 7x7 over 3, becomes 4x4 over 12.
    """
    if not _worth_folding(kernel, stride):
        return _plain(x, kernel, stride=stride, pads=pads)
    sizes = [size + size % 2 for size in kernel.shape[:2]]
    edges = []
    for size, k, even, (low, high) in zip(x.shape[1:3], kernel.shape[:2], sizes, pads, strict=True):
        needed = (size + low + high - k) // 2 * 2 + even
        edges.append((low, needed - size - low, 0))
    padded = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    more = [(0, even - k, 0) for even, k in zip(sizes, kernel.shape[:2], strict=True)]
    even_kernel = lax.pad(kernel, np.zeros((), kernel.dtype), [*more, (0, 0, 0), (0, 0, 0)])
    images, rows, columns, channels = padded.shape
    blocks = padded.reshape(images, rows // 2, 2, columns // 2, 2, channels).swapaxes(2, 3)
    taps = even_kernel.reshape(sizes[0] // 2, 2, sizes[1] // 2, 2, channels, -1).swapaxes(1, 2)
    return _plain(
        blocks.reshape(images, rows // 2, columns // 2, 4 * channels),
        taps.reshape(sizes[0] // 2, sizes[1] // 2, 4 * channels, -1),
        stride=1,
        pads=((0, 0), (0, 0)),
    )


def _worth_folding(kernel: Array, stride: int) -> bool:
    return stride == 2 and min(kernel.shape[:2]) >= 5 and kernel.shape[2] <= 4


forward = Operation("convolution", _plain)
input_gradient = Operation("convolution, input gradient", input_gradient_of(_plain))
kernel_gradient = Operation("convolution, kernel gradient", kernel_gradient_of(_plain))
forward.register("canonical", "cpu", _canonical_forward)
input_gradient.register("canonical", "cpu", _canonical_dx)
kernel_gradient.register("canonical", "cpu", _canonical_dw)
forward.register("folded", "cuda", _folded)
kernel_gradient.register("folded", "cuda", kernel_gradient_of(_folded))
