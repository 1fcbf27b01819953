"""Where ImageNet's photographs are cut: a random part for training, the middle for evaluation. Whole numbers only.

It must not touch pixels.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

AREAS, ASPECTS = (0.05, 1.0), (0.75, 1.33)
COVERED, ATTEMPTS = 0.1, 100
SHORT_SIDE = 256


@dataclass(frozen=True)
class Rectangle:
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class Sample:
    """Which pixels an output image is made of: place i along an axis is read at `first + i * step`."""

    left: float
    top: float
    step_x: float
    step_y: float


def random_crop(
    generator: np.random.Generator, width: int, height: int, boxes: NDArray[np.float32]
) -> Rectangle:
    """A part with a random aspect (0.75 to 1.33) and area (0.05 to 1 of the image) at a random place.

    It covers at least a tenth of one of the boxes, or of the image where there are none, which lets no part below a
    tenth through. Each of up to 100 attempts draws the aspect, then the height from those that give such an area;
    when all fail, the whole image is taken.
    """
    corners = boxes * np.array([width, height, width, height], np.float32)
    for _ in range(ATTEMPTS):
        crop = _attempt(generator, width, height)
        if crop is not None and _covers(crop, corners if len(boxes) else None, width * height):
            return crop
    return Rectangle(0, 0, width, height)


def _attempt(generator: np.random.Generator, width: int, height: int) -> Rectangle | None:
    aspect = generator.uniform(*ASPECTS)
    least, most = (share * width * height for share in AREAS)
    highest = min(round(sqrt(most / aspect)), height, int((width + 0.5) / aspect))
    lowest = min(round(sqrt(least / aspect)), highest)
    tall = int(generator.integers(lowest, highest + 1))
    wide = round(tall * aspect)
    if not (0 < wide <= width and tall > 0 and least <= wide * tall <= most):
        return None
    left, top = generator.integers(0, [width - wide + 1, height - tall + 1])
    return Rectangle(int(left), int(top), wide, tall)


def _covers(crop: Rectangle, corners: NDArray[np.float32] | None, image: int) -> bool:
    if corners is None:
        return crop.width * crop.height >= COVERED * image
    left, top, right, bottom = corners.T
    wide = np.minimum(right, crop.left + crop.width) - np.maximum(left, crop.left)
    tall = np.minimum(bottom, crop.top + crop.height) - np.maximum(top, crop.top)
    common = np.maximum(wide, 0) * np.maximum(tall, 0)
    return bool((common >= COVERED * (right - left) * (bottom - top)).any())


def whole(crop: Rectangle, size: int) -> Sample:
    """The crop stretched or shrunk to size x size, whatever its aspect; corners are not aligned."""
    return Sample(crop.left, crop.top, crop.width / size, crop.height / size)


def middle(width: int, height: int, size: int) -> Sample:
    """The middle size x size of the image resized to a short side of 256, sizes truncated and offsets floored.

    For another size than 224 the short side is in proportion.
    """
    short = SHORT_SIDE * size // 224
    resized = [side * short // min(width, height) for side in (width, height)]
    step_x, step_y = width / resized[0], height / resized[1]
    left, top = ((side - size) // 2 for side in resized)
    return Sample(left * step_x, top * step_y, step_x, step_y)
