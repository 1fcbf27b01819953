"""A network while it is put together: named pieces in order, each with the names of its inputs.

It works out shapes as pieces are added and refuses images that are too small. It knows no topology.

ResNet-18 to -152 for ImageNet-like images (He et al., 2015; the stride in the 3x3 convolution, "v1.5").
Residual networks of 6n + 2 layers for small images (He et al., 2015, section 4.2).
Two convolutions and a dense layer: the smallest network that has everything, for trying things out.
"""

import re
from collections.abc import Callable
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
from hotloop.families.cnn.norms import NormChoice
from hotloop.layers.conv import Padding

INPUT = "images"


@dataclass(frozen=True)
class NamedLayer:
    """A piece at its place in a network."""

    name: str
    piece: NetworkLayer
    inputs: tuple[str, ...]
    shape: Shape


@dataclass
class NetworkBuilder:
    """Collects the pieces; `add` and `norm` return the name of the value they add."""

    images: Shape
    normalisation: NormChoice
    epsilon: float
    placed: list[NamedLayer] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes[INPUT] = self.images

    def add(self, name: str, piece: NetworkLayer, *inputs: str) -> str:
        """Put `piece` last."""
        shape = piece.shape(*(self.shapes[x] for x in inputs))
        if min(shape) < 1:
            size = "x".join(map(str, self.images))
            raise OptionError(
                f"--model-name: images of {size} are too small: {name} would have shape {shape}"
            )
        self.placed.append(NamedLayer(name, piece, inputs, shape))
        self.shapes[name] = shape
        return name

    def norm(self, name: str, x: str, gamma: float = 1.0) -> str:
        """Put the chosen normalisation last, its scale starting from `gamma`."""
        if self.normalisation.kind == "batch":
            return self.add(name, BatchNorm(gamma, self.epsilon), x)
        groups = self.normalisation.groups_of(self.shapes[x][-1])
        return self.add(self.normalisation.named(name), GroupNorm(groups, gamma, self.epsilon), x)


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


@dataclass(frozen=True)
class ResidualBlock:
    """One block's place and form."""

    name: str
    width: int
    stride: int
    projected: bool
    padding: Padding | int


def build_resnet(drawing: NetworkBuilder, model: str, classes: int, variant: Variant) -> None:
    """Draw stem, four stacks and head."""
    x = drawing.add("conv1_conv", Conv(64, 7, 2, 3, "glorot"), INPUT)
    x = drawing.add("conv1_relu", Relu(), drawing.norm("conv1_bn", x))
    x = drawing.add("pool1_pool", MaxPool(3, 2, 1), x)
    basic = model in BASIC
    block: Callable[[NetworkBuilder, ResidualBlock, str], str] = (
        _add_basic_block if basic else _add_bottleneck
    )
    for stack, (depth, width) in enumerate(zip(DEPTHS[model], WIDTHS, strict=True), start=2):
        for i in range(1, depth + 1):
            stride = 2 if i == 1 and stack > 2 else 1
            projected = i == 1 and not (variant == "torch" and basic and stack == 2)
            padding: Padding | int = "SAME" if variant == "keras" else 1
            x = block(drawing, ResidualBlock(f"conv{stack}_block{i}", width, stride, projected, padding), x)
    drawing.add("predictions", Logits(classes), drawing.add("avg_pool", MeanPool(), x))


def _add_bottleneck(drawing: NetworkBuilder, block: ResidualBlock, x: str) -> str:
    """1x1, 3x3 with the stride, 1x1 to four times the width; without a projection it starts as the identity."""
    width = block.width
    shortcut = _add_shortcut(drawing, block, 4 * width, x)
    y = _add_conv_norm_relu(drawing, f"{block.name}_1", Conv(width, 1), x)
    y = _add_conv_norm_relu(drawing, f"{block.name}_2", Conv(width, 3, block.stride, block.padding), y)
    y = drawing.add(f"{block.name}_3_conv", Conv(4 * width, 1), y)
    y = drawing.norm(f"{block.name}_3_bn", y, gamma=1.0 if block.projected else 0.0)
    return _add_sum(drawing, block, shortcut, y)


