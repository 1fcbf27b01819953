"""The named networks: their layers, their initial parameters and how they turn images into logits.

A network is a flat list of named layers, so that it can be run in part. ResNet-18 to -152 (He et al., 2015; the stride
in the 3x3 convolution, "v1.5") come in two variants: Keras' (a projection in the first block of every stack, SAME
padding) and torch's (a projection only where shapes differ, one pixel of padding on each side); layer names are Keras'.
The cifar_resnets have 6n + 2 layers (section 4.2 there) and shortcuts without parameters; some are wider than there.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.engine.precision import Policy
from hotloop.errors import OptionError
from hotloop.families.cnn.options import MODELS, CifarSize, cifar_size
from hotloop.layers import conv, norm
from hotloop.layers.conv import max_pool
from hotloop.layers.dense import product, wide, with_bias
from hotloop.layers.initial import Spec, draw, draw_on_host, glorot_uniform, truncated_normal
from hotloop.layers.norm import ReplicaGroups
from hotloop.layers.paths import materialise_on_cpu

Shape = tuple[int, ...]  # of one image's value: rows, columns, channels; or features
Leaves = dict[str, Array]
Params = dict[str, Leaves]
Statistics = dict[str, Leaves]
INPUT = "images"
BATCH_NORM = "batch norm"
Variant = Literal["keras", "torch"]
DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
BASIC = ("resnet18", "resnet34")


@dataclass(frozen=True)
class NormChoice:
    """Batch normalisation with moving statistics, or group normalisation by number or by size of the groups."""

    kind: Literal["batch", "group"] = "batch"
    momentum: float = 0.97
    groups: int | None = None
    channels_per_group: int | None = None

    @classmethod
    def of(cls, layer: Mapping[str, Any]) -> "NormChoice":
        """What --norm-layer asks for; the momentum of running statistics is the old program's where it has none."""
        if layer["name"] == "group_norm":
            groups, size = layer.get("num_groups"), layer.get("channels_per_group")
            return cls("group", groups=groups, channels_per_group=size)
        return cls("batch", float(layer.get("momentum", 0.99 if layer["name"] == "batch_norm" else 0.97)))

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


@dataclass(frozen=True, eq=False)
class NamedLayer:
    """A layer at its place in a network: `inputs` are the names of what it reads, `shape` is its output's.

    `apply` takes its leaves and inputs [N, ...]; a batch norm has none, `Network.run` knows what it goes by. Parameters
    are given as what they start from, `flops` count two for each multiply-add of one image's forward pass.
    """

    name: str
    kind: str  # one or two words for tables
    inputs: tuple[str, ...]
    shape: Shape
    apply: Callable[..., Array] | None
    parameters: dict[str, Spec]
    flops: int
    biased: Callable[..., Array] | None = None
    """Of a convolution: `(leaves, x, bias, residual, relu)`, all of it in one pass where a kernel can."""

    @property
    def weights(self) -> int:
        return sum(prod(value.shape) for value in self.parameters.values())


@dataclass(frozen=True)
class Ending:
    """A batch norm with what alone reads it: a sum with `residual` and a ReLU, a ReLU, or nothing.

    A kernel that has them together gives the last one's value.
    """

    norm: str
    after: tuple[str, ...] = ()
    residual: str | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.norm, *self.after)

    @property
    def has_relu(self) -> bool:
        return bool(self.after)


