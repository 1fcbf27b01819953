"""Data files that somebody made to hurt: more content than they should have, sizes that lie, odd archives."""

import gzip
import io
import struct
import zipfile
import zlib

import numpy as np
import pytest

from hotloop.data import content, dataset, ratings
from hotloop.data.catalogue import Download, KnownFile
from hotloop.data.fetch import unpack
from hotloop.data.local_files import check_file
from hotloop.data.tfrecord import index_shards
from hotloop.engine.device import peak_bytes
from hotloop.errors import DataError
from hotloop.families.cnn import torch_weights
from records import write_records

DOWNLOAD = Download("toy.zip", (), 1, "sha256:0")
FILE = KnownFile(
    "one.bin",
    5,
    f"sha256:{'2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824'}",
    DOWNLOAD,
    "a/one.bin",
)
"""Its content is the text `hello`."""


@pytest.fixture(scope="module")
def zeros():
    """A gigabyte of zeros in one megabyte."""
    packer = zlib.compressobj(1, wbits=31)
    megabyte = bytes(1 << 20)
    return b"".join(packer.compress(megabyte) for _ in range(1024)) + packer.flush()


def refuse(read, path, *more):
    """The error, for which little memory was needed beyond the largest content that is read."""
    before = peak_bytes()
    with pytest.raises(DataError) as error:
        read(path, *more)
    assert peak_bytes() - before < 3 * content.LARGEST
    return str(error.value)


def test_a_gzip_bomb_is_read_as_far_as_its_header_says_and_no_further(zeros, tmp_path, monkeypatch):
    unpacked = 0
    read = content.Content.read

    def counted(self, size):
        nonlocal unpacked
        found = read(self, size)
        unpacked += len(found)
        return found

    monkeypatch.setattr(content.Content, "read", counted)
    header = struct.pack(">I", 0x0803) + struct.pack(">III", 5, 28, 28)
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(header) + zeros)
    assert "byte 3,936: the file goes on after 5 x 28 x 28 values" in refuse(dataset.read_idx, path, 3)
    assert unpacked == 3937