def _add_basic_block(drawing: NetworkBuilder, block: ResidualBlock, x: str) -> str:
    """3x3 with the stride, 3x3."""
    shortcut = _add_shortcut(drawing, block, block.width, x)
    y = _add_conv_norm_relu(drawing, f"{block.name}_1", Conv(block.width, 3, block.stride, block.padding), x)
    y = drawing.add(f"{block.name}_2_conv", Conv(block.width, 3, 1, block.padding), y)
    return _add_sum(drawing, block, shortcut, drawing.norm(f"{block.name}_2_bn", y))


def _add_shortcut(drawing: NetworkBuilder, block: ResidualBlock, filters: int, x: str) -> str:
    if not block.projected:
        return x
    y = drawing.add(f"{block.name}_0_conv", Conv(filters, 1, block.stride), x)
    return drawing.norm(f"{block.name}_0_bn", y)


def _add_conv_norm_relu(drawing: NetworkBuilder, name: str, conv: Conv, x: str) -> str:
    y = drawing.norm(f"{name}_bn", drawing.add(f"{name}_conv", conv, x))
    return drawing.add(f"{name}_relu", Relu(), y)


def _add_sum(drawing: NetworkBuilder, block: ResidualBlock, shortcut: str, y: str) -> str:
    return drawing.add(f"{block.name}_out", Relu(), drawing.add(f"{block.name}_add", Add(), shortcut, y))


def cifar_layers(model: str) -> int | None:
    """The layers that a name such as cifar_resnet20 asks for; None for other names and for numbers not 6n + 2."""
    found = re.fullmatch(r"cifar_resnet([1-9]\d{0,3})", model)
    layers = int(found[1]) if found else 0
    return layers if layers >= 8 and layers % 6 == 2 else None


def build_cifar_resnet(drawing: NetworkBuilder, layers: int, classes: int) -> None:
    """Draw the network of `layers` = 6n + 2 layers."""
    x = drawing.norm("conv1_bn", drawing.add("conv1_conv", Conv(16, 3), INPUT))
    x = drawing.add("conv1_relu", Relu(), x)
    for stack, filters in enumerate((16, 32, 64), start=2):
        for i in range(1, (layers - 2) // 6 + 1):
            stride = 2 if i == 1 and stack > 2 else 1
            x = _add_cifar_block(drawing, f"conv{stack}_block{i}", filters, stride, x)
    drawing.add("fc_layer", Logits(classes), drawing.add("avg_pool", MeanPool(), x))


def _add_cifar_block(drawing: NetworkBuilder, name: str, filters: int, stride: int, x: str) -> str:
    shortcut = x if stride == 1 else drawing.add(f"{name}_shortcut", PadShortcut(), x)
    strided = "_ds" if stride == 2 else ""
    y = drawing.add(f"{name}_layer1_conv{strided}", Conv(filters, 3, stride), x)
    y = drawing.add(f"{name}_layer1_relu", Relu(), drawing.norm(f"{name}_layer1_bn", y))
    y = drawing.add(f"{name}_layer2_conv", Conv(filters, 3), y)
    y = drawing.norm(f"{name}_layer2_bn", y)
    return drawing.add(f"{name}_post_addition_relu", Relu(), drawing.add(f"{name}_add", Add(), shortcut, y))


def build_toy(drawing: NetworkBuilder, classes: int) -> None:
    """Draw the network without normalisation."""
    x = _add_toy_stage(drawing, 0, Conv(4, 3, 1, "VALID", "glorot", biased_relu=True), INPUT)
    _add_toy_head(
        drawing, classes, _add_toy_stage(drawing, 1, Conv(8, 1, 1, "VALID", "glorot", biased_relu=True), x)
    )


def build_toy_with_norms(drawing: NetworkBuilder, classes: int) -> None:
    """Draw the network with a normalisation after each pool."""
    x = drawing.norm(
        "bn_0", _add_toy_stage(drawing, 0, Conv(4, 3, 1, "VALID", "glorot", biased_relu=True), INPUT)
    )
    x = drawing.norm(
        "bn_1", _add_toy_stage(drawing, 1, Conv(8, 1, 1, "VALID", "glorot", biased_relu=True), x)
    )
    _add_toy_head(drawing, classes, x)


def _add_toy_stage(drawing: NetworkBuilder, number: int, conv: Conv, x: str) -> str:
    return drawing.add(f"pool_{number}", MaxPool(5, 5), drawing.add(f"conv2d_{number}", conv, x))


def _add_toy_head(drawing: NetworkBuilder, classes: int, x: str) -> None:
    drawing.add("dense", Logits(classes), drawing.add("flatten", Flatten(), x))
