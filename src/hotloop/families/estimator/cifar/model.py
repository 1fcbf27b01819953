"""The example's model_fn and its network, that of Keras' old CIFAR-10 example; and the augmentation of its images. All
draws are from a key for each sample, so that they are the same however a batch is split."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from hotloop.engine.keys import sample_keys
from hotloop.engine.optim import learning_rate
from hotloop.families.cnn.images import crop_and_flip, draw_crops
from hotloop.families.estimator.cifar.config import RECIPES, Recipe
from hotloop.families.estimator.config import Mode, ModelSpec
from hotloop.families.estimator.model import NamedBatch
from hotloop.layers import initial
from hotloop.layers.conv import Padding, conv2d, max_pool
from hotloop.layers.dense import product, with_bias
from hotloop.layers.losses import correct, cross_entropy

Weights = dict[str, dict[str, Array]]
CLASSES = 10
KERNELS: dict[str, tuple[int, ...]] = {
    "conv1": (3, 3, 3, 32),
    "conv2": (3, 3, 32, 32),
    "conv3": (3, 3, 32, 64),
    "conv4": (3, 3, 64, 64),
    "dense1": (2304, 512),
    "dense2": (512, 10),
}
PARAMETERS = sum(prod(shape) + shape[-1] for shape in KERNELS.values())
# Values of an image where dropout stands, after either pool and the first dense layer, and its rate.
DROPOUTS = ((15 * 15 * 32, 0.25), (6 * 6 * 64, 0.25), (512, 0.5))
LEVELS = 256  # values of a random byte, which is enough where a rate is a multiple of 1/256
REACH: dict[str, tuple[int, Literal["edge", "constant"]]] = {"shift": (3, "edge"), "crop": (4, "constant")}
"""How far each augmentation moves an image, and what comes in from beyond its border: the nearest pixel, or black."""


def random_bytes(keys: Array, sizes: Sequence[int]) -> list[Array]:
    """For each of the sizes an array [N, size] of uint8, where N samples bring a key each."""
    words = -(-sum(sizes) // 4)
    drawn = jax.vmap(lambda key: jax.random.bits(key, (words,), jnp.uint32))(keys)
    flat = lax.bitcast_convert_type(drawn, jnp.uint8).reshape(len(keys), 4 * words)
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return jnp.split(flat, ends, axis=1)[: len(sizes)]


def apply_dropout(x: Array, drawn: Array, rate: float) -> Array:
    """`x` [N, ...] with a share `rate` of its values zero, the others over `1 - rate`; `drawn` has a byte for each."""
    threshold = round(rate * LEVELS)
    if threshold != rate * LEVELS:
        raise ValueError(f"dropout rate {rate}: must be a multiple of 1/{LEVELS}")
    kept = drawn.reshape(x.shape) >= threshold
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # 4/3 itself would be rounded in 16 bits
    return jnp.where(kept, (wide * (1 / (1 - rate))).astype(x.dtype), 0)


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
    drawn: list[Array] = []
    if train:
        if keys is None:
            raise ValueError("training needs a key for each image")
        drawn = random_bytes(keys, [size for size, _ in DROPOUTS])

    def drop(x: Array, place: int) -> Array:
        return apply_dropout(x, drawn[place], DROPOUTS[place][1]) if train else x

    x = scale_pixels(images, weights["conv1"]["kernel"].dtype)
    x = jax.nn.relu(_conv(weights["conv1"], x, "SAME"))
    x = drop(_pooled(weights["conv2"], x), 0)
    x = jax.nn.relu(_conv(weights["conv3"], x, "SAME"))
    x = drop(_pooled(weights["conv4"], x), 1)
    x = x.reshape(len(x), -1)
    x = drop(jax.nn.relu(_dense(weights["dense1"], x).astype(x.dtype)), 2)
    return _dense(weights["dense2"], x)


def scale_pixels(images: Array, dtype: DTypeLike) -> Array:
    wide = jnp.promote_types(dtype, jnp.float32)
    return (jnp.asarray(images, wide) * (1 / 255)).astype(dtype)


def _conv(layer: dict[str, Array], x: Array, padding: Padding) -> Array:
    return with_bias(conv2d(x, layer["kernel"], padding=padding), layer["bias"])


def _pooled(layer: dict[str, Array], x: Array) -> Array:
    """Convolution, bias, ReLU, pool; the pool before the two others, as the largest stays it: a quarter of the work."""
    largest = max_pool(conv2d(x, layer["kernel"], padding="VALID"), 2, 2, 0)
    return jax.nn.relu(with_bias(largest, layer["bias"]))


def _dense(layer: dict[str, Array], x: Array) -> Array:
    sums = product(x, layer["kernel"])
    return with_bias(sums, layer["bias"].astype(sums.dtype))


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"momentum": 0}),
    "rmsprop": ("rmsprop_outside", {"decay": 0.9, "epsilon": 1e-7}),  # as Keras had it
    "adam": ("adam", {"b2": 0.99}),
}


def model_fn(mode: Mode, params: Mapping[str, Any]) -> ModelSpec:
    """The network for a mode; `params` are `recipe`, `learning_rate` and `updates`, the length of the whole run."""
    recipe = RECIPES[params["recipe"]]
    training = mode == Mode.TRAIN
    optimizer, rule = OPTIMIZERS[recipe.rule]
    return ModelSpec(
        init=init,
        apply=apply,
        loss=partial(cross_entropy, smoothing=recipe.smoothing if training else 0.0),
        metrics={"accuracy": correct},
        predictions=lambda logits: {"class": logits.argmax(-1), "probabilities": jax.nn.softmax(logits)},
        optimizer=optimizer if training else None,
        learning_rate=make_rate(recipe, params["learning_rate"], params["updates"]) if training else None,
        optimizer_params=rule if training else {},
        classes=CLASSES,
    )


def make_rate(recipe: Recipe, rate: float, updates: int) -> float | Callable[[Any], Any]:
    if recipe.peak is None:
        return (lambda update: rate / (1 + recipe.rate_decay * update)) if recipe.rate_decay else rate
    cycle = {"initial_learning_rate": rate, "peak_epoch": recipe.peak, "total_epochs": 1}
    return learning_rate("one_cycle", cycle, global_batch_size=1, updates_per_epoch=updates)


@cache
def find_transform(augmentation: str) -> Callable[[NamedBatch, Array], NamedBatch] | None:
    """What an augmentation does to a batch, always the same function; None where it does nothing."""
    if augmentation not in REACH:
        return None
    reach, fill = REACH[augmentation]

    def transform(batch: NamedBatch, key: Array) -> NamedBatch:
        crops = draw_crops(sample_keys(key, 0, len(batch["features"])), reach)
        return {**batch, "features": crop_and_flip(jnp.asarray(batch["features"]), crops, reach, fill)}

    return transform
