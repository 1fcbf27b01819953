"""Encoded images: which formats are opened, how large they may be, and what anything else gets."""

import io
import re
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

import hotloop
from hotloop.data import jpeg
from hotloop.data.jpeg import FORMATS, MOST_PIXELS, ImageError, checked, decode, opened
from pictures import encoded

pytest.importorskip("PIL")

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
0 0 8 8 rectfill
showpage
%%EOF
"""


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, rows=1):
    """A grey PNG that declares so many pixels and holds `rows` rows of zeros."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * (width + 1) * rows)
    chunks = [png_chunk(b"IHDR", header), png_chunk(b"IDAT", pixels), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def saved(kind):
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 30, 60)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_formats_that_the_docs_name_are_decoded(kind):
    assert decode(encoded(9, 7, kind=kind)).shape == (7, 9, 3)
    docs = Path(hotloop.__file__).parents[2] / "docs" / "data.md"
    if docs.exists():
        assert f".{kind.lower()}" in docs.read_text()


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "PPM", "PCX", "TGA", "ICO", "SGI", "PDF", "EPS"])
def test_every_other_format_is_no_image(kind):
    with pytest.raises(ImageError, match=r"^not a JPEG, PNG, WEBP or BMP image$"):
        opened(saved(kind))


def test_postscript_named_jpeg_starts_no_program_and_is_not_parsed(monkeypatch, tmp_path):
    from PIL import EpsImagePlugin, Image

    from hotloop.errors import DataError
    from hotloop.families.cnn.prediction import read

    Image.init()  # every plugin of pillow is there to be chosen
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", pytest.fail)
    monkeypatch.setattr(EpsImagePlugin.EpsImageFile, "_open", pytest.fail)
    (tmp_path / "2.jpeg").write_bytes(EPS)
    for reading in (decode, checked):
        with pytest.raises(ImageError, match="not a JPEG"):
            reading(EPS)
    for dataset in ("imagenet", "cifar10"):
        with pytest.raises(DataError, match=r"2\.jpeg: not a whole image \(not a JPEG, "):
            read(tmp_path / "2.jpeg", (32, 32, 3), dataset)


@pytest.mark.parametrize("side", [8193, 10_000, 14_000, 60_000])
def test_an_image_of_too_many_pixels_is_refused_before_its_pixels_are_read(side):
    """Also where pillow would only warn (from 90 million), or say so in its own words (from 180 million)."""
    assert side * side > MOST_PIXELS
    with pytest.raises(ImageError, match=rf"^too large: more than {MOST_PIXELS:,} pixels$"):
        opened(png(side, side))


def test_an_image_of_just_so_many_pixels_is_opened():
    assert opened(png(8192, MOST_PIXELS // 8192)).size == (8192, MOST_PIXELS // 8192)


def test_whatever_a_decoder_raises_is_an_image_error(monkeypatch):
    from PIL import JpegImagePlugin

    for error in (KeyError("x"), struct.error("short"), zlib.error("bad"), AttributeError("no"), EOFError()):

        def fail(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(JpegImagePlugin.JpegImageFile, "load", fail)
            with pytest.raises(ImageError):
                decode(encoded(9, 7))


def test_an_image_too_long_for_a_jpeg_is_an_image_error_when_it_is_encoded_anew():
    with pytest.raises(ImageError):
        checked(png(66_000, 2, rows=2))


def test_images_are_opened_in_one_place_of_the_package():
    opening = re.compile(r"\b(Image|module|pillow\(\))\.open\(|from PIL\.Image import|import PIL")
    files = Path(hotloop.__file__).parent.rglob("*.py")
    found = {file for file in files if opening.search(file.read_text())}
    assert found == {Path(jpeg.__file__)}
