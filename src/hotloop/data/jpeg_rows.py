"""The pixels of a JPEG from its top down to the last row that is wanted, at full size or reduced.

Whoever cuts a part out of a photograph needs nothing below it, and most of the time goes into the entropy coding: so
the decoder is given the file with a smaller height in its frame header. simplejpeg (libjpeg-turbo without pillow's
copies) decodes where it is installed, else pillow; the pixels are the same. Which bytes are an image, and which one
is broken, pillow decides in any case: it reads every header, and decodes whatever simplejpeg complains of.
"""

import importlib
import re
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from hotloop.data.jpeg import Pixels, load_rgb, open_image

if TYPE_CHECKING:
    from PIL import Image

_BEGIN, _END = b"\xff\xd8", b"\xff\xd9"
# One pass from top to bottom, Huffman codes. Progressive files go over the image many times.
_FRAMES = (0xC0, 0xC1)
# What may come before: tables, the restart interval, what applications add, comments.
_SEGMENTS = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)
_SCAN = 0xDA
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # not a byte of codes, a restart, or filling
_CONTEXT = 2  # rows below the last one that colours of half the height are mixed with


@cache
def find_simplejpeg() -> ModuleType | None:
    """The package, or None where it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def name_decoder() -> str:
    """Who decodes JPEGs, and what there is to do where it is not the faster one."""
    if find_simplejpeg():
        return "simplejpeg decodes"
    return "pillow decodes (some 15 % slower than simplejpeg, which pip install 'hotloop[images]' brings)"


def read_rows(opened: "Image.Image", encoded: bytes, rows: int, factor: int = 1) -> tuple[Pixels, int]:
    """[height, width, 3] of an image that has been opened: its first `rows` rows at least, both sides divided by a
    factor: the one that is asked for, or less where the format cannot; ImageError where it is broken.

    Above row `rows` (divided by the factor) the pixels are those of the whole image.
    """
    if opened.format == "JPEG" and opened.mode in ("RGB", "L"):
        width, height = opened.size
        few = min(height, (-(-rows // factor) + _CONTEXT) * factor)
        short = shorten(encoded, few) if few < height else None
        if short is None:
            pixels = _read_fast(encoded, width, height, factor, strict=True)
        else:  # what follows the last row is nothing to complain of
            pixels = _read_fast(short, width, few, factor, strict=False)
            opened = open_image(short) if pixels is None else opened
        if pixels is not None:
            return pixels, factor
    whole = opened.width
    if factor > 1:
        opened.draft("RGB", (whole // factor, opened.height // factor))
    agreed = round(whole / opened.width)  # 1 for all but JPEG
    return np.asarray(load_rgb(opened)), agreed


def shorten(encoded: bytes, rows: int) -> bytes | None:
    """The same JPEG with so many rows; None where it is not a plain one: a frame, a scan, the end.

    What is broken behind the rows must be seen without decoding it. Broken codes are noise to a decoder; what it
    refuses are a file without its end and markers that do not belong there, so neither is plain.
    """
    place = _find_height(encoded) if encoded.startswith(_BEGIN) else None
    if place is None:
        return None
    return b"".join((encoded[:place], rows.to_bytes(2, "big"), encoded[place + 2 :]))


def _find_height(encoded: bytes) -> int | None:
    """Where the frame header has the height; None where the file has anything but the usual segments, then one scan
    in which there are no markers but restarts, and whose end is the file's."""
    at, height = len(_BEGIN), None
    while at + 9 <= len(encoded) and encoded[at] == 0xFF:
        kind = encoded[at + 1]
        if kind in _FRAMES and height is None:
            height = at + 5
        elif kind not in _SEGMENTS and kind != _SCAN:
            return None
        at += 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")
        if kind == _SCAN:
            marker = _MARKER.search(encoded, at)
            return height if marker and encoded[marker.start() :] == _END else None
    return None


def _read_fast(encoded: bytes, width: int, height: int, factor: int, *, strict: bool) -> Pixels | None:
    """By simplejpeg; None where it is missing, or complains: of any fault if `strict`."""
    module = find_simplejpeg()
    if module is None:
        return None
    wide, tall = -(-width // factor), -(-height // factor)
    # Of its factors it takes the strongest that keeps these.
    least = {} if factor == 1 else {"min_width": wide, "min_height": tall}
    try:
        pixels: Pixels = module.decode_jpeg(encoded, strict=strict, **least)
    except ValueError:
        return None
    return pixels if pixels.shape == (tall, wide, 3) else None
