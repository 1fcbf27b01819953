"""The named networks: their layers, their initial parameters and how they turn images into logits.

A network is a flat list of named layers, so that it can be run in part. ResNet-18 to -152 (He et al., 2015; the stride
in the 3x3 convolution, "v1.5") come in two variants: Keras' (a projection in the first block of every stack, SAME
padding) and torch's (a projection only where shapes differ, one pixel of padding on each side); layer names are Keras'.
The cifar_resnets have 6n + 2 layers (section 4.2 there) and shortcuts without parameters.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.engine.precision import Policy
from hotloop.errors import OptionError
from hotloop.families.cnn.options import MODELS, cifar_layers
from hotloop.layers import conv, initial, norm
from hotloop.layers.dense import product, wide, with_bias
from hotloop.layers.initial import Spec, draw
from hotloop.layers.norm import EPSILON
from hotloop.layers.paths import materialise_on_cpu
from hotloop.layers.pools import max_pool

Shape = tuple[int, ...]  # of one image's value: rows, columns, channels; or features
Leaves = dict[str, Array]
Params = dict[str, Leaves]
Statistics = dict[str, Leaves]
INPUT = "images"
Variant = Literal["keras", "torch"]
DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
BASIC = ("resnet18", "resnet34")
WIDTHS = (64, 128, 256, 512)
TORCH_EPSILON = 1e-5


class NetworkLayer:
    """What every layer offers; this one has neither parameters nor products, and keeps its input's shape.

    `shape` is that of the first input [rows, columns, channels] or [features], `xs` are the inputs [N, ...].
    """

    kind: ClassVar[str]  # one word for tables

    def shape(self, shape: Shape) -> Shape:
        """The output's."""
        return shape

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        """As what they start from."""
        return {}

    def flops(self, shape: Shape) -> int:
        """Two for each multiply-add of products and convolutions, for one image."""
        return 0

    def __call__(self, leaves: Leaves, *xs: Array) -> Any:
        raise NotImplementedError


class Relu(NetworkLayer):
    kind = "relu"

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return jax.nn.relu(xs[0])


class Add(NetworkLayer):
    """The sum of two inputs of one shape."""

    kind = "add"

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return xs[0] + xs[1]


@dataclass(frozen=True)
class PadShortcut(NetworkLayer):
    """The shortcut without parameters: every second row and column, and as many zero channels as there are."""

    kind: ClassVar[str] = "shortcut"

    def shape(self, shape: Shape) -> Shape:
        rows, columns, channels = shape
        return -(-rows // 2), -(-columns // 2), 2 * channels

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        thinned = xs[0][:, ::2, ::2]
        zero = np.zeros((), thinned.dtype)
        return lax.pad(thinned, zero, [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, thinned.shape[-1], 0)])


