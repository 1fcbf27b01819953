"""Readers take good files, gzipped or plain, and name file, place and reason for every bad one."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.data.dataset import read_amat, read_cifar, read_idx
from hotloop.data.ratings import read_u_data
from hotloop.errors import DataError


def idx_bytes(array: np.ndarray, magic: int | None = None) -> bytes:
    magic = 0x0800 | array.ndim if magic is None else magic
    return magic.to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write(folder: Path, data: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def message(function, *arguments) -> str:
    with pytest.raises(DataError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_idx_file_gives_its_array_whatever_its_name(tmp_path, packed):
    data = idx_bytes(IMAGES)
    path = write(tmp_path, gzip.compress(data) if packed else data)
    assert np.array_equal(read_idx(path, 3), IMAGES)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_idx_shape_survives_the_round_trip(tmp_path_factory, shape):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = write(tmp_path_factory.mktemp("idx"), idx_bytes(array))
    assert np.array_equal(read_idx(path, len(shape)), array)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "byte 0: the file ends inside its header of 16 bytes"),
        (idx_bytes(IMAGES)[:9], "byte 9: the file ends inside its header"),
        (idx_bytes(IMAGES, 0x0801), "byte 0: magic number 0x00000801, expected 0x00000803"),
        (idx_bytes(IMAGES, 0x0D03), "byte 0: magic number 0x00000d03"),
        (idx_bytes(IMAGES)[:-1], "byte 75: the file ends here, but 5 x 4 x 3 values need 76 bytes"),
        (idx_bytes(IMAGES) + b"ab", "byte 76: the file goes on after 5 x 4 x 3 values"),
    ],
)
def test_bad_idx_file_names_file_byte_and_reason(tmp_path, data, expected):
    path = write(tmp_path, data)
    text = message(read_idx, path, 3)
    assert text.startswith(f"{path}: ")
    assert expected in text


def test_idx_header_that_promises_too_much_allocates_nothing(tmp_path):
    header = (0x0803).to_bytes(4, "big") + np.array([2**32 - 1] * 3, ">u4").tobytes()
    assert "values, at most 268,435,456 are read" in message(read_idx, write(tmp_path, header), 3)


def test_cut_gzip_file_says_how_far_its_content_goes(tmp_path):
    rng = np.random.default_rng(0)
    packed = gzip.compress(idx_bytes(rng.integers(0, 256, (3000, 28, 28), dtype=np.uint8)))
    text = message(read_idx, write(tmp_path, packed[: len(packed) - 100]), 3)
    assert "damaged gzip file after byte 2,097,168 of its content" in text


def test_flipped_byte_in_a_gzip_file_is_found(tmp_path):
    packed = bytearray(gzip.compress(idx_bytes(IMAGES)))
    packed[-6] ^= 1
    assert "damaged gzip file" in message(read_idx, write(tmp_path, bytes(packed)), 3)


def test_missing_file_is_a_data_error(tmp_path):
    assert "cannot be read (No such file or directory)" in message(read_idx, tmp_path / "none", 3)


def cifar_bytes(labels: np.ndarray, images: np.ndarray) -> bytes:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([labels, planes], axis=1).astype(np.uint8).tobytes()


PHOTOS = np.random.default_rng(1).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
LABELS = np.array([3, 0, 9, 1, 1, 7], np.uint8)


def test_cifar_files_are_joined_in_order_and_turned_to_height_width_channels(tmp_path):
    first = write(tmp_path, cifar_bytes(LABELS[:4, None], PHOTOS[:4]), "1")
    second = write(tmp_path, gzip.compress(cifar_bytes(LABELS[4:, None], PHOTOS[4:])), "2")
    images, labels = read_cifar([first, second], (10,))
    assert np.array_equal(images, PHOTOS)
    assert labels.dtype == np.int32
    assert labels.tolist() == LABELS.tolist()


def test_cifar100_takes_the_fine_label(tmp_path):
    both = np.stack([LABELS, LABELS + 90], axis=1)
    images, labels = read_cifar([write(tmp_path, cifar_bytes(both, PHOTOS))], (20, 100))
    assert np.array_equal(images, PHOTOS)
    assert labels.tolist() == (LABELS + 90).tolist()


def test_bad_cifar_files_name_file_byte_and_reason(tmp_path):
    good = cifar_bytes(LABELS[:, None], PHOTOS)
    short = write(tmp_path, good[:-5], "short")
    text = message(read_cifar, [short], (10,))
    assert text == f"{short}: byte 15,365: 18,433 bytes are not whole records of 3,073"
    empty = write(tmp_path, b"", "empty")
    assert message(read_cifar, [empty], (10,)).startswith(f"{empty}: byte 0: ")
    odd = bytearray(good)
    odd[2 * 3073] = 10
    assert "byte 6,146: label 10, expected 0 to 9" in message(read_cifar, [write(tmp_path, odd)], (10,))


BITS = np.random.default_rng(2).integers(0, 2, (4, 28, 28, 1), dtype=np.uint8)


def amat_lines(separator: str = " ", end: str = "\n") -> list[str]:
    return [separator.join(map(str, row)) + end for row in BITS.reshape(4, -1)]


@pytest.mark.parametrize(("separator", "end"), [(" ", "\n"), ("  ", "\n"), (" ", " \n"), (" ", "\r\n")])
def test_amat_is_read_in_any_spacing(tmp_path, separator, end):
    path = write(tmp_path, "".join(amat_lines(separator, end)).encode())
    assert np.array_equal(read_amat(path), BITS)


def test_amat_without_a_last_newline_is_read(tmp_path):
    assert np.array_equal(read_amat(write(tmp_path, "".join(amat_lines()).rstrip().encode())), BITS)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0 1 1\n", "line 3: 3 values, expected 784"),
        ("\n", "line 3: 0 values, expected 784"),
        ("2" + amat_lines()[0][1:], "line 3: value 1 is '2', expected 0 or 1"),
        (amat_lines()[0][:-2] + "x\n", "line 3: value 784 is 'x', expected 0 or 1"),
    ],
)
def test_bad_amat_row_names_file_line_and_reason(tmp_path, line, expected):
    lines = amat_lines()
    path = write(tmp_path, "".join([*lines[:2], line, *lines[2:]]).encode())
    assert message(read_amat, path) == f"{path}: {expected}"


def test_empty_amat_file_is_refused(tmp_path):
    assert "no image" in message(read_amat, write(tmp_path, b""))


def test_ratings_keep_ids_values_and_times(tmp_path):
    ratings = read_u_data(write(tmp_path, b"196\t242\t3\t881250949\n22\t377\t1\t878887116\n"))
    assert len(ratings) == 2
    assert ratings.users.tolist() == [196, 22]
    assert ratings.items.tolist() == [242, 377]
    assert ratings.values.tolist() == [3.0, 1.0]
    assert ratings.times.tolist() == [881250949, 878887116]
    dtypes = [column.dtype for column in (ratings.users, ratings.items, ratings.values, ratings.times)]
    assert dtypes == [np.int32, np.int32, np.float32, np.int64]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"1\t2\t3", "3 fields, expected 4 separated by tabs (user, item, rating, time)"),
        (b"1,2,3,4", "1 fields, expected 4"),
        (b"1\t2\t3\t4\t5", "5 fields, expected 4"),
        (b"1\t2\tgood\t4", "rating 'good' is not a whole number"),
        (b"1\t2\t6\t4", "rating 6 is not between 1 and 5"),
        (b"1\t2\t0\t4", "rating 0 is not between 1 and 5"),
        (b"0\t2\t3\t4", "user 0 is not between 1 and 2147483647"),
        (b"1\t3000000000\t3\t4", "item 3000000000 is not between 1 and 2147483647"),
        (b"1\t99999999999999999999\t3\t4", "item 99999999999999999999 is not between"),
        (b"1\t2\t3\t-4", "time -4 is not between 0"),
        (b"1\t2\t3\t4.5", "time '4.5' is not a whole number"),
        (b"\xff\t2\t3\t4", "is not a whole number"),
    ],
)
@pytest.mark.parametrize("place", [1, 4])
def test_bad_rating_names_file_line_and_reason(tmp_path, line, expected, place):
    lines = [b"1\t2\t3\t4"] * 3
    lines.insert(place - 1, line)
    path = write(tmp_path, b"\n".join(lines) + b"\n")
    text = message(read_u_data, path)
    assert text.startswith(f"{path}: line {place}: ")
    assert expected in text


def test_a_line_number_counts_blank_lines_too(tmp_path):
    assert "line 4: rating 9" in message(read_u_data, write(tmp_path, b"1\t2\t3\t4\n\n\n1\t2\t9\t4\n"))


def test_empty_ratings_file_is_refused(tmp_path):
    assert "line 1: no rating" in message(read_u_data, write(tmp_path, b""))