@dataclass(frozen=True)
class Network:
    """A named network for images of one shape; made by `build`, hashable."""

    model: str
    shape: tuple[int, int, int]
    classes: int
    norm: NormChoice = NormChoice()
    variant: Variant = "keras"

    @cached_property
    def nodes(self) -> tuple[NamedLayer, ...]:
        builder = NetworkBuilder(self.shape, self.norm, self.epsilon)
        if self.model in DEPTHS:
            _build_resnet(builder, self.model, self.classes, self.variant)
        elif size := cifar_size(self.model):
            _build_cifar_resnet(builder, size, self.classes)
        else:
            _build_toy(builder, self.classes, has_norms=self.model == "toy_model_bn")
        return tuple(builder.nodes)

    @cached_property
    def endings(self) -> dict[str, Ending]:
        """By the name of a batch norm, and of a convolution that nothing but a batch norm reads."""
        norms = [node for node in self.nodes if node.kind == BATCH_NORM]
        found = {node.name: _find_ending(self.nodes, node.name) for node in norms}
        kinds = {node.name: node.kind for node in self.nodes}
        before = {node.inputs[0]: found[node.name] for node in norms}
        return found | {
            name: ending
            for name, ending in before.items()
            if kinds.get(name) == "conv" and _only_reader(self.nodes, name)
        }

    @property
    def epsilon(self) -> float:
        """What every norm adds to the variance."""
        return norm.EPSILON if self.variant == "keras" else 1e-5

    @property
    def flops(self) -> int:
        return sum(node.flops for node in self.nodes)

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
        # From the host: a device would compile a program for each number of channels.
        return draw(key, self._specs), jax.tree.map(jax.device_put, self._first_statistics())

    def init_on_host(self, key: Array) -> tuple[Any, Any]:
        """The same numbers as host arrays; no device ever holds more than a piece of them."""
        return draw_on_host(key, self._specs), self._first_statistics()

    @property
    def _specs(self) -> dict[str, dict[str, Spec]]:
        """What parameters start from."""
        return {node.name: node.parameters for node in self.nodes if node.parameters}

    def _first_statistics(self) -> Any:
        """As host arrays."""
        channels = {node.name: node.shape[-1] for node in self.nodes if node.kind == BATCH_NORM}
        return {
            name: {"mean": np.zeros(count, np.float32), "variance": np.ones(count, np.float32)}
            for name, count in channels.items()
        }

    def apply(
        self,
        params: Params,
        statistics: Statistics,
        images_NHWC: Array,
        *,
        train: bool,
        groups: ReplicaGroups | None = None,
        frozen: Statistics | None = None,
    ) -> tuple[Array, Statistics]:
        """Float32 logits [N, classes] and, in training, the statistics of the batch at each batch norm that is not
        frozen."""
        values, stop = {INPUT: images_NHWC}, len(self.nodes)
        values, batch = self.run(
            params, statistics, values, 0, stop, train=train, groups=groups, frozen=frozen
        )
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
        groups: ReplicaGroups | None = None,
        frozen: Statistics | None = None,
    ) -> tuple[dict[str, Array], Statistics]:
        """The layers `start` to `stop`, from the values that cross `start` to those that cross `stop`.

        A batch norm goes by the batch in training (with `groups`, by those of a group of replicas), whose float32 mean
        and biased variance come back too, and by its statistics otherwise; those that are `frozen` go by theirs in
        training, too. Where there are none, it was folded away (`fold_norms`): its bias is left.
        """
        known, batch, wanted = dict(values), Statistics(), self.crossing(stop)
        kept = (frozen or {}) if train else statistics
        joined: set[str] = set()
        for node in self.nodes[start:stop]:
            name, leaves = node.name, params.get(node.name, {})
            if name in joined:
                continue
            xs = [known[x] for x in node.inputs]
            by_batch = train and name not in kept
            can_join = (
                by_batch and self._can_join_norm(node, xs, groups)
                if train
                else self._can_join_bias(node, xs, params)
            )
            if can_join and (ending := self._ending(name, known, stop)):
                known[ending.layers[-1]], found = self._run_joined(node, ending, params, known)
                joined.update(ending.layers)
                batch |= found
            elif node.apply is not None:
                known[name] = node.apply(leaves, *xs)
            elif by_batch:
                known[name], mean, variance = norm.batch_norm(
                    xs[0], leaves["scale"], leaves["offset"], self.epsilon, groups
                )
                batch[name] = {"mean": mean, "variance": variance}
            elif name in kept:
                known[name] = norm.normalise(xs[0], **leaves, **kept[name], epsilon=self.epsilon)
            else:
                known[name] = xs[0] + leaves["bias"].astype(xs[0].dtype)
        return {name: known[name] for name in wanted}, batch

    def _can_join_norm(self, node: NamedLayer, xs: list[Array], groups: ReplicaGroups | None) -> bool:
        return node.kind == BATCH_NORM and groups is None and norm.join.may_be_native(*xs)

    def _can_join_bias(self, node: NamedLayer, xs: list[Array], params: Params) -> bool:
        """Whether it is a convolution whose norm was folded away."""
        ending = self.endings.get(node.name)
        if ending is None or node.kind == BATCH_NORM or "bias" not in params.get(ending.norm, {}):
            return False
        return conv.biased.may_be_native(*xs, params[node.name]["kernel"])

    def _ending(self, name: str, known: Mapping[str, Array], stop: int) -> Ending | None:
        """As much of a layer's ending as lies before `stop` and has its sum's other part known."""
        whole, later = self.endings[name], {node.name for node in self.nodes[stop:]}
        if later.isdisjoint(whole.layers) and whole.residual in (None, *known):
            return whole
        return None if whole.norm in later else Ending(whole.norm)

    def _run_joined(
        self, node: NamedLayer, ending: Ending, params: Params, known: Mapping[str, Array]
    ) -> tuple[Array, Statistics]:
        """The value of the ending's last layer, and a norm's statistics of the batch."""
        leaves, x = params[node.name], known[node.inputs[0]]
        residual = None if ending.residual is None else known[ending.residual]
        if node.biased is not None:
            bias = params[ending.norm]["bias"]
            return node.biased(leaves, x, bias, residual, ending.has_relu), Statistics()
        value, mean, variance = norm.batch_norm_joined(
            x, leaves["scale"], leaves["offset"], residual, self.epsilon, ending.has_relu
        )
        return value, {node.name: {"mean": mean, "variance": variance}}


