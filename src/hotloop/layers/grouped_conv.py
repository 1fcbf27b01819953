"""Grouped 2-D convolution, NHWC, SAME padding, with CPU paths forward and backward.

XLA:CPU has no fast kernel for `feature_group_count`: forward tens, backward hundreds of times slower than need be.
Few channels a group go as shifted elementwise sums (taps.py); more go as dense convolutions over bundles of
groups (conv.py), whose kernels are zero between groups. Other platforms keep the built-in forms.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from hotloop.layers.conv import (
    LAYOUT,
    Pads,
    conv2d_padded,
    input_gradient_of,
    kernel_gradient_of,
    padding_of,
)
from hotloop.layers.paths import Operation
from hotloop.layers.taps import taps_forward, taps_input_gradient, taps_kernel_gradient

FEW_INPUTS, FEW_OUTPUTS, FEW_TERMS = 4, 8, 50  # a group's channels and a sum's terms, up to which taps win
BUNDLE_CHANNELS = 16  # input channels of one dense convolution, where groups are bundled


def grouped_conv2d(
    x_NHWC: Float[Array, "N H W C"], kernel_HWIO: Float[Array, "kh kw c O"], groups: int, stride: int = 1
) -> Float[Array, "N Ho Wo O"]:
    """Convolve each of `groups` runs of C / groups channels with its own O / groups filters."""
    pads = padding_of(x_NHWC, kernel_HWIO, stride, "SAME")
    return _grouped(x_NHWC, kernel_HWIO, groups, stride, pads)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _grouped(x: Array, kernel: Array, groups: int, stride: int, pads: Pads) -> Array:
    y: Array = forward(x, kernel, groups=groups, stride=stride, pads=pads)
    return y


def _remember(
    x: Array, kernel: Array, groups: int, stride: int, pads: Pads
) -> tuple[Array, tuple[Array, Array]]:
    return _grouped(x, kernel, groups, stride, pads), (x, kernel)


def _backward(
    groups: int, stride: int, pads: Pads, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    settings = {"groups": groups, "stride": stride, "pads": pads}
    return input_gradient(*saved, dy, **settings), kernel_gradient(*saved, dy, **settings)


_grouped.defvjp(_remember, _backward)


def _plain(x: Array, kernel: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT, feature_group_count=groups
    )


def _bundled(x: Array, kernel: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """Dense convolutions over bundles of groups; what a kernel has between its bundle's groups is zero."""
    inputs = kernel.shape[2]
    size = max(s for s in range(1, groups + 1) if groups % s == 0 and s <= max(1, BUNDLE_CHANNELS // inputs))
    parts = zip(jnp.split(x, groups // size, 3), jnp.split(kernel, groups // size, 3), strict=True)
    return jnp.concatenate(
        [conv2d_padded(part, _block_diagonal(block, size), stride, pads) for part, block in parts], 3
    )


def _block_diagonal(kernel: Array, groups: int) -> Array:
    """One kernel over all channels of `groups` groups, zero between them.

    Blocks are padded into place, so that the gradient cuts them out. As a product with an identity it would be a sum
    over the groups, which XLA:CPU hands to YNNPACK for kernels of 5x5 and more, and that ends the process now and then
    (jaxlib 0.10.2 and 0.11.0; docs/layers.md has a reproduction).
    """
    blocks = jnp.split(kernel, groups, 3)
    width = blocks[0].shape[3]
    none = (0, 0, 0)
    padded = [
        lax.pad(
            block, np.zeros((), kernel.dtype), [none, none, none, (g * width, (groups - 1 - g) * width, 0)]
        )
        for g, block in enumerate(blocks)
    ]
    return jnp.concatenate(padded, 2)


def _suits_taps(kernel: Array, groups: int) -> bool:
    kh, kw, inputs, outputs = *kernel.shape[:3], kernel.shape[3] // groups
    few_terms = kh * kw * max(inputs, outputs) <= FEW_TERMS
    return few_terms and inputs <= FEW_INPUTS and outputs <= FEW_OUTPUTS


def _cpu_forward(x: Array, kernel: Array, **settings: Any) -> Array:
    path = taps_forward if _suits_taps(kernel, settings["groups"]) else _bundled
    return path(x, kernel, **settings)


def _cpu_dx(x: Array, kernel: Array, dy: Array, **settings: Any) -> Array:
    suits = _suits_taps(kernel, settings["groups"])
    path = taps_input_gradient if suits else input_gradient_of(_bundled)
    return path(x, kernel, dy, **settings)


def _cpu_dw(x: Array, kernel: Array, dy: Array, **settings: Any) -> Array:
    suits = _suits_taps(kernel, settings["groups"])
    path = taps_kernel_gradient if suits else kernel_gradient_of(_bundled)
    return path(x, kernel, dy, **settings)


forward = Operation("grouped convolution", _plain)
input_gradient = Operation("grouped convolution, input gradient", input_gradient_of(_plain))
kernel_gradient = Operation("grouped convolution, kernel gradient", kernel_gradient_of(_plain))
forward.register("taps or bundles", "cpu", _cpu_forward)
input_gradient.register("taps or bundles", "cpu", _cpu_dx)
kernel_gradient.register("taps or bundles", "cpu", _cpu_dw)
