"""Encoded images to pixels and back, by pillow (extra `images`). The bytes are not trusted, so that few formats are
tried and the size is looked at first. Orientation tags are passed over, as ImageNet's users do."""

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hotloop.errors import MissingExtra

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]
# Pillow knows some forty more, and hands PostScript to another program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MOST_PIXELS = 1 << 26  # the largest of ImageNet has 61 million. A few hundred bytes may claim billions.
LONGEST_SIDE = 65_535  # as a JPEG's; what cuts and stretches images takes whole rows
_TOO_LARGE = f"too large: at most {LONGEST_SIDE:,} pixels a side and {MOST_PIXELS:,} in all are read"


class ImageError(ValueError):
    """Bytes that are no image, or not a whole one."""


@dataclass(frozen=True)
class CheckedImage:
    width: int
    height: int
    encoded: bytes  # an RGB or grey JPEG
    repaired: bool  # whether it was something else (PNG, CMYK, ...) and has been encoded anew


def pillow() -> Any:
    """The module PIL.Image; MissingExtra where pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("pillow", "images", "decoding images") from None
    return Image


def open_image(encoded: bytes, formats: Sequence[str] = FORMATS) -> "Image.Image":
    """The image with its header read and its pixels not yet; ImageError where it is none of `formats`."""
    return _open(io.BytesIO(encoded), formats)


def check_header(path: str) -> None:
    """ImageError where a file does not begin as an image does; no more of it is read."""
    with open(path, "rb") as file:  # noqa: PTH123 - a Path for each of a million images costs more
        _open(file, FORMATS)


def _open(file: BinaryIO, formats: Sequence[str]) -> "Image.Image":
    module = pillow()
    _silence(module.DecompressionBombWarning)
    try:
        image: Image.Image = module.open(file, formats=formats)
    except (module.DecompressionBombError, module.DecompressionBombWarning):
        raise ImageError(_TOO_LARGE) from None
    except module.UnidentifiedImageError:
        raise ImageError(f"not a {', '.join(formats[:-1])} or {formats[-1]} image") from None
    except Exception as error:  # plugins raise whatever broken bytes lead them to
        raise ImageError(_reason(error)) from None
    if image.width * image.height > MOST_PIXELS or max(image.size) > LONGEST_SIDE:
        raise ImageError(_TOO_LARGE)
    return image


def load_rgb(image: "Image.Image") -> "Image.Image":
    try:
        image.load()
        if image.mode.startswith("I"):  # sixteen bits a pixel, of which pillow would cut off all above 255
            image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode == "P" and "transparency" in image.info:  # pillow warns of the direct way
            image = image.convert("RGBA")
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:
        raise ImageError(_reason(error)) from None


def decode(encoded: bytes) -> Pixels:
    return np.asarray(load_rgb(open_image(encoded)))


def check_image(encoded: bytes) -> CheckedImage:
    """The image decoded once to see that it is whole, and repaired where it is no RGB or grey JPEG."""
    image = open_image(encoded)
    plain = image.format == "JPEG" and image.mode in ("RGB", "L")
    rgb = load_rgb(image)
    if not plain:
        out = io.BytesIO()
        try:
            rgb.save(out, "JPEG", quality=100, subsampling=0)  # as little is lost as a JPEG can lose
        except OSError as error:  # longer than a JPEG can be
            raise ImageError(f"{rgb.width:,} x {rgb.height:,} pixels do not fit a JPEG ({error})") from None
        encoded = out.getvalue()
    return CheckedImage(*rgb.size, encoded, repaired=not plain)


@cache
def _silence(category: type[Warning]) -> None:
    """Once a process, for what is too large is an error here; `catch_warnings` is not safe among threads."""
    warnings.filterwarnings("ignore", category=category)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or "not a whole image"