def _only_reader(nodes: tuple[NamedLayer, ...], name: str) -> NamedLayer | None:
    readers = [node for node in nodes if name in node.inputs]
    return readers[0] if len(readers) == 1 else None


def _find_ending(nodes: tuple[NamedLayer, ...], name: str) -> Ending:
    reader = _only_reader(nodes, name)
    if reader is not None and reader.kind == "relu":
        return Ending(name, (reader.name,))
    if reader is not None and reader.kind == "add" and reader.inputs[1] == name != reader.inputs[0]:
        last = _only_reader(nodes, reader.name)
        if last is not None and last.kind == "relu":
            return Ending(name, (reader.name, last.name), reader.inputs[0])
    return Ending(name)


def build(
    model: str,
    shape: tuple[int, int, int],
    classes: int,
    norm: NormChoice = NormChoice(),
    variant: Variant = "keras",
) -> Network:
    """The network of that name for images of `shape` (rows, columns, channels)."""
    if model not in MODELS and not cifar_size(model):
        raise OptionError(
            f"--model-name: there is no {model!r}; the models are {', '.join(MODELS)} "
            "and any other cifar_resnet of 6n + 2 layers, x2 to x99 as wide"
        )
    if variant != "keras" and model not in DEPTHS:
        raise OptionError(f"--model-name: {model} has no variant {variant!r}: only {', '.join(DEPTHS)} have")
    if classes < 1:
        raise OptionError(f"--model-name: {model} needs at least one class, not {classes}")
    network = Network(model, (shape[0], shape[1], shape[2]), classes, norm, variant)
    network.nodes  # noqa: B018 (refuses what does not fit before anything is compiled)
    return network


def prepare_inference(network: Network, policy: Policy, state: Any) -> tuple[Params, Statistics]:
    """What `prepared_logits` needs of a state's `params` and `statistics`, whatever the images."""
    params, statistics = fold_norms(network, state["params"], state["statistics"])
    return policy.to_compute(params), statistics


