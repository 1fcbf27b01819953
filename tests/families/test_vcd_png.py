"""Pictures are read back by a small decoder of our own, which trusts nothing but the format's rules."""

import struct
import zlib

import numpy as np
import pytest

from hotloop.errors import RunError
from hotloop.families.vcd.samples import encode_png, write_png

SIGNATURE = bytes([137, 80, 78, 71, 13, 10, 26, 10])


def chunks(content: bytes):
    assert content[:8] == SIGNATURE
    at, found = 8, []
    while at < len(content):
        (length,) = struct.unpack_from(">I", content, at)
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", content, at + 8 + length)[0] == zlib.crc32(kind + body)
        found.append((kind, body))
        at += 12 + length
    assert at == len(content)
    return found


def decoded(content: bytes) -> np.ndarray:
    (_, header), (_, packed), (_, end) = found = chunks(content)
    assert [kind for kind, _ in found] == [b"IHDR", b"IDAT", b"IEND"] and end == b""
    width, height, *rest = struct.unpack(">IIBBBBB", header)
    assert rest == [8, 0, 0, 0, 0]  # 8 bits, greyscale, deflate, the one filter method, not interlaced
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()  # no line is filtered
    return lines[:, 1:]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (7, 3), (28, 28), (40, 300)])
def test_a_picture_reads_back_as_it_was(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    np.testing.assert_array_equal(decoded(encode_png(pixels)), pixels)


def test_a_picture_that_is_a_view_reads_back_as_it_was():
    pixels = np.arange(60, dtype=np.uint8).reshape(6, 10).T[::2]
    np.testing.assert_array_equal(decoded(encode_png(pixels)), pixels)


def test_another_decoder_agrees_where_there_is_one(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, (9, 5), np.uint8)
    write_png(tmp_path / "a.png", pixels)
    with image.open(tmp_path / "a.png") as opened:
        assert opened.mode == "L"
        np.testing.assert_array_equal(np.asarray(opened), pixels)


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((2, 2)), np.zeros(4, np.uint8), np.zeros((2, 2, 3), np.uint8), np.zeros((0, 3), np.uint8)],
)
def test_what_is_no_picture_is_refused(wrong):
    with pytest.raises(ValueError, match="height, width"):
        encode_png(wrong)


def test_a_file_replaces_the_older_one_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "folder" / "a.png"
    for value in (0, 255):
        write_png(path, np.full((2, 3), value, np.uint8))
    assert (decoded(path.read_bytes()) == 255).all()
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_older_file_and_no_part(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    write_png(path, np.zeros((2, 2), np.uint8))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(RunError, match=r"a\.png: cannot be written \(No space left on device\)"):
        write_png(path, np.ones((2, 2), np.uint8))
    assert not decoded(path.read_bytes()).any()
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written") as caught:
        write_png(tmp_path / "file" / "a.png", np.zeros((2, 2), np.uint8))
    assert "\n" not in str(caught.value)
