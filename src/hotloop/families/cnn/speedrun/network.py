"""The network of the speedrun: a fixed whitening, three groups of two convolutions, a linear head. It knows no
training.

Channels last. Where a pool would drop the last row and column of a convolution's output they are not computed. Norms
have no scale, and are one function with the SiLU after them, whose backward pass works the normalised values out again
instead of reading them; a pool's has the place of each largest value in one byte.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from hotloop.families.cnn.speedrun.config import Recipe
from hotloop.layers import norm
from hotloop.layers.conv import conv2d, conv2d_padded
from hotloop.layers.initial import Spec, constant, draw

PATCH = 2  # pixels a side, of what is whitened
COLOURS, CLASSES = 3, 10
FILTERS = PATCH * PATCH * COLOURS
EPSILON = 1e-12
Params = dict[str, dict[str, Array]]
Statistics = dict[str, dict[str, Array]]


def layer_shapes(widths: tuple[int, ...]) -> dict[str, tuple[int, int, int, int]]:
    """The 3x3 kernels by name, [3, 3, in, out]."""
    inputs = (2 * FILTERS, *widths)
    shapes = {}
    for group, width in enumerate(widths):
        shapes[f"group{group}_first"] = (3, 3, inputs[group], width)
        shapes[f"group{group}_second"] = (3, 3, width, width)
    return shapes


def init(recipe: Recipe, key: Array) -> tuple[Params, Statistics]:
    """Uniform kernels whose first filters pass their input on, a head of deviation 1; statistics of 0 and 1."""
    shapes = layer_shapes(recipe.widths)

    def uniform(*shape: int) -> Spec:
        return Spec(shape, "uniform", prod(shape[:-1]) ** -0.5)

    params: Params = draw(
        key,
        {
            "whitening": {"bias": Spec((2 * FILTERS,), "uniform", FILTERS**-0.5)},
            "kernel": {name: uniform(*shape) for name, shape in shapes.items()},
            "offset": {name: constant(shape[-1:]) for name, shape in shapes.items()},
            "head": {"weight": uniform(recipe.widths[-1], CLASSES)},
        },
    )
    params["kernel"] = {name: _pass_on(kernel) for name, kernel in params["kernel"].items()}
    params["head"] = {"weight": params["head"]["weight"] / params["head"]["weight"].std(ddof=1)}
    zeros = params["offset"]
    statistics = {name: {"mean": each, "variance": jnp.ones_like(each)} for name, each in zeros.items()}
    return params, statistics


def _pass_on(kernel_HWIO: Array) -> Array:
    """The kernel with the first of its filters, one for each input, replaced by one that hands that input on."""
    inputs, outputs = kernel_HWIO.shape[2:]
    identity = np.zeros(kernel_HWIO.shape, np.float32)
    identity[1, 1] = np.eye(inputs, outputs)
    return jnp.where(np.arange(outputs) < inputs, identity, kernel_HWIO)


def whitening_filters(images_NHWC: Array, epsilon: float) -> Array:
    """[2, 2, colours, 12] in float32: the eigenvectors of the second moments of all patches, over the root of each
    one's eigenvalue plus `epsilon`, so that what they see has about the variance 1 and no correlation."""
    size = [extent - PATCH + 1 for extent in images_NHWC.shape[1:3]]
    shifts = [(i, j) for i in range(PATCH) for j in range(PATCH)]
    patches = jnp.concatenate(
        [images_NHWC[:, i : i + size[0], j : j + size[1]] for i, j in shifts], -1
    ).reshape(-1, FILTERS)
    moments = jnp.matmul(patches.T, patches, precision="highest") / len(patches)
    values, vectors = jnp.linalg.eigh(moments)
    scaled: Array = vectors / jnp.sqrt(values + epsilon)
    return scaled.reshape(PATCH, PATCH, COLOURS, FILTERS)


