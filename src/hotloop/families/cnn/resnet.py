"""ResNet-18 to -152 for ImageNet-like images (He et al., 2015; the stride in the 3x3 convolution, "v1.5").

Two variants of one topology: Keras' (a projection in the first block of every stack, SAME padding) and torch's (a
projection only where shapes differ, one pixel of padding on each side). Layer names are Keras'.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hotloop.families.cnn.drawing import INPUT, Drawing
from hotloop.families.cnn.pieces import Add, Conv, Logits, MaxPool, MeanPool, Relu
from hotloop.layers.conv import Padding

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
class Block:
    """One block's place and form."""

    name: str
    width: int
    stride: int
    projected: bool
    padding: Padding | int


def resnet(drawing: Drawing, model: str, classes: int, variant: Variant) -> None:
    """Draw stem, four stacks and head."""
    x = drawing.add("conv1_conv", Conv(64, 7, 2, 3, "glorot"), INPUT)
    x = drawing.add("conv1_relu", Relu(), drawing.norm("conv1_bn", x))
    x = drawing.add("pool1_pool", MaxPool(3, 2, 1), x)
    basic = model in BASIC
    block: Callable[[Drawing, Block, str], str] = basic_block if basic else bottleneck
    for stack, (depth, width) in enumerate(zip(DEPTHS[model], WIDTHS, strict=True), start=2):
        for i in range(1, depth + 1):
            stride = 2 if i == 1 and stack > 2 else 1
            projected = i == 1 and not (variant == "torch" and basic and stack == 2)
            padding: Padding | int = "SAME" if variant == "keras" else 1
            x = block(drawing, Block(f"conv{stack}_block{i}", width, stride, projected, padding), x)
    drawing.add("predictions", Logits(classes), drawing.add("avg_pool", MeanPool(), x))


def bottleneck(drawing: Drawing, block: Block, x: str) -> str:
    """1x1, 3x3 with the stride, 1x1 to four times the width; without a projection it starts as the identity."""
    width = block.width
    shortcut = _shortcut(drawing, block, 4 * width, x)
    y = _conv_norm_relu(drawing, f"{block.name}_1", Conv(width, 1), x)
    y = _conv_norm_relu(drawing, f"{block.name}_2", Conv(width, 3, block.stride, block.padding), y)
    y = drawing.add(f"{block.name}_3_conv", Conv(4 * width, 1), y)
    y = drawing.norm(f"{block.name}_3_bn", y, gamma=1.0 if block.projected else 0.0)
    return _join(drawing, block, shortcut, y)


def basic_block(drawing: Drawing, block: Block, x: str) -> str:
    """3x3 with the stride, 3x3."""
    shortcut = _shortcut(drawing, block, block.width, x)
    y = _conv_norm_relu(drawing, f"{block.name}_1", Conv(block.width, 3, block.stride, block.padding), x)
    y = drawing.add(f"{block.name}_2_conv", Conv(block.width, 3, 1, block.padding), y)
    return _join(drawing, block, shortcut, drawing.norm(f"{block.name}_2_bn", y))


def _shortcut(drawing: Drawing, block: Block, filters: int, x: str) -> str:
    if not block.projected:
        return x
    y = drawing.add(f"{block.name}_0_conv", Conv(filters, 1, block.stride), x)
    return drawing.norm(f"{block.name}_0_bn", y)


def _conv_norm_relu(drawing: Drawing, name: str, conv: Conv, x: str) -> str:
    y = drawing.norm(f"{name}_bn", drawing.add(f"{name}_conv", conv, x))
    return drawing.add(f"{name}_relu", Relu(), y)


def _join(drawing: Drawing, block: Block, shortcut: str, y: str) -> str:
    return drawing.add(f"{block.name}_out", Relu(), drawing.add(f"{block.name}_add", Add(), shortcut, y))
