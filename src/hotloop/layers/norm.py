"""Batch and group normalisation over the channels of NHWC images, statistics in float32 whatever the images' type.

Mean and variance come from one pass over the images: mean and mean square of their distance to one pixel, so that a
large common offset does not cancel the variance away. XLA's CPU reductions write out whatever is subtracted before they
sum, so there the sums are of the images themselves.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from hotloop.layers import native_norm
from hotloop.layers.dense import wide
from hotloop.layers.paths import Operation

EPSILON = 1.001e-5  # Keras' ResNets
Images = Float[Array, "N H W C"]
Channels = Float[Array, " C"]
Triple = tuple[Array, Array, Array]
_PIXELS = (0, 1, 2)
_GROUP = (1, 2, 4)  # of [N, H, W, G, C]
_FAR = 100  # squared mean over variance: beyond it E[x^2] - E[x]^2 keeps fewer than four digits


class ReplicaGroups(NamedTuple):
    """Places along a mapped axis that take their statistics together; every group is of one size."""

    axis: str
    places: tuple[tuple[int, ...], ...]

    def sum(self, values: Array) -> Array:
        """Over the group of this place."""
        total: Array = lax.psum(values, self.axis, axis_index_groups=self.places)  # type: ignore[no-untyped-call]
        return total

    @property
    def size(self) -> int:
        return len(self.places[0])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def batch_norm(
    x_NHWC: Images,
    scale: Channels,
    offset: Channels,
    epsilon: float = EPSILON,
    groups: ReplicaGroups | None = None,
) -> tuple[Images, Channels, Channels]:
    """The images normalised by their own statistics, and those: mean and biased variance of each channel.

    With `groups` they are the statistics of the images of all replicas of a group. A gradient by the images is then
    that of the group's losses together; one by scale or offset is this replica's part, to be summed over replicas.
    """
    mean, variance = (moment.reshape(-1) for moment in moments(x_NHWC, _middle(x_NHWC)[:1], axes=_PIXELS))
    if groups is not None:
        own, mean = mean, groups.sum(mean) / groups.size
        variance = groups.sum(variance + jnp.square(own - mean)) / groups.size
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


def _remember(
    x: Array, scale: Array, offset: Array, epsilon: float, groups: ReplicaGroups | None
) -> tuple[Triple, tuple[Array, ...]]:
    y, mean, variance = batch_norm(x, scale, offset, epsilon, groups)
    return (y, mean, variance), (x, scale, offset, mean, lax.rsqrt(variance + epsilon))


def _backward(
    epsilon: float, groups: ReplicaGroups | None, saved: tuple[Array, ...], gradients: Triple
) -> Triple:
    x, scale, offset, mean, inverse = saved
    dy, dmean, dvariance = gradients
    dy, slope, count = dy.astype(mean.dtype), scale * inverse, prod(x.shape[:3])
    sums = gradient_sums(dy, x, mean.reshape(1, 1, 1, -1), axes=_PIXELS)
    own_total, own_along = total, along = [part.reshape(-1) for part in sums]
    if groups is not None:
        total, along, dmean, dvariance = groups.sum(jnp.stack([total, along, dmean, dvariance]))
        count *= groups.size
    tilt = (2 * dvariance - slope * inverse**2 * along) / count
    dx = slope * dy + tilt * (x - mean) + (dmean - slope * total) / count
    return dx.astype(x.dtype), (own_along * inverse).astype(scale.dtype), own_total.astype(offset.dtype)


batch_norm.defvjp(_remember, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def batch_norm_joined(
    x_NHWC: Images,
    scale: Channels,
    offset: Channels,
    residual_NHWC: Images | None = None,
    epsilon: float = EPSILON,
    relu: bool = True,
) -> tuple[Images, Channels, Channels]:
    """`batch_norm`, then `residual` added and the ReLU of the sum: in one pass where a kernel has them together."""
    y: tuple[Array, Array, Array] = join(
        x_NHWC, scale, offset, *_given(residual_NHWC), epsilon=epsilon, relu=relu
    )
    return y


def _given(array: Array | None) -> tuple[Array, ...]:
    return () if array is None else (array,)


def _remember_joined(
    x: Array, scale: Array, offset: Array, residual: Array | None, epsilon: float, relu: bool
) -> tuple[Triple, tuple[Array, ...]]:
    y, mean, variance = batch_norm_joined(x, scale, offset, residual, epsilon, relu)
    output = () if residual is None else (y,)  # else it is worked out again
    return (y, mean, variance), (x, scale, offset, mean, variance, *output)


def _joined_backward(epsilon: float, relu: bool, saved: tuple[Array, ...], gradients: Triple) -> Any:
    dx, dscale, doffset, *dresidual = join_gradient(*gradients, *saved, epsilon=epsilon, relu=relu)
    return dx, dscale, doffset, dresidual[0] if dresidual else None


batch_norm_joined.defvjp(_remember_joined, _joined_backward)


def _join(x: Array, scale: Array, offset: Array, *residual: Array, epsilon: float, relu: bool) -> Triple:
    y, mean, variance = batch_norm(x, scale, offset, epsilon)
    total = sum(residual, start=y)
    return jax.nn.relu(total) if relu else total, mean, variance


def _join_gradient(
    dy: Array, dmean: Array, dvariance: Array, *saved: Array, epsilon: float, relu: bool
) -> tuple[Array, ...]:
    """Of x, scale and offset, and of what was added, where the output was saved with the rest."""
    x, scale, offset, mean, variance, *output = saved
    if relu:
        y = output[0] if output else normalise(x, scale, offset, mean, variance, epsilon)
        dy = jnp.where(y > 0, dy, 0)
    of_norm = (x, scale, offset, mean, lax.rsqrt(variance + epsilon))
    found = _backward(epsilon, None, of_norm, (dy, dmean, dvariance))
    return (*found, dy) if output else found


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
    mean, variance = moments(x, _middle(x)[..., :1], axes=_GROUP)
    inverse = lax.rsqrt(variance + epsilon)
    return (x - mean) * inverse, (x, mean, inverse)


def _standardise_backward(epsilon: float, saved: Triple, dy: Array) -> tuple[Array]:
    x, mean, inverse = saved
    count = prod(x.shape[axis] for axis in _GROUP)
    total, along = gradient_sums(dy, x, mean, axes=_GROUP)
    dx = inverse * (dy - total / count - (x - mean) * (inverse**2 * along / count))
    return (dx.astype(x.dtype),)


_standardised.defvjp(_standardise, _standardise_backward)


def _middle(x: Array) -> Array:
    """The pixel in the middle: those at the edges have seen padding and may be far from the others."""
    row, column = x.shape[1] // 2, x.shape[2] // 2
    return x[:, row : row + 1, column : column + 1]


def _moments_about(x: Array, near: Array, *, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and biased variance over `axes`, which are kept with size 1; `near` is any value of each set."""
    near = near.astype(wide(x.dtype))
    mean, variance = _raw_moments(x - near, axes)
    return near + mean, variance