def apply(
    params: Params,
    statistics: Statistics,
    filters: Array,
    images_NHWC: Array,
    dtype: DTypeLike,
    *,
    train: bool,
) -> tuple[Array, Statistics]:
    """Float32 logits [N, classes] and, in training, mean and biased variance of the batch at each norm, by which
    it then goes; otherwise a norm goes by `statistics`."""
    kernels: Any = jax.tree.map(lambda kernel: kernel.astype(dtype), params["kernel"])
    found: Statistics = {}

    def normed(name: str, x: Array) -> Array:
        if not train:
            return silu_of_norm(x, params["offset"][name], **statistics[name])
        y, mean, variance = norm_silu(x, params["offset"][name])
        found[name] = {"mean": mean, "variance": variance}
        return y

    x = whiten(images_NHWC.astype(dtype), filters, params["whitening"]["bias"])
    for group in range(len(kernels) // 2):
        first, second = f"group{group}_first", f"group{group}_second"
        x = normed(first, max_pool(convolve_for_pool(x, kernels[first])))
        x = normed(second, conv2d(x, kernels[second]))
    features = x.max((1, 2))
    head = params["head"]["weight"].astype(dtype)
    logits = jnp.matmul(features, head, preferred_element_type=jnp.float32) / features.shape[-1]
    return logits, found


def whiten(images_NHWC: Array, filters: Array, bias: Array) -> Array:
    """The GELU of what each filter sees, and of its negative, with a bias each."""
    seen = conv2d(images_NHWC, filters.astype(images_NHWC.dtype), padding="VALID").astype(bias.dtype)
    both = jnp.concatenate([seen, -seen], -1) + bias
    return jax.nn.gelu(both, approximate=False).astype(images_NHWC.dtype)


def convolve_for_pool(x_NHWC: Array, kernel_HWIO: Array) -> Array:
    """A 3x3 convolution with one row and column of zeros around the image, of which rows and columns in pairs are made:
    a pool of 2x2 would drop a last odd one."""
    odd_rows, odd_columns = (size % 2 for size in x_NHWC.shape[1:3])
    # Written with the zeros by whatever made it: cuDNN takes the same padding on both sides alone.
    padded = jnp.pad(x_NHWC, ((0, 0), (1, 1 - odd_rows), (1, 1 - odd_columns), (0, 0)))
    return conv2d_padded(padded, kernel_HWIO, 1, ((0, 0), (0, 0)))


@jax.custom_vjp
def max_pool(x_NHWC: Array) -> Array:
    """The largest of each 2x2 pixels of an image of even size; its gradient goes to the first of equals."""
    return _find_largest(x_NHWC)[0]


def _find_largest(x: Array) -> tuple[Array, Array]:
    """And its place among the four, row by row."""
    images, height, width, channels = x.shape
    blocks = x.reshape(images, height // 2, 2, width // 2, 2, channels)
    largest, place = blocks[:, :, 0, :, 0], jnp.zeros((), jnp.uint8)
    for number in range(1, 4):
        value = blocks[:, :, number // 2, :, number % 2]
        place = jnp.where(value > largest, jnp.uint8(number), place)
        largest = jnp.maximum(largest, value)
    return largest, place


def _give_to_largest(place: Array, dy: Array) -> tuple[Array]:
    images, height, width, channels = dy.shape
    mine = np.arange(4, dtype=np.uint8).reshape(2, 1, 2, 1)
    given = jnp.where(place[:, :, None, :, None] == mine, dy[:, :, None, :, None], 0)
    return (given.reshape(images, 2 * height, 2 * width, channels),)


max_pool.defvjp(_find_largest, _give_to_largest)


def silu_of_norm(x: Array, offset: Array, mean: Array, variance: Array) -> Array:
    """In float32, rounded once to the type of the images."""
    return jax.nn.silu((x - mean) * lax.rsqrt(variance + EPSILON) + offset).astype(x.dtype)


@jax.custom_vjp
def norm_silu(x_NHWC: Array, offset: Array) -> tuple[Array, Array, Array]:
    """The SiLU of the images normalised by their own statistics, and those: mean and biased variance of each channel.

    The statistics have no gradient."""
    return _forward(x_NHWC, offset)[0]


def _forward(x: Array, offset: Array) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    middle = x[:1, x.shape[1] // 2, x.shape[2] // 2][:, None, None]  # any pixel that saw no zeros around
    mean, variance = (each.reshape(-1) for each in norm.moments(x, middle, axes=(0, 1, 2)))
    return (silu_of_norm(x, offset, mean, variance), mean, variance), (x, offset, mean, variance)


def _backward(saved: tuple[Array, ...], gradients: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    x, offset, mean, variance = saved
    inverse, count = lax.rsqrt(variance + EPSILON), prod(x.shape[:3])
    y = (x - mean) * inverse + offset
    share = jax.nn.sigmoid(y)
    dy = gradients[0].astype(y.dtype) * share * (1 + y * (1 - share))
    sums = norm.gradient_sums(dy, x, mean.reshape(1, 1, 1, -1), axes=(0, 1, 2))
    total, along = (each.reshape(-1) for each in sums)
    dx = inverse * (dy - total / count - (x - mean) * (inverse**2 * along / count))
    return dx.astype(x.dtype), total


norm_silu.defvjp(_forward, _backward)


def count_values(recipe: Recipe, images_shape: tuple[int, ...]) -> dict[str, int]:
    """How many values of a channel each norm sees in an update."""
    rows, columns = (size - PATCH + 1 for size in images_shape[:2])
    counts = {}
    for group in range(len(recipe.widths)):
        rows, columns = rows // 2, columns // 2
        for layer in ("first", "second"):
            counts[f"group{group}_{layer}"] = recipe.batch_size * rows * columns
    return counts
