"""One of ImageNet's photographs from its encoded bytes to size x size pixels, on the host.

Bilinear, corners not aligned: output pixel i is read at i * (old size / new size), and four neighbours are weighed
without averaging over what is skipped. Bytes are the floats truncated. Random numbers come from (seed, epoch, number
of the image) alone. It must not know where the bytes came from, nor normalise them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.image_stores import EncodedImage
from hotloop.data.jpeg import Pixels, load_rgb, open_image, pillow
from hotloop.families.cnn.crops import Rectangle, Sample, middle, random_crop, whole

if TYPE_CHECKING:
    from PIL import Image

SIZE = 224
Resize = Callable[["Image.Image", Sample, int, bool], NDArray[Any]]
"""`in_bytes` or `in_floats`: image, sample, size, whether to mirror -> [size, size, 3]."""


def generator_for(seed: int, epoch: int, number: int) -> np.random.Generator:
    """The random numbers of one image in one epoch."""
    return np.random.default_rng((seed, epoch, number))


def training_image(
    image: EncodedImage, generator: np.random.Generator, size: int, resize: Resize, *, reduced: bool = True
) -> NDArray[Any]:
    """A random part, mirrored in half of the cases, [size, size, 3].

    `reduced` lets the JPEG decoder halve (quarter, ...) the image where the part keeps at least `size` pixels a side:
    faster, and smoother than reading every second pixel. Without it the pixels are those of the full decoding.
    """
    opening = open_image(image.encoded)
    crop = random_crop(generator, *opening.size, image.boxes)
    mirrored = bool(generator.integers(2))
    factor = _reduce(opening, _reduction(crop, size)) if reduced else 1
    pixels = load_rgb(opening)
    if factor > 1:
        return resize(pixels, _in_reduced(whole(crop, size), factor), size, mirrored)
    cut = pixels.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
    return resize(cut, whole(Rectangle(0, 0, crop.width, crop.height), size), size, mirrored)


def evaluation_image(image: EncodedImage, size: int, resize: Resize) -> NDArray[Any]:
    """The middle of the image, [size, size, 3]."""
    pixels = load_rgb(open_image(image.encoded))
    return resize(pixels, middle(*pixels.size, size), size, False)


def in_floats(image: "Image.Image", sample: Sample, size: int, mirrored: bool) -> NDArray[np.float32]:
    """The sample's size x size pixels as float32 between 0 and 255."""
    pixels = bilinear(np.asarray(image), sample, size)
    return pixels[:, ::-1] if mirrored else pixels


def in_bytes(image: "Image.Image", sample: Sample, size: int, mirrored: bool) -> Pixels:
    """The same truncated to bytes, by pillow in C where it can: several times as fast."""
    last_x = sample.left + (size - 1) * sample.step_x
    last_y = sample.top + (size - 1) * sample.step_y
    if last_x >= image.width - 0.5 or last_y >= image.height - 0.5:
        # pillow leaves pixels black that lie half a pixel beyond the last: images blown up more than twice.
        return in_floats(image, sample, size, mirrored).astype(np.uint8)
    step_x = -sample.step_x if mirrored else sample.step_x
    first_x = last_x if mirrored else sample.left
    # pillow asks at the middle of each output pixel and counts from the image's edge: half a pixel off at both ends.
    affine = (step_x, 0, first_x + 0.5 - step_x / 2, 0, sample.step_y, sample.top + 0.5 - sample.step_y / 2)
    module = pillow()
    return np.asarray(
        image.transform((size, size), module.Transform.AFFINE, affine, module.Resampling.BILINEAR)
    )


def bilinear(pixels: Pixels, sample: Sample, size: int) -> NDArray[np.float32]:
    """The sample's size x size values as floats, not truncated; the last row and column stand for what lies beyond."""
    places = np.arange(size, dtype=np.float64)
    top, bottom, weight_y = _neighbours(sample.top + places * sample.step_y, pixels.shape[0])
    left, right, weight_x = _neighbours(sample.left + places * sample.step_x, pixels.shape[1])
    weight = weight_x[None, :, None]

    def read(y: NDArray[np.intp], x: NDArray[np.intp]) -> NDArray[np.float32]:
        """Only the pixels that are read become floats: of a large photograph that is little."""
        return pixels[y[:, None], x].astype(np.float32)

    across = [read(y, left) * (1 - weight) + read(y, right) * weight for y in (top, bottom)]
    return across[0] + (across[1] - across[0]) * weight_y[:, None, None]


def _neighbours(
    at: NDArray[np.float64], length: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    lower = np.floor(at).astype(np.intp)
    weight = (at - lower).astype(np.float32)
    return np.clip(lower, 0, length - 1), np.clip(lower + 1, 0, length - 1), weight


def _reduction(crop: Rectangle, size: int) -> int:
    """The largest of the decoder's factors that leaves the crop at least `size` pixels a side."""
    room = min(crop.width, crop.height) // size
    return next(factor for factor in (8, 4, 2, 1) if factor <= max(room, 1))


def _reduce(image: "Image.Image", factor: int) -> int:
    """Ask the decoder for a smaller image; returns the factor it agrees to, 1 for anything but a JPEG."""
    if factor == 1:
        return 1
    width = image.width
    image.draft("RGB", (width // factor, image.height // factor))
    return round(width / image.width)


def _in_reduced(sample: Sample, factor: int) -> Sample:
    """The same places in an image whose pixels are the means of factor x factor old ones."""
    middle_of_first = (factor - 1) / 2
    return Sample(
        (sample.left - middle_of_first) / factor,
        (sample.top - middle_of_first) / factor,
        sample.step_x / factor,
        sample.step_y / factor,
    )
