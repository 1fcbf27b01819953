"""Batch and group normalisation over the channels of NHWC images, statistics in float32 whatever the images' type.

Mean and variance come from one pass over the images: mean and mean square of their distance to one pixel, so that a
large common offset does not cancel the variance away. The backward passes are written out: two sums, then one
multiply-add. Who keeps moving statistics, and how they move, is not known here.
"""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from hotloop.layers.product import wide

EPSILON = 1.001e-5  # Keras' ResNets
Images = Float[Array, "N H W C"]
Channels = Float[Array, " C"]
Triple = tuple[Array, Array, Array]
_PIXELS = (0, 1, 2)
_GROUP = (1, 2, 4)  # of [N, H, W, G, C]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def batch_norm(
    x_NHWC: Images, scale: Channels, offset: Channels, epsilon: float = EPSILON
) -> tuple[Images, Channels, Channels]:
    """The images normalised by their own statistics, and those: mean and biased variance of each channel."""
    mean, variance = (moment.reshape(-1) for moment in _moments(x_NHWC, x_NHWC[:1, :1, :1], _PIXELS))
    return normalise(x_NHWC, scale, offset, mean, variance, epsilon), mean, variance


def normalise(
    x_NHWC: Images,
    scale: Channels,
    offset: Channels,
    mean: Channels,
    variance: Channels,
    epsilon: float = EPSILON,
) -> Images:
    """The images normalised by given statistics: computed in float32, rounded once to their own type."""
    slope = scale * lax.rsqrt(variance + epsilon)
    return ((x_NHWC - mean) * slope + offset).astype(x_NHWC.dtype)


def _remember(x: Array, scale: Array, offset: Array, epsilon: float) -> tuple[Triple, tuple[Array, ...]]:
    y, mean, variance = batch_norm(x, scale, offset, epsilon)
    return (y, mean, variance), (x, scale, offset, mean, lax.rsqrt(variance + epsilon))


def _backward(epsilon: float, saved: tuple[Array, ...], gradients: Triple) -> Triple:
    x, scale, offset, mean, inverse = saved
    dy, dmean, dvariance = gradients
    dy, centred, slope, count = dy.astype(mean.dtype), x - mean, scale * inverse, prod(x.shape[:3])
    total, along = (part.reshape(-1) for part in _sums(dy, centred, _PIXELS))
    tilt = (2 * dvariance - slope * inverse**2 * along) / count
    dx = slope * dy + tilt * centred + (dmean - slope * total) / count
    return dx.astype(x.dtype), (along * inverse).astype(scale.dtype), total.astype(offset.dtype)


batch_norm.defvjp(_remember, _backward)


def group_norm(
    x_NHWC: Images, scale: Channels, offset: Channels, groups: int, epsilon: float = EPSILON
) -> Images:
    """Each image normalised by the statistics of each of its groups of neighbouring channels."""
    unit = _standardised(x_NHWC.reshape(*x_NHWC.shape[:3], groups, -1), epsilon).reshape(x_NHWC.shape)
    return (unit * scale + offset).astype(x_NHWC.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _standardised(x_NHWGC: Array, epsilon: float) -> Array:
    """Mean 0 and variance 1 in each image's groups, in the wide type."""
    return _standardise(x_NHWGC, epsilon)[0]


def _standardise(x: Array, epsilon: float) -> tuple[Array, Triple]:
    mean, variance = _moments(x, x[:, :1, :1, :, :1], _GROUP)
    inverse = lax.rsqrt(variance + epsilon)
    return (x - mean) * inverse, (x, mean, inverse)


def _standardise_backward(epsilon: float, saved: Triple, dy: Array) -> tuple[Array]:
    x, mean, inverse = saved
    unit, count = (x - mean) * inverse, prod(x.shape[axis] for axis in _GROUP)
    total, along = _sums(dy, unit, _GROUP)
    dx = inverse * (dy - total / count - unit * (along / count))
    return (dx.astype(x.dtype),)


_standardised.defvjp(_standardise, _standardise_backward)


def _moments(x: Array, near: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and biased variance over `axes`, which are kept with size 1; `near` is any value of each set."""
    near = near.astype(wide(x.dtype))
    away, count = x - near, prod(x.shape[axis] for axis in axes)
    total, square = _sums(away, away, axes)
    mean = total / count
    return near + mean, jnp.maximum(square / count - mean**2, 0)


def _sums(u: Array, v: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The sums of `u` and of `u * v`, which XLA makes in one pass over both."""
    return u.sum(axes, keepdims=True), (u * v).sum(axes, keepdims=True)
