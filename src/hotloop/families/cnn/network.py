"""A network by name: its layers, its initial parameters and how it turns images into logits.

It is a flat list of named layers, so that it can be run in part, from one named layer to another. It knows neither
losses nor updates; moving statistics are given to it and the batch's are handed back.

For inference every batch norm is folded into the convolution before it: its slope in the kernel, the rest a bias. A
convolution, its bias and the ReLU are then one kernel on an NVIDIA GPU, and no normalised copy of its result is
written. Kernels are scaled in float32, before they are rounded to the type of the computation.
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
from hotloop.families.cnn.models import DEPTHS, INPUT, NamedLayer, NormChoice, Variant, build_layers
from hotloop.families.cnn.network_layers import BatchNorm, Conv, Shape
from hotloop.families.cnn.options import MODELS, cifar_layers
from hotloop.layers.initial import Spec, draw

Params = dict[str, dict[str, Array]]
Statistics = dict[str, dict[str, Array]]
BATCH_NORM = NormChoice()


@dataclass(frozen=True)
class LayerInfo:
    """What a table says about a layer; a stage may begin at it if one value alone goes over the boundary."""

    name: str
    kind: str
    shape: Shape
    parameters: int
    flops: int
    may_split: bool


@dataclass(frozen=True)
class Network:
    """A named network for images of one shape; made by `build`, hashable."""

    model: str
    shape: tuple[int, int, int]
    classes: int
    norm: NormChoice = BATCH_NORM
    variant: Variant = "keras"

    @cached_property
    def nodes(self) -> tuple[NamedLayer, ...]:
        return build_layers(self.model, self.shape, self.classes, self.norm, self.variant)

    @cached_property
    def layers(self) -> tuple[LayerInfo, ...]:
        """The layers in order, in figures."""
        return tuple(self._info(i, node) for i, node in enumerate(self.nodes))

    def _info(self, i: int, node: NamedLayer) -> LayerInfo:
        parameters = sum(prod(value.shape) for value in self.parameters(node).values())
        flops = node.layer.flops(self._shapes[node.inputs[0]])
        split = i > 0 and len(self.crossing(i)) == 1
        return LayerInfo(node.name, node.layer.kind, node.shape, parameters, flops, split)

    @property
    def flops(self) -> int:
        """Operations of one image's forward pass: two for each multiply-add of convolutions and products.

        Training takes three times as many, since each product has two gradients of the same cost.
        """
        return sum(layer.flops for layer in self.layers)

    def parameters(self, node: NamedLayer) -> dict[str, Spec]:
        """A layer's parameters, as what they start from."""
        return node.layer.parameters(self._shapes[node.inputs[0]])

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return {INPUT: self.shape} | {node.name: node.shape for node in self.nodes}

    def position(self, layer: str) -> int:
        """The place of a layer in the order."""
        names = [node.name for node in self.nodes]
        if layer not in names:
            raise OptionError(f"{self.model} has no layer {layer!r}; its layers are {', '.join(names)}")
        return names.index(layer)

    def crossing(self, position: int) -> tuple[str, ...]:
        """The values made before the layer at `position` that it or a later one reads."""
        made = [INPUT, *(node.name for node in self.nodes[:position])]
        read = {x for node in self.nodes[position:] for x in node.inputs}
        last = (made[-1],) if position == len(self.nodes) else ()
        return tuple(name for name in made if name in read) or last

    def init(self, key: Array) -> tuple[Params, Statistics]:
        """Fresh float32 parameters, and statistics of mean 0 and variance 1 for each batch norm."""
        values = {node.name: leaves for node in self.nodes if (leaves := self.parameters(node))}
        statistics = {
            node.name: {"mean": jnp.zeros(node.shape[-1]), "variance": jnp.ones(node.shape[-1])}
            for node in self.nodes
            if isinstance(node.layer, BatchNorm)
        }
        return draw(key, values), statistics

    def apply(
        self, params: Params, statistics: Statistics, images_NHWC: Array, *, train: bool
    ) -> tuple[Array, Statistics]:
        """Float32 logits [N, classes] and, in training, the statistics of the batch at each batch norm.

        Without training, a norm for which there are no statistics is one that was folded away (`fold_norms`).
        """
        values = {INPUT: images_NHWC}
        values, batch = self.run(params, statistics, values, 0, len(self.nodes), train=train)
        return values[self.nodes[-1].name], batch

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
        for node in self.nodes[start:stop]:
            name, leaves, xs = node.name, params.get(node.name, {}), [known[x] for x in node.inputs]
            if not isinstance(node.layer, BatchNorm):
                known[name] = node.layer(leaves, *xs)
            elif train:
                known[name], batch[name] = node.layer(leaves, *xs)
            elif name in statistics:
                known[name] = node.layer.normalise_by(statistics[name], leaves, *xs)
            else:
                known[name] = node.layer.add_bias(leaves, *xs)
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
    foldable = _foldable_norms(network)
    folded, left = dict(params), {name: each for name, each in statistics.items() if name not in foldable}
    for name, (norm, before) in foldable.items():
        own, seen = params[name], statistics[name]
        slope = own["scale"] / jnp.sqrt(seen["variance"] + norm.epsilon)  # float32, as statistics always are
        folded[before] = {"kernel": params[before]["kernel"] * slope}
        folded[name] = {"bias": own["offset"] - seen["mean"] * slope}
    return folded, left


def _foldable_norms(network: Network) -> dict[str, tuple[BatchNorm, str]]:
    """Norm -> itself and the plain convolution that it alone reads."""
    layers = {node.name: node.layer for node in network.nodes}
    readers = Counter(name for node in network.nodes for name in node.inputs)
    found = {}
    for node in network.nodes:
        before = node.inputs[0]
        source = layers.get(before)
        if (
            isinstance(node.layer, BatchNorm)
            and isinstance(source, Conv)
            and not source.biased_relu
            and readers[before] == 1
        ):
            found[node.name] = (node.layer, before)
    return found
