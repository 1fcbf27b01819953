"""One of ImageNet's photographs from its encoded bytes to size x size pixels, on the host: cut, resampled, mirrored.

Bilinear, corners not aligned: output pixel i is read at i * (old size / new size), and four neighbours are weighed
without averaging over what is skipped. Bytes are the floats truncated. No jax: spawned workers import it.
"""

from collections.abc import Callable
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotloop.data.image_stores import EncodedImage
from hotloop.data.jpeg import Pixels, load_rgb, open_image, pillow

if TYPE_CHECKING:
    from PIL import Image

Index = NDArray[np.intp]
SIZE, SHORT_SIDE = 224, 256  # of what the network sees, and of the photograph that its middle is cut from
# The old program's random crop: shares of the area, width over height, least share of a box, and tries.
AREAS, ASPECTS, COVERED, ATTEMPTS = (0.05, 1.0), (0.75, 1.33), 0.1, 100


class Rectangle(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


class SamplingGrid(NamedTuple):
    """Which pixels an output image is made of: place i along an axis is read at `first + i * step`."""

    left: float
    top: float
    step_x: float
    step_y: float


def random_crop(
    generator: np.random.Generator, width: int, height: int, boxes: NDArray[np.float32]
) -> Rectangle:
    """A part with a random aspect (0.75 to 1.33) and area (0.05 to 1 of the image) at a random place.

    It covers at least a tenth of one of the boxes, or of the image where there are none. Each of up to 100 attempts
    draws the aspect, then the height from those that give such an area; when all fail, the whole image is taken.
    """
    whole = np.array([width, height, width, height], np.float32)
    lefts, tops, rights, bottoms = (boxes * whole).T if len(boxes) else np.array([[0, 0, width, height]]).T
    least, most = (share * width * height for share in AREAS)
    for _ in range(ATTEMPTS):
        aspect = generator.uniform(*ASPECTS)
        highest = min(round(sqrt(most / aspect)), height, int((width + 0.5) / aspect))
        lowest = min(round(sqrt(least / aspect)), highest)
        tall = int(generator.integers(lowest, highest + 1))
        wide = round(tall * aspect)
        if 0 < wide <= width and tall > 0 and least <= wide * tall <= most:
            left, top = map(int, generator.integers(0, [width - wide + 1, height - tall + 1]))
            across = np.minimum(rights, left + wide) - np.maximum(lefts, left)
            down = np.minimum(bottoms, top + tall) - np.maximum(tops, top)
            common = np.maximum(across, 0) * np.maximum(down, 0)
            if (common >= COVERED * (rights - lefts) * (bottoms - tops)).any():
                return Rectangle(left, top, wide, tall)
    return Rectangle(0, 0, width, height)


def grid_of_crop(crop: Rectangle, size: int) -> SamplingGrid:
    """The crop stretched or shrunk to size x size, whatever its aspect; corners are not aligned."""
    return SamplingGrid(crop.left, crop.top, crop.width / size, crop.height / size)


def grid_of_middle(width: int, height: int, size: int) -> SamplingGrid:
    """The middle size x size of the image resized to a short side of 256 (for other sizes than 224 in proportion),
    sizes truncated and offsets floored."""
    short = SHORT_SIDE * size // SIZE
    resized = [side * short // min(width, height) for side in (width, height)]
    step_x, step_y = width / resized[0], height / resized[1]
    left, top = ((side - size) // 2 for side in resized)
    return SamplingGrid(left * step_x, top * step_y, step_x, step_y)


Resample = Callable[["Image.Image", SamplingGrid, int, bool], NDArray[Any]]
"""`resample_bytes` or `resample_floats`: image, grid, size, whether to mirror -> [size, size, 3]."""


def training_image(
    image: EncodedImage,
    generator: np.random.Generator,
    size: int,
    resample: Resample,
    *,
    reduced: bool = True,
) -> NDArray[Any]:
    """A random part, mirrored in half of the cases, [size, size, 3].

    `reduced` lets the JPEG decoder halve (quarter, ...) the image where the part keeps at least `size` pixels a side:
    faster, and smoother than reading every second pixel. Without it the pixels are those of the full decoding.
    """
    opening = open_image(image.encoded)
    crop = random_crop(generator, *opening.size, image.boxes)
    mirrored = bool(generator.integers(2))
    wide = opening.width
    room = min(crop.width, crop.height) // size if reduced else 1
    if wanted := next((factor for factor in (8, 4, 2) if factor <= room), 0):
        opening.draft("RGB", (wide // wanted, opening.height // wanted))
    factor = round(wide / opening.width)  # what the decoder agreed to: 1 for all but JPEG
    pixels = load_rgb(opening)
    if factor > 1:
        # The same places in an image whose pixels are the means of factor x factor old ones.
        grid, middle_of_first = grid_of_crop(crop, size), (factor - 1) / 2
        left, top = ((start - middle_of_first) / factor for start in (grid.left, grid.top))
        reduced_grid = SamplingGrid(left, top, grid.step_x / factor, grid.step_y / factor)
        return resample(pixels, reduced_grid, size, mirrored)
    cut = pixels.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
    return resample(cut, grid_of_crop(Rectangle(0, 0, crop.width, crop.height), size), size, mirrored)


def evaluation_image(image: EncodedImage, size: int, resample: Resample) -> NDArray[Any]:
    """The middle of the image, [size, size, 3]."""
    pixels = load_rgb(open_image(image.encoded))
    return resample(pixels, grid_of_middle(*pixels.size, size), size, False)


def resample_floats(
    image: "Image.Image", grid: SamplingGrid, size: int, mirrored: bool
) -> NDArray[np.float32]:
    """The grid's size x size pixels as float32 from 0 to 255; the last row and column stand for what lies beyond."""
    pixels = np.asarray(image)

    def neighbours(first: float, step: float, length: int) -> tuple[Index, Index, NDArray[np.float32]]:
        at = first + np.arange(size, dtype=np.float64) * step
        lower = np.floor(at).astype(np.intp)
        weight = (at - lower).astype(np.float32)
        return np.clip(lower, 0, length - 1), np.clip(lower + 1, 0, length - 1), weight

    top, bottom, weight_y = neighbours(grid.top, grid.step_y, pixels.shape[0])
    left, right, weight_x = neighbours(grid.left, grid.step_x, pixels.shape[1])
    weight = weight_x[None, :, None]

    def read(y: Index, x: Index) -> NDArray[np.float32]:
        """Only the pixels that are read become floats: of a large photograph that is little."""
        return pixels[y[:, None], x].astype(np.float32)

    across = [read(y, left) * (1 - weight) + read(y, right) * weight for y in (top, bottom)]
    found = across[0] + (across[1] - across[0]) * weight_y[:, None, None]
    return found[:, ::-1] if mirrored else found


def resample_bytes(image: "Image.Image", grid: SamplingGrid, size: int, mirrored: bool) -> Pixels:
    """The same truncated to bytes, by pillow in C where it can: several times as fast."""
    last_x = grid.left + (size - 1) * grid.step_x
    last_y = grid.top + (size - 1) * grid.step_y
    if last_x >= image.width - 0.5 or last_y >= image.height - 0.5:
        # pillow leaves pixels black that lie half a pixel beyond the last: images blown up more than twice.
        return resample_floats(image, grid, size, mirrored).astype(np.uint8)
    step_x = -grid.step_x if mirrored else grid.step_x
    first_x = last_x if mirrored else grid.left
    # pillow asks at the middle of each output pixel and counts from the image's edge: half a pixel off at both ends.
    affine = (step_x, 0, first_x + 0.5 - step_x / 2, 0, grid.step_y, grid.top + 0.5 - grid.step_y / 2)
    module = pillow()
    return np.asarray(
        image.transform((size, size), module.Transform.AFFINE, affine, module.Resampling.BILINEAR)
    )
