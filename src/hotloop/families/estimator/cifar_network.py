"""The example's network: four convolutions and two dense layers for 32x32 colour images, 1,250,858 parameters.

The topology is that of Keras' old CIFAR-10 example. It computes in the type of its weights; pixels between 0 and 255
come as bytes or as floats. It knows neither losses nor updates, and no estimator.
"""

from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hotloop.families.estimator.cifar_dropout import dropped, random_bytes
from hotloop.layers import initial
from hotloop.layers.conv import Padding, conv2d
from hotloop.layers.dense import product, with_bias
from hotloop.layers.pools import max_pool

Weights = dict[str, dict[str, Array]]

KERNELS: dict[str, tuple[int, ...]] = {
    "conv1": (3, 3, 3, 32),
    "conv2": (3, 3, 32, 32),
    "conv3": (3, 3, 32, 64),
    "conv4": (3, 3, 64, 64),
    "dense1": (2304, 512),
    "dense2": (512, 10),
}
PARAMETERS = sum(prod(shape) + shape[-1] for shape in KERNELS.values())
DROPOUTS = ((15 * 15 * 32, 0.25), (6 * 6 * 64, 0.25), (512, 0.5))
"""Values of an image where dropout stands, after either pool and the first dense layer, and its rate."""


def init(key: Array) -> Weights:
    """Glorot-uniform kernels and zero biases, as Keras starts."""
    specs = {
        name: {"kernel": initial.glorot_uniform(shape), "bias": initial.constant(shape[-1:])}
        for name, shape in KERNELS.items()
    }
    weights: Weights = initial.draw(key, specs)
    return weights


def apply(weights: Weights, images: Array, *, train: bool = False, keys: Array | None = None) -> Array:
    """Logits [N, 10] in float32 (or wider) of images [N, 32, 32, 3]; dropout in training, from a key for each image."""
    drops = iter(_dropouts(keys) if train else [])

    def drop(x: Array) -> Array:
        drawn = next(drops, None)
        return x if drawn is None else dropped(x, *drawn)

    x = scaled(images, weights["conv1"]["kernel"].dtype)
    x = jax.nn.relu(_conv(weights["conv1"], x, "SAME"))
    x = drop(_pooled(weights["conv2"], x))
    x = jax.nn.relu(_conv(weights["conv3"], x, "SAME"))
    x = drop(_pooled(weights["conv4"], x))
    x = x.reshape(len(x), -1)
    x = drop(jax.nn.relu(_dense(weights["dense1"], x).astype(x.dtype)))
    return _dense(weights["dense2"], x)


def scaled(images: Array, dtype: DTypeLike) -> Array:
    """Pixels between 0 and 255 as numbers between 0 and 1."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return (jnp.asarray(images, wide) * (1 / 255)).astype(dtype)


def _dropouts(keys: Array | None) -> list[tuple[Array, float]]:
    if keys is None:
        raise ValueError("training needs a key for each image")
    drawn = random_bytes(keys, [size for size, _ in DROPOUTS])
    return [(each, rate) for each, (_, rate) in zip(drawn, DROPOUTS, strict=True)]


def _conv(layer: dict[str, Array], x: Array, padding: Padding) -> Array:
    return with_bias(conv2d(x, layer["kernel"], padding=padding), layer["bias"])


def _pooled(layer: dict[str, Array], x: Array) -> Array:
    """Convolution, bias, ReLU, pool; the pool before the two others, as the largest stays it: a quarter of the work."""
    largest = max_pool(conv2d(x, layer["kernel"], padding="VALID"), 2, 2, 0)
    return jax.nn.relu(with_bias(largest, layer["bias"]))


def _dense(layer: dict[str, Array], x: Array) -> Array:
    sums = product(x, layer["kernel"])
    return with_bias(sums, layer["bias"].astype(sums.dtype))
