"""Grouped 2-D convolution, NHWC, SAME padding. Plain convolutions are in conv.py."""

import jax
from jax import Array, lax
from jaxtyping import Float

LAYOUT = ("NHWC", "HWIO", "NHWC")


def grouped_conv2d(
    x_NHWC: Float[Array, "N H W C"],
    kernel_HWIO: Float[Array, "kh kw c O"],
    groups: int,
    stride: int = 1,
) -> Float[Array, "N Ho Wo O"]:
    """Convolve each of `groups` runs of channels with its own filters; the kernel is [k, k, C / groups, O]."""
    y: jax.Array = lax.conv_general_dilated(
        x_NHWC, kernel_HWIO, (stride, stride), "SAME", dimension_numbers=LAYOUT, feature_group_count=groups
    )
    return y