@dataclass(frozen=True)
class MaxPool(NetworkLayer):
    """The largest value of each window; padding never wins, and only whole windows count."""

    size: int
    stride: int
    padding: int = 0
    kind: ClassVar[str] = "max pool"

    def shape(self, shape: Shape) -> Shape:
        rows, columns = ((size + 2 * self.padding - self.size) // self.stride + 1 for size in shape[:2])
        return rows, columns, shape[2]

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return max_pool(xs[0], self.size, self.stride, self.padding)


class MeanPool(NetworkLayer):
    """The mean of each channel over the image, summed in float32 and rounded once to the type of the input."""

    kind = "mean pool"

    def shape(self, shape: Shape) -> Shape:
        return shape[2:]

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        (x,) = xs
        if x.dtype != wide(x.dtype):
            # Fused with the sum and ReLU before it, jaxlib 0.11.2 makes NaN of bfloat16 on a CPU with AMX.
            x = materialise_on_cpu(x)
        return x.mean((1, 2), dtype=wide(x.dtype)).astype(x.dtype)


class Flatten(NetworkLayer):
    kind = "flatten"

    def shape(self, shape: Shape) -> Shape:
        return (prod(shape),)

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return xs[0].reshape(len(xs[0]), -1)


@dataclass(frozen=True)
class Conv(NetworkLayer):
    """A square convolution, padded by a number of pixels on each side or by a rule; bias and ReLU go together."""

    filters: int
    size: int
    stride: int = 1
    padding: conv.Padding | int = "SAME"
    start: Literal["truncated", "glorot"] = "truncated"
    biased_relu: bool = False
    kind: ClassVar[str] = "conv"

    def shape(self, shape: Shape) -> Shape:
        rows, columns = (
            (size + low + high - self.size) // self.stride + 1
            for size, (low, high) in zip(shape, self._pads(shape), strict=False)
        )
        return rows, columns, self.filters

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        """Kernel [kh, kw, C, O], and a bias if there is one."""
        kernel = (self.size, self.size, shape[2], self.filters)
        start = (
            initial.truncated_normal(kernel) if self.start == "truncated" else initial.glorot_uniform(kernel)
        )
        return {"kernel": start} | ({"bias": initial.constant((self.filters,))} if self.biased_relu else {})

    def flops(self, shape: Shape) -> int:
        """Every output pixel is a product of the window with the kernel."""
        return 2 * prod(self.shape(shape)) * self.size**2 * shape[2]

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        y = conv.conv2d_padded(xs[0], leaves["kernel"], self.stride, self._pads(xs[0].shape[1:3]))
        return jax.nn.relu(with_bias(y, leaves["bias"])) if self.biased_relu else y

    def _pads(self, shape: Shape) -> conv.Pads:
        if isinstance(self.padding, int):
            return (self.padding, self.padding), (self.padding, self.padding)
        window, strides = (self.size, self.size), (self.stride, self.stride)
        rows, columns = lax.padtype_to_pads(shape[:2], window, strides, self.padding)
        return rows, columns


@dataclass(frozen=True)
class BatchNorm(NetworkLayer):
    """Batch normalisation; called, it uses the batch and hands its statistics back too."""

    gamma: float
    epsilon: float
    kind: ClassVar[str] = "batch norm"

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        return _scale_and_offset(shape, self.gamma)

    def __call__(self, leaves: Leaves, *xs: Array) -> tuple[Array, Leaves]:
        """Normalise by the batch; also its float32 mean and biased variance."""
        y, mean, variance = norm.batch_norm(xs[0], leaves["scale"], leaves["offset"], self.epsilon)
        return y, {"mean": mean, "variance": variance}

    def normalise_by(self, statistics: Leaves, leaves: Leaves, x: Array) -> Array:
        mean, variance = statistics["mean"], statistics["variance"]
        return norm.normalise(x, leaves["scale"], leaves["offset"], mean, variance, self.epsilon)

    def add_bias(self, leaves: Leaves, x: Array) -> Array:
        """What is left of a norm whose slope is in the kernel before it: added in the images' own type."""
        return x + leaves["bias"].astype(x.dtype)


@dataclass(frozen=True)
class GroupNorm(NetworkLayer):
    groups: int
    gamma: float
    epsilon: float
    kind: ClassVar[str] = "group norm"

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        return _scale_and_offset(shape, self.gamma)

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return norm.group_norm(xs[0], leaves["scale"], leaves["offset"], self.groups, self.epsilon)


def _scale_and_offset(shape: Shape, gamma: float) -> dict[str, Spec]:
    return {"scale": initial.constant(shape[-1:], gamma), "offset": initial.constant(shape[-1:])}


@dataclass(frozen=True)
class Logits(NetworkLayer):
    """The last, fully connected layer, kernel [features, classes]; its output stays in float32."""

    classes: int
    kind: ClassVar[str] = "dense"

    def shape(self, shape: Shape) -> Shape:
        return (self.classes,)

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        return {
            "kernel": initial.glorot_uniform((shape[0], self.classes)),
            "bias": initial.constant((self.classes,)),
        }

    def flops(self, shape: Shape) -> int:
        return 2 * shape[0] * self.classes

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        sums = product(xs[0], leaves["kernel"])
        return with_bias(sums, leaves["bias"].astype(sums.dtype))


@dataclass(frozen=True)
class NormChoice:
    """Batch normalisation with moving statistics, or group normalisation by number or by size of the groups."""

    kind: Literal["batch", "group"] = "batch"
    momentum: float = 0.97
    groups: int | None = None
    channels_per_group: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.groups, self.channels_per_group)
        if self.kind == "group" and sizes.count(None) != 1:
            raise OptionError(
                f"--norm-layer: group_norm has num_groups {self.groups} and channels_per_group "
                f"{self.channels_per_group}: give exactly one of them, e.g. {{name: group_norm, num_groups: 32}}"
            )
        if self.kind == "batch" and sizes != (None, None):
            raise OptionError("--norm-layer: num_groups and channels_per_group belong to group_norm")
        if any(size is not None and size < 1 for size in sizes):
            raise OptionError("--norm-layer: num_groups and channels_per_group must be at least 1")

    def count_groups(self, channels: int) -> int:
        """How many groups `channels` fall into."""
        size = self.channels_per_group or channels / (self.groups or 1)
        if channels % size or size != int(size):
            wanted = (
                f"num_groups {self.groups}"
                if self.groups
                else f"channels_per_group {self.channels_per_group}"
            )
            raise OptionError(
                f"--norm-layer: {wanted} does not divide a layer of {channels} channels: "
                "take a divisor of every layer's channels"
            )
        return channels // int(size)


