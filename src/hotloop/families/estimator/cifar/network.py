"""The example's two networks as lists of layers, which may be run in parts: that of Keras' old CIFAR-10 example, and
the TF2 one with a convolution more. All draws are from a key for each sample, and every dropout has bytes of its own of
that key's, so that they are the same however a batch or a network is split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from hotloop.layers import initial
from hotloop.layers.conv import Padding, conv2d, max_pool
from hotloop.layers.dense import product, with_bias
from hotloop.layers.paths import Operation

Weights = dict[str, dict[str, Array]]
LEVELS = 256  # values of a random byte, which is enough where a rate is a multiple of 1/256


def random_bytes(keys: Array, sizes: Sequence[int]) -> list[Array]:
    """For each of the sizes an array [N, size] of uint8, where N samples bring a key each."""
    words = -(-sum(sizes) // 4)
    drawn = jax.vmap(lambda key: jax.random.bits(key, (words,), jnp.uint32))(keys)
    flat = cut_words(drawn)
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return jnp.split(flat, ends, axis=1)[: len(sizes)]


def _cut(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(len(words), 4 * words.shape[1])


def _cut_once(words: Array) -> Array:
    """Bytes that are written out: XLA:CPU would cut words in every fusion that reads a byte, number by number, and
    heeds no barrier. A loop has its result in memory; it makes one turn, or by a chance of 2^-32, which the compiler
    cannot rule out, the same one twice."""
    if words.size == 0:
        return _cut(words)
    turns = 1 + (words[0, 0] == 0).astype(jnp.int32)
    bytes_of_words: Array = lax.fori_loop(0, turns, lambda _, old: _cut(words), jnp.zeros_like(_cut(words)))
    return bytes_of_words


cut_words = Operation(_cut, cpu=("once", _cut_once))


def apply_dropout(x: Array, drawn: Array, rate: float) -> Array:
    """`x` [N, ...] with a share `rate` of its values zero, the others over `1 - rate`; `drawn` has a byte for each."""
    threshold = round(rate * LEVELS)
    if threshold != rate * LEVELS:
        raise ValueError(f"dropout rate {rate}: must be a multiple of 1/{LEVELS}")
    kept = drawn.reshape(x.shape) >= threshold
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # 4/3 itself would be rounded in 16 bits
    return jnp.where(kept, (wide * (1 / (1 - rate))).astype(x.dtype), 0)


def scale_pixels(images: Array, dtype: DTypeLike) -> Array:
    wide = jnp.promote_types(dtype, jnp.float32)
    return (jnp.asarray(images, wide) * (1 / 255)).astype(dtype)


@dataclass(frozen=True)
class Layer:
    kind: Literal["conv", "relu", "pool", "dropout", "flatten", "dense"]
    name: str = ""  # of its weights
    kernel: tuple[int, ...] = ()
    padding: Padding = "VALID"
    size: int = 0  # values of an image that a dropout sees
    rate: float = 0.0


RELU, POOL, FLATTEN = Layer("relu"), Layer("pool"), Layer("flatten")


@dataclass(frozen=True)
class Network:
    """Ten logits of images [N, 32, 32, 3]; `stage(start, stop)` runs the layers between two places of its list."""

    layers: tuple[Layer, ...]

    @property
    def parameters(self) -> int:
        return sum(prod(layer.kernel) + layer.kernel[-1] for layer in self.layers if layer.kernel)

    def init(self, key: Array) -> Weights:
        """Glorot-uniform kernels and zero biases, as Keras starts."""
        specs = {
            layer.name: {
                "kernel": initial.glorot_uniform(layer.kernel),
                "bias": initial.constant(layer.kernel[-1:]),
            }
            for layer in self.layers
            if layer.kernel
        }
        weights: Weights = initial.draw(key, specs)
        return weights

    def apply(
        self, weights: Weights, images: Array, *, train: bool = False, keys: Array | None = None
    ) -> Array:
        """Logits [N, 10] in float32 (or wider); dropout in training, from a key for each image."""
        return self.stage(0, len(self.layers))(weights, images, train=train, keys=keys)

    def cut(self, position: int) -> list[Callable[..., Array]]:
        """Two stages, the second of which begins with layer `position`, counted from 0."""
        return [self.stage(0, position), self.stage(position, len(self.layers))]

    def stage(self, start: int, stop: int) -> Callable[..., Array]:
        """The layers from `start` on, up to that before `stop`, as a stage of a ModelSpec."""
        return partial(self._run, start, stop)

    def _run(
        self,
        start: int,
        stop: int,
        weights: Weights,
        x: Array,
        *,
        train: bool = False,
        keys: Array | None = None,
    ) -> Array:
        layers, drawn = self.layers[start:stop], self._draw(keys) if train else {}
        if start == 0:
            x = scale_pixels(x, weights[layers[0].name]["kernel"].dtype)
        place = 0
        while place < len(layers):
            layer, following = layers[place], [each.kind for each in layers[place + 1 : place + 3]]
            place += 1
            has_relu = following == ["relu", "pool"]
            if layer.kind == "conv" and (has_relu or following[:1] == ["pool"]):
                x = _pooled(weights[layer.name], x, layer.padding, has_relu)
                place += 2 if has_relu else 1
            elif layer.kind == "conv":
                x = with_bias(
                    conv2d(x, weights[layer.name]["kernel"], padding=layer.padding),
                    weights[layer.name]["bias"],
                )
            elif layer.kind == "relu":
                x = jax.nn.relu(x)
            elif layer.kind == "pool":
                x = max_pool(x, 2, 2, 0)
            elif layer.kind == "dropout":
                x = apply_dropout(x, drawn[start + place - 1], layer.rate) if train else x
            elif layer.kind == "flatten":
                x = x.reshape(x.shape[0], -1)
            else:
                sums = _dense(weights[layer.name], x)
                x = sums if layer is self.layers[-1] else sums.astype(x.dtype)
        return x

    def _draw(self, keys: Array | None) -> dict[int, Array]:
        """The bytes of every dropout, by its place in the network's list."""
        if keys is None:
            raise ValueError("training needs a key for each image")
        places = [place for place, layer in enumerate(self.layers) if layer.kind == "dropout"]
        drawn = random_bytes(keys, [self.layers[place].size for place in places])
        return dict(zip(places, drawn, strict=True))


