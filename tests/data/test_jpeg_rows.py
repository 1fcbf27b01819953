"""JPEGs decoded from their top to the last row that is wanted: the same pixels as the whole image has, the same
refusals, and files that are not plain as before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.data import jpeg_rows
from hotloop.data.jpeg import ImageError, decode, load_rgb, open_image
from hotloop.data.jpeg_rows import read_rows, shorten
from pictures import DECODERS, encoded, use_decoder

pytest.importorskip("PIL")

WIDTH, HEIGHT = 133, 101
FORMS = {
    "full colours": {"subsampling": "4:4:4"},
    "halved across": {"subsampling": "4:2:2"},
    "halved": {"subsampling": "4:2:0"},
    "restart markers": {"subsampling": "4:2:0", "restart_marker_rows": 1},
    "own tables": {"optimize": True},
    "progressive": {"progressive": True},
    "comment": {"comment": b"\xff\xd9 in the midst \xff\xc0"},
}


def read(data, rows=HEIGHT, factor=1):
    return read_rows(open_image(data), data, rows, factor)


def reduced_by_pillow(data, factor):
    image = open_image(data)
    image.draft("RGB", (image.width // factor, image.height // factor))
    return np.asarray(load_rgb(image))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("form", FORMS)
def test_the_rows_are_those_of_the_whole_image(monkeypatch, decoder, mode, form):
    use_decoder(monkeypatch, decoder)
    options = {name: value for name, value in FORMS[form].items() if mode == "RGB" or name != "subsampling"}
    data = encoded(WIDTH, HEIGHT, 1, mode, quality=95, **options)
    whole = decode(data)
    for rows in range(1, HEIGHT + 1, 3):
        found, factor = read(data, rows)
        assert factor == 1 and found.shape[1:] == (WIDTH, 3) and len(found) >= rows
        np.testing.assert_array_equal(found[:rows], whole[:rows])
        if form != "progressive":
            assert len(found) <= rows + 2  # or nothing would be saved


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("form", ["full colours", "halved", "progressive"])
def test_reduced_rows_are_those_of_the_whole_reduced_image(monkeypatch, decoder, factor, form):
    use_decoder(monkeypatch, decoder)
    data = encoded(WIDTH, HEIGHT, 1, quality=95, **FORMS[form])
    whole = reduced_by_pillow(data, factor)
    for rows in range(1, HEIGHT + 1, 5):
        found, agreed = read(data, rows, factor)
        count = -(-rows // factor)
        assert agreed == factor and found.shape[1:] == whole.shape[1:] and len(found) >= count
        np.testing.assert_array_equal(found[:count], whole[:count])


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
def test_other_formats_are_read_as_a_whole_and_not_reduced(kind):
    data = encoded(WIDTH, HEIGHT, 1, kind=kind)
    found, factor = read(data, 10, 4)
    assert factor == 1
    np.testing.assert_array_equal(found, decode(data))


def test_a_cmyk_jpeg_is_read_as_pillow_reads_it():
    data = encoded(WIDTH, HEIGHT, 1, "CMYK")
    np.testing.assert_array_equal(read(data, 10)[0], decode(data))


def test_only_the_height_of_a_frame_is_changed():
    data = encoded(WIDTH, HEIGHT, 1)
    short = shorten(data, 300)
    assert open_image(short).size == (WIDTH, 300)
    changed = [place for place, (a, b) in enumerate(zip(data, short, strict=True)) if a != b]
    assert len(changed) == 2 and changed[1] == changed[0] + 1


def test_what_is_not_plain_is_not_shortened():
    data = encoded(WIDTH, HEIGHT, 1)
    progressive = encoded(WIDTH, HEIGHT, 1, progressive=True)
    for other in (
        b"",
        b"\xff\xd8\xff\xd9",
        data[:-2],
        data + b"\0",
        data[1:],
        progressive,
        b"\xff\xd8" + data,
    ):
        assert shorten(other, 10) is None


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("missing", [1, 2, 30, 1000])
def test_a_file_that_ends_too_early_is_refused_whatever_rows_are_wanted(monkeypatch, decoder, missing):
    use_decoder(monkeypatch, decoder)
    data = encoded(WIDTH, HEIGHT, 1, quality=95)[:-missing]
    for rows in (1, 50, HEIGHT):
        with pytest.raises(ImageError, match="truncated"):
            read(data, rows)


@pytest.mark.parametrize("decoder", DECODERS)
def test_bytes_after_the_end_are_passed_over_as_before(monkeypatch, decoder):
    use_decoder(monkeypatch, decoder)
    data = encoded(WIDTH, HEIGHT, 1)
    np.testing.assert_array_equal(read(data + b"\0\0more", 20)[0][:20], decode(data)[:20])


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.sampled_from([*FORMS]), st.integers(1, HEIGHT))
def test_broken_bytes_are_read_or_refused_as_pillow_does(seed, count, form, rows):
    """Where pillow takes the whole file its pixels come, where it refuses one an error: whoever decodes."""
    generator = np.random.default_rng(seed)
    data = bytearray(encoded(WIDTH, HEIGHT, 1, quality=95, **FORMS[form]))
    for place in generator.integers(2, len(data), count):
        # A marker where there should be none is what decoders refuse most.
        data[place : place + 2] = bytes([255, *generator.bytes(1)]) if count % 2 else generator.bytes(2)
    data = bytes(data)
    try:
        wanted = decode(data)
    except ImageError:
        with pytest.raises(ImageError):
            read(data, rows)
        return
    found = read(data, rows)[0]
    np.testing.assert_array_equal(found[:rows], wanted[:rows])


def test_where_simplejpeg_is_missing_it_is_said_what_brings_it(monkeypatch):
    use_decoder(monkeypatch, "pillow")
    assert "pillow decodes" in jpeg_rows.name_decoder()
    assert "pip install 'hotloop[images]'" in jpeg_rows.name_decoder()


def test_who_decodes_is_said(monkeypatch):
    use_decoder(monkeypatch, "simplejpeg")
    assert jpeg_rows.name_decoder() == "simplejpeg decodes"
