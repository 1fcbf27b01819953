"""Two convolutions and a dense layer: the smallest network that has everything, for trying things out."""

from hotloop.families.cnn.drawing import INPUT, Drawing
from hotloop.families.cnn.pieces import Conv, Flatten, Logits, MaxPool


def toy(drawing: Drawing, classes: int) -> None:
    """Draw the network without normalisation."""
    x = _stage(drawing, 0, Conv(4, 3, 1, "VALID", "glorot", biased_relu=True), INPUT)
    _head(drawing, classes, _stage(drawing, 1, Conv(8, 1, 1, "VALID", "glorot", biased_relu=True), x))


def toy_normalised(drawing: Drawing, classes: int) -> None:
    """Draw the network with a normalisation after each pool."""
    x = drawing.norm("bn_0", _stage(drawing, 0, Conv(4, 3, 1, "VALID", "glorot", biased_relu=True), INPUT))
    x = drawing.norm("bn_1", _stage(drawing, 1, Conv(8, 1, 1, "VALID", "glorot", biased_relu=True), x))
    _head(drawing, classes, x)


def _stage(drawing: Drawing, number: int, conv: Conv, x: str) -> str:
    return drawing.add(f"pool_{number}", MaxPool(5, 5), drawing.add(f"conv2d_{number}", conv, x))


def _head(drawing: Drawing, classes: int, x: str) -> None:
    drawing.add("dense", Logits(classes), drawing.add("flatten", Flatten(), x))
