"""Residual networks of 6n + 2 layers for small images (He et al., 2015, section 4.2).

Three stacks of n basic blocks with 16, 32 and 64 filters; the shortcuts have no parameters. Any image size goes in.
"""

import re

from hotloop.families.cnn.drawing import INPUT, Drawing
from hotloop.families.cnn.pieces import Add, Conv, Logits, MeanPool, PadShortcut, Relu


def layers_of(model: str) -> int | None:
    """The layers that a name such as cifar_resnet20 asks for; None for other names and for numbers not 6n + 2."""
    found = re.fullmatch(r"cifar_resnet([1-9]\d{0,3})", model)
    layers = int(found[1]) if found else 0
    return layers if layers >= 8 and layers % 6 == 2 else None


def cifar_resnet(drawing: Drawing, layers: int, classes: int) -> None:
    """Draw the network of `layers` = 6n + 2 layers."""
    x = drawing.norm("conv1_bn", drawing.add("conv1_conv", Conv(16, 3), INPUT))
    x = drawing.add("conv1_relu", Relu(), x)
    for stack, filters in enumerate((16, 32, 64), start=2):
        for i in range(1, (layers - 2) // 6 + 1):
            stride = 2 if i == 1 and stack > 2 else 1
            x = _block(drawing, f"conv{stack}_block{i}", filters, stride, x)
    drawing.add("fc_layer", Logits(classes), drawing.add("avg_pool", MeanPool(), x))


def _block(drawing: Drawing, name: str, filters: int, stride: int, x: str) -> str:
    shortcut = x if stride == 1 else drawing.add(f"{name}_shortcut", PadShortcut(), x)
    strided = "_ds" if stride == 2 else ""
    y = drawing.add(f"{name}_layer1_conv{strided}", Conv(filters, 3, stride), x)
    y = drawing.add(f"{name}_layer1_relu", Relu(), drawing.norm(f"{name}_layer1_bn", y))
    y = drawing.add(f"{name}_layer2_conv", Conv(filters, 3), y)
    y = drawing.norm(f"{name}_layer2_bn", y)
    return drawing.add(f"{name}_post_addition_relu", Relu(), drawing.add(f"{name}_add", Add(), shortcut, y))