BATCH_NORM = NormChoice()


@dataclass(frozen=True, eq=False)
class NamedLayer:
    """A layer at its place in a network: `inputs` are the names of what it reads, `shape` is its output's.

    Parameters are given as what they start from, `flops` count two for each multiply-add of one image's forward pass.
    """

    name: str
    layer: NetworkLayer
    inputs: tuple[str, ...]
    shape: Shape
    parameters: dict[str, Spec]
    flops: int

    @property
    def weights(self) -> int:
        return sum(prod(value.shape) for value in self.parameters.values())


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
        builder = NetworkBuilder(self.shape, self.norm, EPSILON if self.variant == "keras" else TORCH_EPSILON)
        if self.model in DEPTHS:
            _build_resnet(builder, self.model, self.classes, self.variant)
        elif self.model.startswith("cifar"):
            _build_cifar_resnet(builder, int(self.model.removeprefix("cifar_resnet")), self.classes)
        else:
            _build_toy(builder, self.classes, has_norms=self.model == "toy_model_bn")
        return tuple(builder.nodes)

    @property
    def flops(self) -> int:
        return sum(node.flops for node in self.nodes)

    def position(self, layer: str) -> int:
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

    def may_split(self, position: int) -> bool:
        """Whether a stage may begin at a layer: one value alone goes over the boundary."""
        return position > 0 and len(self.crossing(position)) == 1

    def init(self, key: Array) -> tuple[Params, Statistics]:
        """Fresh float32 parameters, and statistics of mean 0 and variance 1 for each batch norm."""
        values = {node.name: leaves for node in self.nodes if (leaves := node.parameters)}
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
    network.nodes  # noqa: B018 (refuses what does not fit before anything is compiled)
    return network


def inference_logits(network: Network, policy: Policy, state: Any, images: Array) -> Array:
    """Float32 logits [N, classes] by a state's `params` and `statistics`; images as the network sees them."""
    params, statistics = fold_norms(network, state["params"], state["statistics"])
    found, _ = network.apply(policy.to_compute(params), statistics, policy.to_compute(images), train=False)
    return found


def fold_norms(network: Network, params: Params, statistics: Statistics) -> tuple[Params, Statistics]:
    """Parameters with biases for norms, and the statistics of the norms that stay as they are.

    A norm's slope goes into the kernel of the convolution before it, the rest is a bias: a convolution, its bias and
    the ReLU are then one kernel on an NVIDIA GPU. Kernels are scaled in float32, before they are rounded.
    """
    foldable = _foldable_norms(network)
    folded, left = dict(params), {name: each for name, each in statistics.items() if name not in foldable}
    for name, (folding, before) in foldable.items():
        own, seen = params[name], statistics[name]
        slope = own["scale"] / jnp.sqrt(
            seen["variance"] + folding.epsilon
        )  # float32, as statistics always are
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


@dataclass
class NetworkBuilder:
    """Collects the layers; every method returns the name of the value it adds."""

    images: Shape
    normalisation: NormChoice
    epsilon: float
    nodes: list[NamedLayer] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes[INPUT] = self.images

    def add(self, name: str, layer: NetworkLayer, *inputs: str) -> str:
        first = self.shapes[inputs[0]]
        shape = layer.shape(first)
        if min(shape) < 1:
            size = "x".join(map(str, self.images))
            raise OptionError(
                f"--model-name: images of {size} are too small: {name} would have shape {shape}"
            )
        flops, parameters = layer.flops(first), layer.parameters(first)
        self.nodes.append(NamedLayer(name, layer, inputs, shape, parameters, flops))
        self.shapes[name] = shape
        return name

    def norm(self, name: str, x: str, gamma: float = 1.0) -> str:
        """The chosen normalisation, its scale starting from `gamma`; `conv1_bn` is `conv1_gn` with groups."""
        if self.normalisation.kind == "batch":
            return self.add(name, BatchNorm(gamma, self.epsilon), x)
        groups = self.normalisation.count_groups(self.shapes[x][-1])
        return self.add(name.replace("bn", "gn"), GroupNorm(groups, gamma, self.epsilon), x)

    def conv_norm_relu(self, name: str, conv: Conv, x: str, conv_name: str = "conv") -> str:
        y = self.norm(f"{name}_bn", self.add(f"{name}_{conv_name}", conv, x))
        return self.add(f"{name}_relu", Relu(), y)


