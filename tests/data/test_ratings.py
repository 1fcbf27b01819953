import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from hotloop.data import ratings
from hotloop.data.ratings import read_rating_text
from hotloop.errors import DataError, MissingExtra

ROOT = Path(
    os.environ.get("HOTLOOP_DATA") or Path(__file__).resolve().parents[2] / "../shared/data"
).resolve()


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "ratings.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def columns(table):
    times = None if table.times is None else table.times.tolist()
    return table.users.tolist(), table.items.tolist(), table.values.tolist(), times


@pytest.mark.parametrize("separator", ["\t", "::", ","])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("names", [(), ("userId", "movieId", "rating", "timestamp")])
@pytest.mark.parametrize("count", [3, 4])
def test_every_form_gives_the_same_table(file, separator, end, names, count):
    rows = [("7", "20", "3.5", "99"), ("3", "10", "3.0", "0"), ("7", "10", "5", "12")]
    lines = [separator.join(row[:count]) for row in (*([names] if names else []), *rows)]
    table = read_rating_text(file(end.join(lines) + end))
    times = [99, 0, 12] if count == 4 else None
    assert columns(table) == ([7, 3, 7], [20, 10, 10], [3.5, 3.0, 5.0], times)
    assert table.values.dtype == np.float32


@pytest.mark.parametrize(
    "text", ["1\t2\t0.5", "1\t2\t0.5\n", "\n1\t2\t0.5\n\n", "\ufeff1\t2\t0.5\n", " 1\t2 \t.5"]
)
def test_one_line_is_a_table_of_one(file, text):
    assert columns(read_rating_text(file(text))) == ([1], [2], [0.5], None)


def test_a_gzipped_file_is_read_as_what_it_holds(file):
    path = file(gzip.compress(b"1\t2\t3.0\n2\t2\t4.5\n", mtime=0))
    assert columns(read_rating_text(path)) == ([1, 2], [2, 2], [3.0, 4.5], None)


def test_ids_are_narrow_where_all_of_them_fit(file):
    narrow = read_rating_text(file("1\t2147483647\t3.0\n"))
    wide = read_rating_text(file("1\t2147483648\t3.0\n-5\t-2147483649\t1.0\n"))
    assert (narrow.users.dtype, narrow.items.dtype) == (np.int32, np.int32)
    assert (wide.users.dtype, wide.items.dtype) == (np.int32, np.int64)
    assert wide.items.tolist() == [2147483648, -2147483649]


def test_a_file_of_several_blocks_keeps_its_order(file, monkeypatch):
    monkeypatch.setattr(ratings, "_BLOCK_BYTES", 1 << 12)
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 2**40, 3000), rng.integers(0, 1000, 3000)
    users[:1500] %= 1000
    path = file(
        "".join(f"{user}\t{item}\t{1 + item % 5}.0\n" for user, item in zip(users, items, strict=True))
    )
    table = read_rating_text(path)
    assert table.users.dtype == np.int64
    np.testing.assert_array_equal(table.users, users)
    np.testing.assert_array_equal(table.items, items)
    np.testing.assert_array_equal(table.values, 1 + items % 5)


BAD = {
    "user 'x' is not a whole number": "x\t2\t3.0",
    "item '2.5' is not a whole number": "1\t2.5\t3.0",
    "item '' is not a whole number": "1\t\t3.0",
    "user '99999999999999999999' is too large": "99999999999999999999\t2\t3.0",
    "rating 'good' is not a number": "1\t2\tgood",
    "rating 'nan' is not a number": "1\t2\tnan",
    "rating '1e60' is too large": "1\t2\t1e60",
    "rating '1e-60' is not above 0; zero and negative ratings are refused": "1\t2\t1e-60",
    "rating '0' is not above 0; zero and negative ratings are refused": "1\t2\t0",
    "rating '-3.0' is not above 0; zero and negative ratings are refused": "1\t2\t-3.0",
    "2 columns where the first line has 3: '1\\\\t2'": "1\t2",
    "4 columns where the first line has 3: '1\\\\t2\\\\t3\\\\t4'": "1\t2\t3\t4",
    "1 columns where the first line has 3: '1,2,3'": "1,2,3",
}


@pytest.mark.parametrize(("reason", "line"), BAD.items())
def test_a_bad_line_is_named_with_its_number_and_reason(file, reason, line):
    path = file(f"1\t1\t1.0\r\n\r\n2\t2\t2.5\r\n{line}\r\n3\t3\t3.0\r\nworse\r\n")
    with pytest.raises(DataError) as error:
        read_rating_text(path)
    assert str(error.value) == f"{path}: line 4: {reason}".replace("\\\\", "\\")


def test_a_bad_line_after_megabytes_has_the_right_number(file):
    path = file("userId,movieId,rating\r\n" + "123456,78901,3.5\r\n" * 200_000 + "1,2,0.0\r\n")
    with pytest.raises(DataError, match=r"line 200002: rating '0\.0' is not above 0"):
        read_rating_text(path)


@pytest.mark.parametrize("line", ["1:x:2::3.0", "1::2:3.0", "::2::3.0"])
def test_double_colons_must_be_double(file, line):
    with pytest.raises(DataError, match="line 2: "):
        read_rating_text(file(f"1::2::3.0\n{line}\n"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 2 3\n", "line 1: no TAB, '::' or comma in '1 2 3'; expected 3 or 4"),
        ("17:\n1,2,2005-01-01\n", "line 1: no TAB, '::' or comma in '17:'"),
        ("1\t2\n", "line 1: 2 columns, expected 3 or 4"),
        ("1,2,3,4,5\n", "line 1: 5 columns, expected 3 or 4"),
        ("rating,userId,movieId\n3.0,1,2\n", "line 1: user 'rating' is not a whole number"),
        ("", "no ratings in this file"),
        ("\r\n\n", "no ratings in this file"),
        ("userId,movieId,rating,timestamp\n", "no ratings in this file"),
        (b"\x93NUMPY\x01\x00v\x00", "not a text file"),
        ("1\t2\t3\n".encode("utf-16"), "not a text file"),
        (b"1\t2\t3\n" + bytes(range(14, 256)) * 20_000, "line 2: 1 columns where the first line has 3"),
        (gzip.compress(b"1\t2\t3.0\n" * 1000, mtime=0)[:-9], "damaged gzip file"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(file, text, reason):
    path = file(text)
    with pytest.raises(DataError) as error:
        read_rating_text(path)
    assert str(error.value).startswith(f"{path}: {reason}")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_an_error_for_the_user(tmp_path):
    with pytest.raises(DataError, match=r"absent\.txt: cannot be read"):
        read_rating_text(tmp_path / "absent.txt")


def test_without_pyarrow_the_extra_is_named(file, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'hotloop\[recommender\]'"):
        read_rating_text(file("1\t2\t3.0\n"))


@pytest.mark.skipif(not (ROOT / "ml-100k/u.data").is_file(), reason=f"no ml-100k in {ROOT}")
def test_real_movielens_has_its_published_counts():
    table = read_rating_text(ROOT / "ml-100k/u.data")
    assert len(table) == 100_000
    assert (len(np.unique(table.users)), len(np.unique(table.items))) == (943, 1682)
    assert table.values.mean() == pytest.approx(3.52986, abs=1e-5)
    assert [column[0] for column in columns(table)] == [196, 242, 3.0, 881250949]