def _pooled(layer: dict[str, Array], x: Array, padding: Padding, has_relu: bool) -> Array:
    """Convolution, bias, ReLU, pool; the pool before the two others, as the largest stays it: a quarter of the work."""
    largest = with_bias(max_pool(conv2d(x, layer["kernel"], padding=padding), 2, 2, 0), layer["bias"])
    return jax.nn.relu(largest) if has_relu else largest


def _dense(layer: dict[str, Array], x: Array) -> Array:
    sums = product(x, layer["kernel"])
    return with_bias(sums, layer["bias"].astype(sums.dtype))


def _conv(name: str, inputs: int, outputs: int, padding: Padding = "VALID") -> Layer:
    return Layer("conv", name, (3, 3, inputs, outputs), padding)


def _network(first: Sequence[Layer], side: int, names: tuple[str, str]) -> Network:
    """All that follows the first block, whose pool leaves `side` x `side` x 32 values, is the same in both networks."""
    return Network(
        (
            *(*first, POOL, Layer("dropout", size=side * side * 32, rate=0.25)),
            *(_conv(names[0], 32, 64, "SAME"), RELU, _conv(names[1], 64, 64), RELU, POOL),
            *(Layer("dropout", size=6 * 6 * 64, rate=0.25), FLATTEN),
            *(Layer("dense", "dense1", (6 * 6 * 64, 512)), RELU, Layer("dropout", size=512, rate=0.5)),
            Layer("dense", "dense2", (512, 10)),
        )
    )


FIRST_BLOCK = (_conv("conv1", 3, 32, "SAME"), RELU, _conv("conv2", 32, 32), RELU)
KERAS = _network(FIRST_BLOCK, 15, ("conv3", "conv4"))
# The IPU's TF2 example has a third convolution here, and after it no ReLU.
TF2 = _network((*FIRST_BLOCK, _conv("conv3", 32, 32)), 14, ("conv4", "conv5"))
NETWORKS = {"keras": KERAS, "tf2": TF2}
