"""Convolutions by the handlers of `hotloop-native`, NHWC by HWIO, grouped or not, in the arguments that the operations
of `conv.py` and `grouped_conv.py` have.
"""

from typing import Any

import jax
import numpy as np
from jax import Array

from hotloop.layers import native
from hotloop.layers.native import UNLESS_SLOWER, like
from hotloop.layers.paths import Rival

Pads = tuple[tuple[int, int], tuple[int, int]]
FEW_CHANNELS = 16
"""Up to which XLA:CPU has no fast convolution."""
SLOW_WORK = 10**8
"""Multiplications below which nobody needs to hear that a convolution is slow."""


def forward(x: Array, kernel: Array, *, stride: int, pads: Pads, groups: int = 1) -> Array:
    y: Array = native.call(
        "hotloop_conv_forward",
        _result(x, kernel, stride, pads),
        x,
        kernel,
        **_attributes(stride, pads, groups),
    )
    return y


def biased(
    x: Array, kernel: Array, bias: Array, *residual: Array, stride: int, pads: Pads, relu: bool
) -> Array:
    """With the bias, what is added (`residual`) and the ReLU in the same pass."""
    target = "hotloop_conv_bias_sum" if residual else "hotloop_conv_bias"
    result, attributes = _result(x, kernel, stride, pads), _attributes(stride, pads, 1)
    y: Array = native.call(target, result, x, kernel, bias, *residual, relu=relu, **attributes)
    return y


def input_gradient(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads, groups: int = 1) -> Array:
    attributes = _attributes(stride, pads, groups)
    dx: Array = native.call("hotloop_conv_input_gradient", like(x), dy, kernel, **attributes)
    return dx


def kernel_gradient(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads, groups: int = 1) -> Array:
    attributes = _attributes(stride, pads, groups)
    dkernel: Array = native.call("hotloop_conv_kernel_gradient", like(kernel), x, dy, **attributes)
    return dkernel


def _attributes(stride: int, pads: Pads, groups: int) -> dict[str, Any]:
    edges = np.array(pads, np.int64).ravel()
    return {"strides": np.array([stride, stride], np.int64), "pads": edges, "groups": np.int64(groups)}


def _result(x: Array, kernel: Array, stride: int, pads: Pads) -> jax.ShapeDtypeStruct:
    sizes = zip(x.shape[1:3], kernel.shape[:2], pads, strict=True)
    rows, columns = ((size + low + high - k) // stride + 1 for size, k, (low, high) in sizes)
    return jax.ShapeDtypeStruct((x.shape[0], rows, columns, kernel.shape[3]), x.dtype)  # type: ignore[no-untyped-call]


def is_slow_forward(x: Array, kernel: Array, *, groups: int = 1, **_: Any) -> bool:
    """Whether XLA:CPU has no fast kernel for it, and it is large enough for that to be felt."""
    kh, kw, channels, filters = kernel.shape
    rows: Any = x.shape[0]
    if not isinstance(rows, int):  # an export for any number of rows, of which nothing can be said
        return False
    work = rows * x.shape[1] * x.shape[2] * kh * kw * channels * filters
    return work >= SLOW_WORK and (groups > 1 or max(channels, filters) <= FEW_CHANNELS)


def is_slow_gradient(x: Array, kernel: Array, dy: Array, *, stride: int, groups: int = 1, **_: Any) -> bool:
    """The same for the gradient by the input, where strides come in."""
    work = dy.size * kernel.size // kernel.shape[3]
    strided = stride > 1 and kernel.shape[:2] != (1, 1)
    return is_slow_forward(x, kernel, groups=groups) or (strided and work >= SLOW_WORK)


FORWARD = Rival(
    "conv forward",
    "hotloop_conv_forward",
    forward,
    stacked=(0,),
    margin=UNLESS_SLOWER,
    is_slow=is_slow_forward,
)
INPUT_GRADIENT = Rival(
    "conv input gradient",
    "hotloop_conv_input_gradient",
    input_gradient,
    stacked=(0, 2),
    margin=UNLESS_SLOWER,
    is_slow=is_slow_gradient,
)
KERNEL_GRADIENT = Rival(
    "conv kernel gradient", "hotloop_conv_kernel_gradient", kernel_gradient, margin=UNLESS_SLOWER
)
BIASED = Rival("conv with bias", "hotloop_conv_bias_sum", biased, margin=UNLESS_SLOWER)