@pytest.mark.parametrize(
    ("read", "more"),
    [(dataset.read_amat, ()), (dataset.read_cifar, ((10,),)), (ratings.read_u_data, ())],
)
def test_a_gzip_bomb_is_not_unpacked_to_its_end(read, more, zeros, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(zeros)
    given = [path] if read is dataset.read_cifar else path
    before = peak_bytes()
    with pytest.raises(DataError, match=r"bomb: unpacks to more than [0-9,]+ bytes, too many"):
        read(given, *more)
    assert peak_bytes() - before < 3 * content.LARGEST


def test_a_checksum_stops_where_the_content_is_longer_than_it_should_be(zeros, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(zeros)
    assert check_file(FILE, path).reason == "unpacks to more than 5 bytes, too many for what it should be"


@pytest.mark.parametrize("line", [b"1,1,1\n", b"\n"], ids=["ratings", "empty lines"])
def test_gzipped_ratings_that_unpack_to_far_too_much_are_refused(line, tmp_path):
    packer = zlib.compressobj(1, wbits=31)
    block = line * ((1 << 22) // len(line))
    path = tmp_path / "ratings.csv.gz"
    path.write_bytes(
        packer.compress(b"1,1,1\n") + b"".join(packer.compress(block) for _ in range(20)) + packer.flush()
    )
    assert "unpacks to more than " in refuse(ratings.read_rating_text, path)


def test_an_amat_file_of_empty_lines_allocates_nothing(tmp_path):
    path = tmp_path / "lines.amat"
    path.write_bytes(b"\n" * 3_000_001)
    assert "line 1: 0 values, expected 784" in refuse(dataset.read_amat, path)


def test_the_files_wanted_come_out_of_a_zip_with_doubled_and_climbing_names(tmp_path):
    path = tmp_path / "toy.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("../../climbed", "x")
        packed.writestr("/tmp/absolute", "x")
        packed.writestr("a/one.bin", "wrong")
        with pytest.warns(UserWarning, match="Duplicate name"):
            packed.writestr("a/one.bin", "hello")
    out = tmp_path / "in" / "out"
    out.mkdir(parents=True)
    unpack(path, [FILE], out)
    assert (out / "one.bin").read_text() == "hello"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["in", "one.bin", "out", "toy.zip"]


def encrypted(data):
    """The archive with the bit that says so set in both headers."""
    body = bytearray(data)
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        body[body.index(mark) + place] |= 1
    return bytes(body)


def with_method(data, method):
    body = bytearray(data)
    for mark, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        body[body.index(mark) + place] = method
    return bytes(body)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[-22:],
        encrypted,
        lambda data: with_method(data, 99),
        lambda data: with_method(data, 12),
        lambda data: with_method(data, 14),
        lambda data: data.replace(b"hello", b"hallo"),
        lambda data: data.replace(b"PK\1\2", b"PK\1\3"),
    ],
    ids=[
        "empty",
        "cut",
        "end alone",
        "encrypted",
        "unknown",
        "as bzip2",
        "as lzma",
        "altered",
        "no directory",
    ],
)
def test_an_odd_zip_file_is_one_line_and_leaves_nothing(change, tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("a/one.bin", "hello")
    path = tmp_path / "toy.zip"
    path.write_bytes(change(out.getvalue()))
    with pytest.raises(
        DataError, match=r"toy\.zip: (damaged archive|no regular file)|wrong content"
    ) as error:
        unpack(path, [FILE], tmp_path)
    assert "\n" not in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["toy.zip"]


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


def npz_of(header, data=b""):
    """A .npz with one member whose header says what is given."""
    text = header.encode().ljust(117) + b"\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)
    return out.getvalue()


def header(shape, dtype="<f8"):
    return repr({"descr": dtype, "fortran_order": False, "shape": shape})


def test_arrays_are_read_as_they_were_saved(tmp_path):
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "c": np.float32(3),
        "d": np.array(["x", "yz"]),
        "e": np.empty((0, 2), np.int64),
    }
    found = content.read_npz(saved(tmp_path / "a.npz", **arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zip",
        npz_of(header((10**12,))),
        npz_of(header((2**62, 2**62))),
        npz_of(header((-1,)), b"12345678"),
        npz_of(header((1,), "|O"), b"\x80\x04N."),
        npz_of(header((3,)), b"12345678"),
        npz_of("(" * 60),
        npz_of("{"),
        npz_of("1"),
        encrypted(npz_of(header((1,)), b"12345678")),
        with_method(npz_of(header((1,)), b"12345678"), 12),
    ],
    ids=[
        "empty",
        "text",
        "huge",
        "overflow",
        "negative",
        "pickle",
        "short",
        "deep",
        "cut",
        "number",
        "encrypted",
        "bzip2",
    ],
)
def test_a_damaged_npz_file_is_one_line_and_allocates_nothing(data, tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.npz: (damaged|cannot be read) \(.+\)$") as error:
        content.read_npz(path)
    assert "\n" not in str(error.value)


def test_members_larger_than_the_file_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.zeros(1 << 20))
    with pytest.raises(DataError, match="larger than the file"):
        content.read_npz(path)


@pytest.mark.parametrize(
    "change",
    [
        {"index": np.array([[12, 2**62]])},
        {"index": np.array([[12, -5]])},
        {"index": np.array([[-12, 5]])},
        {"index": np.array([[12, 5], [12, 5]])},
        {"index": np.array([12, 5])},
        {"index": np.array([[12.0, 5.0]])},
        {"counts": np.array([-1])},
        {"counts": np.array([1, 0])},
        {"counts": np.array(["x"])},
        {"index": None},
    ],
    ids=str,
)
def test_a_kept_index_that_cannot_be_right_is_made_anew(change, tmp_path):
    shard = tmp_path / "train-00000-of-00001"
    write_records(shard, [b"hello"])
    kept = tmp_path / ".train.index.npz"
    counts, index = index_shards([shard], kept)
    arrays = dict(np.load(kept)) | change
    saved(kept, **{name: array for name, array in arrays.items() if array is not None})
    again = index_shards([shard], kept)
    np.testing.assert_array_equal(again[0], counts)
    np.testing.assert_array_equal(again[1], index)


@pytest.mark.parametrize(
    "data",
    [b"", b"PK", b"\x93NUMPY", npz_of("(" * 60), npz_of(header((10**12,)))],
    ids=["empty", "zip", "npy", "brackets", "huge"],
)
def test_a_damaged_kept_index_is_made_anew(data, tmp_path):
    shard = tmp_path / "train-00000-of-00001"
    write_records(shard, [b"hello"])
    kept = tmp_path / ".train.index.npz"
    kept.write_bytes(data)
    assert index_shards([shard], kept)[1].tolist() == [[12, 5]]
    assert content.read_npz(kept)["counts"].tolist() == [1]


def test_a_long_header_of_safetensors_is_refused_unread(tmp_path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))  # one more than the format allows
        file.truncate(100_000_100)
    assert "not a whole safetensors file: " in refuse(torch_weights.recognise, path)