def _moments_unless_far(x: Array, near: Array, *, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The same without subtracting, unless a mean is so far from zero that digits would be lost."""
    mean, variance = _raw_moments(x.astype(wide(x.dtype)), axes)
    far = (mean**2 > _FAR * variance).any()
    about = partial(_moments_about, x, near, axes=axes)
    shifted: tuple[Array, Array] = lax.cond(far, about, lambda: (mean, variance))
    return shifted


def _raw_moments(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    count = prod(x.shape[axis] for axis in axes)
    mean = x.sum(axes, keepdims=True) / count
    square = (x * x).sum(axes, keepdims=True) / count
    return mean, jnp.maximum(square - mean**2, 0)


def _sums_about(dy: Array, x: Array, mean: Array, *, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The sums of `dy` and of `dy * (x - mean)`."""
    return dy.sum(axes, keepdims=True), (dy * (x - mean)).sum(axes, keepdims=True)


def _sums_corrected(dy: Array, x: Array, mean: Array, *, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The same, the mean's part subtracted last: it costs no more digits than `x` lost when it was rounded."""
    total, along = dy.sum(axes, keepdims=True), (dy * x.astype(dy.dtype)).sum(axes, keepdims=True)
    return total, along - mean * total


join = Operation(_join, native_norm.FORWARD)
join_gradient = Operation(_join_gradient, native_norm.BACKWARD)
moments = Operation(_moments_about, cpu=("unshifted", _moments_unless_far))
gradient_sums = Operation(_sums_about, cpu=("unshifted", _sums_corrected))