def prepared_logits(
    network: Network, policy: Policy, prepared: tuple[Params, Statistics], images: Array
) -> Array:
    """Float32 logits [N, classes]; images as the network sees them."""
    params, statistics = prepared
    found, _ = network.apply(params, statistics, policy.to_compute(images), train=False)
    return found


def inference_logits(network: Network, policy: Policy, state: Any, images: Array) -> Array:
    """Both in one."""
    return prepared_logits(network, policy, prepare_inference(network, policy, state), images)


def fold_norms(network: Network, params: Params, statistics: Statistics) -> tuple[Params, Statistics]:
    """Parameters with biases for norms, and the statistics of the norms that stay as they are.

    The slope of a norm that alone reads a plain convolution goes into its kernel, the rest is a bias: a convolution,
    its bias and the ReLU are then one kernel on an NVIDIA GPU. Kernels are scaled in float32, before they are rounded.
    Of a stage's parameters and statistics, what both have is folded.
    """
    plain = {node.name for node in network.nodes if node.kind == "conv" and "bias" not in node.parameters}
    readers = Counter(name for node in network.nodes for name in node.inputs)
    folded, left = dict(params), dict(statistics)
    for node in network.nodes:
        name, before = node.name, node.inputs[0]
        if name in left and before in plain and before in params and readers[before] == 1:
            own, seen = params[name], left.pop(name)
            slope = own["scale"] / jnp.sqrt(seen["variance"] + network.epsilon)  # float32, as statistics are
            folded[before] = {"kernel": params[before]["kernel"] * slope}
            folded[name] = {"bias": own["offset"] - seen["mean"] * slope}
    return folded, left