def _build_resnet(builder: NetworkBuilder, model: str, classes: int, variant: Variant) -> None:
    """A basic block has two 3x3 convolutions; a bottleneck has 1x1, 3x3 and 1x1 to four times the width.

    A bottleneck without a projection starts as the identity.
    """
    basic = model in BASIC
    padding: conv.Padding | int = "SAME" if variant == "keras" else 1
    x = builder.conv_norm_relu("conv1", Conv(64, 7, 2, 3, "glorot"), INPUT)
    x = builder.add("pool1_pool", MaxPool(3, 2, 1), x)
    for stack, (depth, width) in enumerate(zip(DEPTHS[model], WIDTHS, strict=True), start=2):
        for i in range(1, depth + 1):
            name, stride = f"conv{stack}_block{i}", 2 if i == 1 and stack > 2 else 1
            projected = i == 1 and not (variant == "torch" and basic and stack == 2)
            shortcut = x
            if projected:
                y = builder.add(f"{name}_0_conv", Conv(width if basic else 4 * width, 1, stride), x)
                shortcut = builder.norm(f"{name}_0_bn", y)
            if basic:
                y = builder.conv_norm_relu(f"{name}_1", Conv(width, 3, stride, padding), x)
                y = builder.norm(f"{name}_2_bn", builder.add(f"{name}_2_conv", Conv(width, 3, 1, padding), y))
            else:
                y = builder.conv_norm_relu(f"{name}_1", Conv(width, 1), x)
                y = builder.conv_norm_relu(f"{name}_2", Conv(width, 3, stride, padding), y)
                y = builder.add(f"{name}_3_conv", Conv(4 * width, 1), y)
                y = builder.norm(f"{name}_3_bn", y, gamma=1.0 if projected else 0.0)
            x = builder.add(f"{name}_out", Relu(), builder.add(f"{name}_add", Add(), shortcut, y))
    builder.add("predictions", Logits(classes), builder.add("avg_pool", MeanPool(), x))


def _build_cifar_resnet(builder: NetworkBuilder, layers: int, classes: int) -> None:
    x = builder.conv_norm_relu("conv1", Conv(16, 3), INPUT)
    for stack, filters in enumerate((16, 32, 64), start=2):
        for i in range(1, (layers - 2) // 6 + 1):
            name, halved = f"conv{stack}_block{i}", i == 1 and stack > 2
            shortcut = builder.add(f"{name}_shortcut", PadShortcut(), x) if halved else x
            conv, conv_name = Conv(filters, 3, 2 if halved else 1), "conv_ds" if halved else "conv"
            y = builder.conv_norm_relu(f"{name}_layer1", conv, x, conv_name)
            y = builder.norm(f"{name}_layer2_bn", builder.add(f"{name}_layer2_conv", Conv(filters, 3), y))
            y = builder.add(f"{name}_add", Add(), shortcut, y)
            x = builder.add(f"{name}_post_addition_relu", Relu(), y)
    builder.add("fc_layer", Logits(classes), builder.add("avg_pool", MeanPool(), x))


def _build_toy(builder: NetworkBuilder, classes: int, has_norms: bool) -> None:
    x = INPUT
    for number, (filters, size) in enumerate(((4, 3), (8, 1))):
        conv = Conv(filters, size, 1, "VALID", "glorot", biased_relu=True)
        x = builder.add(f"pool_{number}", MaxPool(5, 5), builder.add(f"conv2d_{number}", conv, x))
        x = builder.norm(f"bn_{number}", x) if has_norms else x
    builder.add("dense", Logits(classes), builder.add("flatten", Flatten(), x))
