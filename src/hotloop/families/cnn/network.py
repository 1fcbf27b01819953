"""A network by name: its layers, its initial parameters and how it turns images into logits.

It is a flat list of named pieces, so that it can be run in part, from one named layer to another. It knows neither
losses nor updates; moving statistics are given to it and the batch's are handed back.

Inference with every batch norm folded into the convolution before it: its slope in the kernel, the rest a bias.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array

from hotloop.engine.precision import Policy
from hotloop.errors import OptionError
from hotloop.families.cnn.models import (
    DEPTHS,
    INPUT,
    NamedLayer,
    NetworkBuilder,
    Variant,
    build_cifar_resnet,
    build_resnet,
    build_toy,
    build_toy_with_norms,
    cifar_layers,
)
from hotloop.families.cnn.network_layers import BatchNorm, Conv
from hotloop.families.cnn.norms import NormChoice as NormChoice
from hotloop.layers.initial import Spec, draw
from hotloop.layers.norm import EPSILON

Params = dict[str, dict[str, Array]]
Statistics = dict[str, dict[str, Array]]
TOYS = {"toy_model": build_toy, "toy_model_bn": build_toy_with_norms}
MODELS = (*DEPTHS, *(f"cifar_resnet{layers}" for layers in (8, 20, 32, 44, 56)), *TOYS)
BATCH_NORM = NormChoice()


@dataclass(frozen=True)
class LayerInfo:
    """What a table says about a layer; a stage may begin at it if one value alone goes over the boundary."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    flops: int
    may_split: bool


@dataclass(frozen=True)
class Network:
    """A network of the registry for images of one shape; made by `build`, hashable."""

    model: str
    shape: tuple[int, int, int]
    classes: int
    norm: NormChoice = BATCH_NORM
    variant: Variant = "keras"

    @cached_property
    def placed(self) -> tuple[NamedLayer, ...]:
        """The pieces in order."""
        drawing = NetworkBuilder(self.shape, self.norm, EPSILON if self.variant == "keras" else 1e-5)
        if self.model in DEPTHS:
            build_resnet(drawing, self.model, self.classes, self.variant)
        elif layers := cifar_layers(self.model):
            build_cifar_resnet(drawing, layers, self.classes)
        else:
            TOYS[self.model](drawing, self.classes)
        return tuple(drawing.placed)

    @cached_property
    def layers(self) -> tuple[LayerInfo, ...]:
        """The layers in order."""
        return tuple(self._info(i, placed) for i, placed in enumerate(self.placed))

    def _info(self, i: int, placed: NamedLayer) -> LayerInfo:
        parameters = sum(prod(value.shape) for value in self.values(placed).values())
        flops = placed.piece.flops(self._shapes[placed.inputs[0]])
        split = i > 0 and len(self.crossing(i)) == 1
        return LayerInfo(placed.name, placed.piece.kind, placed.shape, parameters, flops, split)

    def values(self, placed: NamedLayer) -> dict[str, Spec]:
        """A piece's parameters, as what they start from."""
        return placed.piece.values(self._shapes[placed.inputs[0]])

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {INPUT: self.shape} | {placed.name: placed.shape for placed in self.placed}

    def position(self, layer: str) -> int:
        """The place of a layer in the order."""
        names = [placed.name for placed in self.placed]
        if layer not in names:
            raise OptionError(f"{self.model} has no layer {layer!r}; its layers are {', '.join(names)}")
        return names.index(layer)

    def crossing(self, position: int) -> tuple[str, ...]:
        """The values made before the layer at `position` that it or a later one reads."""
        made = [INPUT, *(placed.name for placed in self.placed[:position])]
        read = {x for placed in self.placed[position:] for x in placed.inputs}
        last = (made[-1],) if position == len(self.placed) else ()
        return tuple(name for name in made if name in read) or last

    def init(self, key: Array) -> tuple[Params, Statistics]:
        """Fresh float32 parameters, and statistics of mean 0 and variance 1 for each batch norm."""
        values = {placed.name: leaves for placed in self.placed if (leaves := self.values(placed))}
        statistics = {
            placed.name: {"mean": jnp.zeros(placed.shape[-1]), "variance": jnp.ones(placed.shape[-1])}
            for placed in self.placed
            if isinstance(placed.piece, BatchNorm)
        }
        return draw(key, values), statistics

    def apply(
        self, params: Params, statistics: Statistics, images_NHWC: Array, *, train: bool
    ) -> tuple[Array, Statistics]:
        """Float32 logits [N, classes] and, in training, the statistics of the batch at each batch norm.

        Without training, a norm for which there are no statistics is one that was folded away (`folding`).
        """
        values = {INPUT: images_NHWC}
        values, batch = self.run(params, statistics, values, 0, len(self.placed), train=train)
        return values[self.placed[-1].name], batch

    def run(
        self,
        params: Params,
        statistics: Statistics,
        values: Mapping[str, Array],
        start: int,
        stop: int,
        *,
        train: bool,
    ) -> tuple[dict[str, Array], Statistics]:
        """The layers `start` to `stop`, from the values that cross `start` to those that cross `stop`."""
        known, batch = dict(values), {}
        for placed in self.placed[start:stop]:
            name, leaves, xs = placed.name, params.get(placed.name, {}), [known[x] for x in placed.inputs]
            if not isinstance(placed.piece, BatchNorm):
                known[name] = placed.piece(leaves, *xs)
            elif train:
                known[name], batch[name] = placed.piece(leaves, *xs)
            elif name in statistics:
                known[name] = placed.piece.by(statistics[name], leaves, *xs)
            else:
                known[name] = placed.piece.shifted(leaves, *xs)
        return {name: known[name] for name in self.crossing(stop)}, batch


