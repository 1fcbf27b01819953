"""The named networks: which layers each has, in which order, and what each layer reads.

`NetworkBuilder` works out shapes as layers are added and refuses images that are too small. ResNet-18 to -152 are for
ImageNet-like images (He et al., 2015; the stride in the 3x3 convolution, "v1.5"), in two variants of one topology:
Keras' (a projection in the first block of every stack, SAME padding) and torch's (a projection only where shapes
differ, one pixel of padding on each side); layer names are Keras'. The cifar_resnets have 6n + 2 layers (section 4.2
there): three stacks of n basic blocks, shortcuts without parameters. The toy has two convolutions and a dense layer:
the smallest network that has everything.
"""

from dataclasses import dataclass, field
from typing import Literal

from hotloop.errors import OptionError
from hotloop.families.cnn.network_layers import (
    Add,
    BatchNorm,
    Conv,
    Flatten,
    GroupNorm,
    Logits,
    MaxPool,
    MeanPool,
    NetworkLayer,
    PadShortcut,
    Relu,
    Shape,
)
from hotloop.families.cnn.options import cifar_layers
from hotloop.layers.conv import Padding
from hotloop.layers.norm import EPSILON

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


@dataclass(frozen=True)
class NamedLayer:
    """A layer at its place in a network: `inputs` are the names of what it reads, `shape` is its output's."""

    name: str
    layer: NetworkLayer
    inputs: tuple[str, ...]
    shape: Shape


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
        shape = layer.shape(*(self.shapes[x] for x in inputs))
        if min(shape) < 1:
            size = "x".join(map(str, self.images))
            raise OptionError(
                f"--model-name: images of {size} are too small: {name} would have shape {shape}"
            )
        self.nodes.append(NamedLayer(name, layer, inputs, shape))
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


def build_layers(
    model: str, shape: Shape, classes: int, norm: NormChoice, variant: Variant
) -> tuple[NamedLayer, ...]:
    """The layers of a network in order."""
    builder = NetworkBuilder(shape, norm, EPSILON if variant == "keras" else TORCH_EPSILON)
    if model in DEPTHS:
        _build_resnet(builder, model, classes, variant)
    elif layers := cifar_layers(model):
        _build_cifar_resnet(builder, layers, classes)
    else:
        _build_toy(builder, classes, has_norms=model == "toy_model_bn")
    return tuple(builder.nodes)


@dataclass(frozen=True)
class ResidualBlock:
    """One block's place and form."""

    name: str
    width: int
    stride: int
    projected: bool
    padding: Padding | int


def _build_resnet(builder: NetworkBuilder, model: str, classes: int, variant: Variant) -> None:
    x = builder.conv_norm_relu("conv1", Conv(64, 7, 2, 3, "glorot"), INPUT)
    x = builder.add("pool1_pool", MaxPool(3, 2, 1), x)
    basic = model in BASIC
    add_block = _add_basic_block if basic else _add_bottleneck
    for stack, (depth, width) in enumerate(zip(DEPTHS[model], WIDTHS, strict=True), start=2):
        for i in range(1, depth + 1):
            stride = 2 if i == 1 and stack > 2 else 1
            projected = i == 1 and not (variant == "torch" and basic and stack == 2)
            padding: Padding | int = "SAME" if variant == "keras" else 1
            block = ResidualBlock(f"conv{stack}_block{i}", width, stride, projected, padding)
            x = add_block(builder, block, x)
    builder.add("predictions", Logits(classes), builder.add("avg_pool", MeanPool(), x))


def _add_bottleneck(builder: NetworkBuilder, block: ResidualBlock, x: str) -> str:
    """1x1, 3x3 with the stride, 1x1 to four times the width; without a projection it starts as the identity."""
    name, width = block.name, block.width
    shortcut = _add_shortcut(builder, block, 4 * width, x)
    y = builder.conv_norm_relu(f"{name}_1", Conv(width, 1), x)
    y = builder.conv_norm_relu(f"{name}_2", Conv(width, 3, block.stride, block.padding), y)
    y = builder.add(f"{name}_3_conv", Conv(4 * width, 1), y)
    y = builder.norm(f"{name}_3_bn", y, gamma=1.0 if block.projected else 0.0)
    return builder.add(f"{name}_out", Relu(), builder.add(f"{name}_add", Add(), shortcut, y))


def _add_basic_block(builder: NetworkBuilder, block: ResidualBlock, x: str) -> str:
    """3x3 with the stride, 3x3."""
    name, width = block.name, block.width
    shortcut = _add_shortcut(builder, block, width, x)
    y = builder.conv_norm_relu(f"{name}_1", Conv(width, 3, block.stride, block.padding), x)
    y = builder.norm(f"{name}_2_bn", builder.add(f"{name}_2_conv", Conv(width, 3, 1, block.padding), y))
    return builder.add(f"{name}_out", Relu(), builder.add(f"{name}_add", Add(), shortcut, y))


def _add_shortcut(builder: NetworkBuilder, block: ResidualBlock, filters: int, x: str) -> str:
    if not block.projected:
        return x
    y = builder.add(f"{block.name}_0_conv", Conv(filters, 1, block.stride), x)
    return builder.norm(f"{block.name}_0_bn", y)


def _build_cifar_resnet(builder: NetworkBuilder, layers: int, classes: int) -> None:
    x = builder.conv_norm_relu("conv1", Conv(16, 3), INPUT)
    for stack, filters in enumerate((16, 32, 64), start=2):
        for i in range(1, (layers - 2) // 6 + 1):
            stride = 2 if i == 1 and stack > 2 else 1
            x = _add_cifar_block(builder, f"conv{stack}_block{i}", filters, stride, x)
    builder.add("fc_layer", Logits(classes), builder.add("avg_pool", MeanPool(), x))


def _add_cifar_block(builder: NetworkBuilder, name: str, filters: int, stride: int, x: str) -> str:
    shortcut = x if stride == 1 else builder.add(f"{name}_shortcut", PadShortcut(), x)
    conv_name = "conv_ds" if stride == 2 else "conv"
    y = builder.conv_norm_relu(f"{name}_layer1", Conv(filters, 3, stride), x, conv_name)
    y = builder.norm(f"{name}_layer2_bn", builder.add(f"{name}_layer2_conv", Conv(filters, 3), y))
    return builder.add(f"{name}_post_addition_relu", Relu(), builder.add(f"{name}_add", Add(), shortcut, y))


def _build_toy(builder: NetworkBuilder, classes: int, has_norms: bool) -> None:
    x = INPUT
    for number, (filters, size) in enumerate(((4, 3), (8, 1))):
        conv = Conv(filters, size, 1, "VALID", "glorot", biased_relu=True)
        x = builder.add(f"pool_{number}", MaxPool(5, 5), builder.add(f"conv2d_{number}", conv, x))
        x = builder.norm(f"bn_{number}", x) if has_norms else x
    builder.add("dense", Logits(classes), builder.add("flatten", Flatten(), x))
