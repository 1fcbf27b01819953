"""Encoded images: which formats are opened, how large they may be, and what anything else gets."""

import io
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import hotloop
from hotloop.data import jpeg
from hotloop.data.jpeg import FORMATS, MOST_PIXELS, ImageError, check_image, decode, open_image
from pictures import encoded

pytest.importorskip("PIL")

SOURCE = Path(hotloop.__file__).parents[1]
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


def test_grey_of_sixteen_bits_keeps_its_upper_eight():
    from PIL import Image

    grey = np.linspace(0, 65535, 63).astype(np.uint16).reshape(7, 9)
    out = io.BytesIO()
    Image.fromarray(grey).save(out, "PNG")
    np.testing.assert_array_equal(decode(out.getvalue()), np.repeat((grey >> 8)[..., None], 3, axis=-1))


def test_a_palette_with_transparency_is_decoded_in_silence():
    from PIL import Image

    out, plain = io.BytesIO(), io.BytesIO()
    image = Image.open(io.BytesIO(encoded(9, 7, kind="PNG"))).convert("P")
    image.save(out, "PNG", transparency=bytes(range(256)))
    image.save(plain, "PNG")
    np.testing.assert_array_equal(decode(out.getvalue()), decode(plain.getvalue()))


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "PPM", "PCX", "TGA", "ICO", "SGI", "PDF", "EPS"])
def test_every_other_format_is_no_image(kind):
    with pytest.raises(ImageError, match=r"^not a JPEG, PNG, WEBP or BMP image$"):
        open_image(saved(kind))


def test_postscript_named_jpeg_starts_no_program_and_is_not_parsed(monkeypatch, tmp_path):
    from PIL import EpsImagePlugin, Image

    from hotloop.errors import DataError
    from hotloop.families.cnn.prediction import read_image

    Image.init()  # every plugin of pillow is there to be chosen
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", pytest.fail)
    monkeypatch.setattr(EpsImagePlugin.EpsImageFile, "_open", pytest.fail)
    (tmp_path / "2.jpeg").write_bytes(EPS)
    for reading in (decode, check_image):
        with pytest.raises(ImageError, match="not a JPEG"):
            reading(EPS)
    for dataset in ("imagenet", "cifar10"):
        with pytest.raises(DataError, match=r"2\.jpeg: not a whole image \(not a JPEG, "):
            read_image(tmp_path / "2.jpeg", (32, 32, 3), dataset)


@pytest.mark.parametrize(
    ("width", "height"),
    [(8193, 8192), (10_000, 10_000), (14_000, 14_000), (60_000, 60_000), (65_536, 1), (1, 1 << 26)],
)
def test_an_image_of_too_many_pixels_is_refused_before_its_pixels_are_read(width, height):
    """Also where pillow would only warn (from 90 million), or say so in its own words (from 180 million)."""
    with pytest.raises(
        ImageError, match=r"^too large: at most 65,535 pixels a side and 67,108,864 in all are read$"
    ):
        open_image(png(width, height))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(8192, 8192), (65_535, 1024), (1024, 65_535)])
def test_the_largest_images_are_cut_to_size_in_less_than_a_gibibyte(width, height):
    (peak,) = struct.unpack("q", in_child(CUT, width, height))
    assert peak < 1 << 30


CUT = """
import struct, sys
import numpy as np
from hotloop.data.image_stores import EncodedImage
from hotloop.engine.device import peak_bytes
from hotloop.families.cnn.photographs import evaluation_image, training_image
sys.path.insert(0, HERE)
from test_jpeg import png
image = EncodedImage(png(WIDTH, HEIGHT, rows=HEIGHT), 0, "")
evaluation_image(image, 224)
training_image(image, np.random.default_rng(0), 224)
sys.stdout.buffer.write(struct.pack("q", peak_bytes()))
"""


def in_child(text, width, height):
    """What a program printed, in a process whose memory is its own."""
    here = Path(__file__).parent
    for name, value in {"HERE": str(here), "WIDTH": width, "HEIGHT": height}.items():
        text = text.replace(name, repr(value))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, here.parent)))}
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, check=True
    ).stdout


def test_an_image_of_just_so_many_pixels_is_opened():
    assert open_image(png(8192, MOST_PIXELS // 8192)).size == (8192, MOST_PIXELS // 8192)


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
    with pytest.raises(ImageError, match="do not fit a JPEG"):
        check_image(png(65_530, 2, rows=2))


def test_images_are_opened_in_one_place_of_the_package():
    opening = re.compile(r"\b(Image|module|pillow\(\))\.open\(|from PIL\.Image import|import PIL")
    files = Path(hotloop.__file__).parent.rglob("*.py")
    found = {file for file in files if opening.search(file.read_text())}
    assert found == {Path(jpeg.__file__)}