def build(
    model: str,
    shape: tuple[int, int, int],
    classes: int,
    norm: NormChoice = BATCH_NORM,
    variant: Variant = "keras",
) -> Network:
    """The network of that name for images of `shape` (rows, columns, channels)."""
    if model not in MODELS and not cifar_layers(model):
        raise OptionError(
            f"--model-name: there is no {model!r}; the models are {', '.join(MODELS)} "
            "and any other cifar_resnet of 6n + 2 layers"
        )
    if variant != "keras" and model not in DEPTHS:
        raise OptionError(f"--model-name: {model} has no variant {variant!r}: only {', '.join(DEPTHS)} have")
    if classes < 1:
        raise OptionError(f"--model-name: {model} needs at least one class, not {classes}")
    network = Network(model, (shape[0], shape[1], shape[2]), classes, norm, variant)
    network.layers  # noqa: B018 (refuses what does not fit before anything is compiled)
    return network


def inference_logits(network: Network, policy: Policy, state: Any, images: Array) -> Array:
    """Float32 logits [N, classes] by a state's `params` and `statistics`; images as the network sees them."""
    params, statistics = fold_norms(network, state["params"], state["statistics"])
    found, _ = network.apply(policy.to_compute(params), statistics, policy.to_compute(images), train=False)
    return found


def fold_norms(network: Network, params: Params, statistics: Statistics) -> tuple[Params, Statistics]:
    """Parameters with biases for norms, and the statistics of the norms that stay as they are."""
    into = _foldable_norms(network)
    made, left = dict(params), {name: each for name, each in statistics.items() if name not in into}
    for name, (norm, before) in into.items():
        own, seen = params[name], statistics[name]
        slope = own["scale"] / jnp.sqrt(seen["variance"] + norm.epsilon)  # float32, as statistics always are
        made[before] = {"kernel": params[before]["kernel"] * slope}
        made[name] = {"bias": own["offset"] - seen["mean"] * slope}
    return made, left


def _foldable_norms(network: Network) -> dict[str, tuple[BatchNorm, str]]:
    """Norm -> itself and the plain convolution that it alone reads."""
    pieces = {placed.name: placed.piece for placed in network.placed}
    readers = Counter(name for placed in network.placed for name in placed.inputs)
    found = {}
    for placed in network.placed:
        before = placed.inputs[0]
        source = pieces.get(before)
        if (
            isinstance(placed.piece, BatchNorm)
            and isinstance(source, Conv)
            and not source.biased_relu
            and readers[before] == 1
        ):
            found[placed.name] = (placed.piece, before)
    return found


def flops_per_image(network: Network) -> int:
    """Operations of one image's forward pass: two for each multiply-add of convolutions and products.

    Training takes three times as many, since each product has two gradients of the same cost.
    """
    return sum(layer.flops for layer in network.layers)