class NetworkBuilder:
    """Collects the layers; every method returns the name of the value it adds."""

    def __init__(self, images: Shape, normalisation: NormChoice, epsilon: float):
        self.normalisation, self.epsilon = normalisation, epsilon
        self.nodes: list[NamedLayer] = []
        self.shapes = {INPUT: images}

    def add(
        self,
        kind: str,
        name: str,
        inputs: tuple[str, ...],
        shape: Shape,
        apply: Callable[..., Array] | None,
        parameters: dict[str, Spec] | None = None,
        flops: int = 0,
        biased: Callable[..., Array] | None = None,
    ) -> str:
        if min(shape) < 1:
            size = "x".join(map(str, self.shapes[INPUT]))
            raise OptionError(
                f"--model-name: images of {size} are too small: {name} would have shape {shape}"
            )
        self.nodes.append(NamedLayer(name, kind, inputs, shape, apply, parameters or {}, flops, biased))
        self.shapes[name] = shape
        return name

    def conv(
        self,
        name: str,
        x: str,
        filters: int,
        size: int,
        stride: int = 1,
        padding: conv.Padding | int = "SAME",
        *,
        start: Callable[[Shape], Spec] = truncated_normal,
        biased_relu: bool = False,
    ) -> str:
        """A square convolution, padded by a number of pixels on each side or by a rule; bias and ReLU go together."""
        *sides, channels = self.shapes[x]
        if isinstance(padding, int):
            rows = columns = (padding, padding)
        else:
            rows, columns = lax.padtype_to_pads(sides, (size, size), (stride, stride), padding)
        padded = (side + sum(pads) for side, pads in zip(sides, (rows, columns), strict=True))
        shape = (*((side - size) // stride + 1 for side in padded), filters)
        parameters = {"kernel": start((size, size, channels, filters))}
        if biased_relu:
            parameters["bias"] = Spec((filters,), "constant", 0.0)

        def apply(leaves: Leaves, x: Array) -> Array:
            y = conv.conv2d_padded(x, leaves["kernel"], stride, (rows, columns))
            return jax.nn.relu(with_bias(y, leaves["bias"])) if biased_relu else y

        def biased(leaves: Leaves, x: Array, bias: Array, residual: Array | None, relu: bool) -> Array:
            return conv.conv2d_biased(
                x, leaves["kernel"], bias, residual, stride=stride, pads=(rows, columns), relu=relu
            )

        flops = 2 * prod(shape) * size**2 * channels
        return self.add("conv", name, (x,), shape, apply, parameters, flops, None if biased_relu else biased)

    def norm(self, name: str, x: str, gamma: float = 1.0) -> str:
        """The chosen normalisation, its scale starting from `gamma`; `conv1_bn` is `conv1_gn` with groups."""
        shape, choice, epsilon = self.shapes[x], self.normalisation, self.epsilon
        channels = shape[-1]
        constants = {"scale": gamma, "offset": 0.0}
        parameters = {leaf: Spec((channels,), "constant", value) for leaf, value in constants.items()}
        if choice.kind == "batch":
            return self.add(BATCH_NORM, name, (x,), shape, None, parameters)
        size = choice.channels_per_group or channels / (choice.groups or 1)
        if channels % size or size != int(size):
            key, value = ("num_groups", choice.groups) if choice.groups else ("channels_per_group", size)
            raise OptionError(
                f"--norm-layer: {key} {value} does not divide a layer of {channels} channels: "
                "take a divisor of every layer's channels"
            )
        groups = channels // int(size)

        def apply(leaves: Leaves, x: Array) -> Array:
            return norm.group_norm(x, leaves["scale"], leaves["offset"], groups, epsilon)

        return self.add("group norm", name.replace("bn", "gn"), (x,), shape, apply, parameters)

    def relu(self, name: str, x: str) -> str:
        return self.add("relu", name, (x,), self.shapes[x], lambda leaves, x: jax.nn.relu(x))

    def norm_relu(self, name: str, x: str) -> str:
        return self.relu(f"{name}_relu", self.norm(f"{name}_bn", x))

    def sum(self, name: str, x: str, y: str) -> str:
        return self.add("add", name, (x, y), self.shapes[x], lambda leaves, x, y: x + y)

    def max_pool(self, name: str, x: str, size: int, stride: int, padding: int = 0) -> str:
        """The largest value of each window; padding never wins, and only whole windows count."""
        *sides, channels = self.shapes[x]
        shape = (*((side + 2 * padding - size) // stride + 1 for side in sides), channels)
        return self.add("max pool", name, (x,), shape, lambda leaves, x: max_pool(x, size, stride, padding))

    def pad_shortcut(self, name: str, x: str) -> str:
        """The shortcut without parameters: every second row and column, and as many zero channels as there are."""
        rows, columns, channels = self.shapes[x]

        def apply(leaves: Leaves, x: Array) -> Array:
            zero = np.zeros((), x.dtype)
            return lax.pad(x[:, ::2, ::2], zero, [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, channels, 0)])

        return self.add("shortcut", name, (x,), (-(-rows // 2), -(-columns // 2), 2 * channels), apply)

    def mean_pool(self, name: str, x: str) -> str:
        """The mean of each channel over the image, summed in float32 and rounded once to the type of the input."""

        def apply(leaves: Leaves, x: Array) -> Array:
            if x.dtype != wide(x.dtype):
                # Fused with the sum and ReLU before it, jaxlib 0.11.2 makes NaN of bfloat16 on a CPU with AMX.
                x = materialise_on_cpu(x)
            return x.mean((1, 2), dtype=wide(x.dtype)).astype(x.dtype)

        return self.add("mean pool", name, (x,), self.shapes[x][2:], apply)

    def flatten(self, name: str, x: str) -> str:
        shape = (prod(self.shapes[x]),)
        return self.add("flatten", name, (x,), shape, lambda leaves, x: x.reshape(x.shape[0], -1))

    def logits(self, name: str, x: str, classes: int) -> str:
        """The last, fully connected layer, kernel [features, classes]; its output stays in float32."""
        (features,) = self.shapes[x]
        kernel, bias = glorot_uniform((features, classes)), Spec((classes,), "constant", 0.0)

        def apply(leaves: Leaves, x: Array) -> Array:
            sums = product(x, leaves["kernel"])
            return with_bias(sums, leaves["bias"].astype(sums.dtype))

        parameters = {"kernel": kernel, "bias": bias}
        return self.add("dense", name, (x,), (classes,), apply, parameters, 2 * features * classes)


def _build_resnet(builder: NetworkBuilder, model: str, classes: int, variant: Variant) -> None:
    """A basic block has two 3x3 convolutions; a bottleneck has 1x1, 3x3 and 1x1 to four times the width.

    A bottleneck without a projection starts as the identity.
    """
    basic = model in BASIC
    padding: conv.Padding | int = "SAME" if variant == "keras" else 1
    x = builder.norm_relu("conv1", builder.conv("conv1_conv", INPUT, 64, 7, 2, 3, start=glorot_uniform))
    x = builder.max_pool("pool1_pool", x, 3, 2, 1)
    for stack, (depth, width) in enumerate(zip(DEPTHS[model], (64, 128, 256, 512), strict=True), start=2):
        for i in range(1, depth + 1):
            name, stride = f"conv{stack}_block{i}", 2 if i == 1 and stack > 2 else 1
            projected = i == 1 and not (variant == "torch" and basic and stack == 2)
            shortcut = x
            if projected:
                y = builder.conv(f"{name}_0_conv", x, width if basic else 4 * width, 1, stride)
                shortcut = builder.norm(f"{name}_0_bn", y)
            if basic:
                y = builder.conv(f"{name}_1_conv", x, width, 3, stride, padding)
                y = builder.conv(f"{name}_2_conv", builder.norm_relu(f"{name}_1", y), width, 3, 1, padding)
                y = builder.norm(f"{name}_2_bn", y)
            else:
                y = builder.norm_relu(f"{name}_1", builder.conv(f"{name}_1_conv", x, width, 1))
                y = builder.conv(f"{name}_2_conv", y, width, 3, stride, padding)
                y = builder.norm_relu(f"{name}_2", y)
                y = builder.conv(f"{name}_3_conv", y, 4 * width, 1)
                y = builder.norm(f"{name}_3_bn", y, gamma=1.0 if projected else 0.0)
            x = builder.relu(f"{name}_out", builder.sum(f"{name}_add", shortcut, y))
    builder.logits("predictions", builder.mean_pool("avg_pool", x), classes)


def _build_cifar_resnet(builder: NetworkBuilder, size: CifarSize, classes: int) -> None:
    widths = tuple(size.width * channels for channels in (16, 32, 64))
    x = builder.norm_relu("conv1", builder.conv("conv1_conv", INPUT, widths[0], 3))
    for stack, filters in enumerate(widths, start=2):
        for i in range(1, (size.layers - 2) // 6 + 1):
            name, halved = f"conv{stack}_block{i}", i == 1 and stack > 2
            shortcut = builder.pad_shortcut(f"{name}_shortcut", x) if halved else x
            stride, conv_name = (2, "conv_ds") if halved else (1, "conv")
            y = builder.norm_relu(
                f"{name}_layer1", builder.conv(f"{name}_layer1_{conv_name}", x, filters, 3, stride)
            )
            y = builder.norm(f"{name}_layer2_bn", builder.conv(f"{name}_layer2_conv", y, filters, 3))
            x = builder.relu(f"{name}_post_addition_relu", builder.sum(f"{name}_add", shortcut, y))
    builder.logits("fc_layer", builder.mean_pool("avg_pool", x), classes)


def _build_toy(builder: NetworkBuilder, classes: int, has_norms: bool) -> None:
    x = INPUT
    for number, (filters, size) in enumerate(((4, 3), (8, 1))):
        x = builder.conv(
            f"conv2d_{number}", x, filters, size, 1, "VALID", start=glorot_uniform, biased_relu=True
        )
        x = builder.max_pool(f"pool_{number}", x, 5, 5)
        x = builder.norm(f"bn_{number}", x) if has_norms else x
    builder.logits("dense", builder.flatten("flatten", x), classes)
