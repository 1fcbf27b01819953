"""Encoded images to pixels and back, by pillow (extra `images`).

What an image is, its content says, not its name. Orientation tags are passed over, as ImageNet's users do. It must
not know where an image came from: whoever asks adds the name to `ImageError`.
"""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotloop.errors import MissingExtra

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]


class ImageError(ValueError):
    """Bytes that are no image, or not a whole one."""


@dataclass(frozen=True)
class Checked:
    """An image that decodes: its size, and the bytes of an RGB or grey JPEG."""

    width: int
    height: int
    encoded: bytes
    repaired: bool
    """Whether it was something else (PNG, CMYK, ...) and has been encoded anew."""


def pillow() -> Any:
    """The module PIL.Image; MissingExtra where pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("pillow", "images", "decoding images") from None
    return Image


def opened(encoded: bytes) -> "Image.Image":
    """The image with its header read and its pixels not yet."""
    module = pillow()
    try:
        image: Image.Image = module.open(io.BytesIO(encoded))
        return image
    except (OSError, ValueError, SyntaxError, module.DecompressionBombError) as error:
        raise ImageError(_reason(error)) from None


def loaded(image: "Image.Image") -> "Image.Image":
    """The image with its pixels, as RGB."""
    try:
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, ValueError, SyntaxError, IndexError) as error:
        raise ImageError(_reason(error)) from None


def decode(encoded: bytes) -> Pixels:
    """The pixels [height, width, 3]."""
    return np.asarray(loaded(opened(encoded)))


def encode(pixels: Pixels, quality: int = 90) -> bytes:
    """The pixels [height, width, 3] as a JPEG."""
    return _jpeg(pillow().fromarray(pixels), quality)


def checked(encoded: bytes) -> Checked:
    """The image decoded once to see that it is whole, and repaired where it is no RGB or grey JPEG."""
    image = opened(encoded)
    plain = image.format == "JPEG" and image.mode in ("RGB", "L")
    rgb = loaded(image)
    return Checked(*rgb.size, encoded if plain else _jpeg(rgb, 100, subsampling=0), repaired=not plain)


def _jpeg(image: "Image.Image", quality: int, **options: int) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality, **options)
    return out.getvalue()


def _reason(error: Exception) -> str:
    text = str(error)
    return "not an image" if "cannot identify" in text or not text else text
