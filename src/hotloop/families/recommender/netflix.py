"""The Netflix Prize as it was published: sections of `MovieID:` and lines of customer, rating, day.

One file a movie (`mv_*.txt`) or many movies in each (`combined_data_*.txt`, the copy on Kaggle). Days stay days of
the calendar, without a time zone. What is done with the ratings is not known here.
"""

import mmap
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.ratings import GrowingRatings, Ratings, import_arrow_csv
from hotloop.engine.progress import Console
from hotloop.errors import DataError

PATTERNS = ("mv_*.txt", "combined_data_*.txt")
_EPOCH = date(1970, 1, 1)
_LINE = re.compile(rb"([0-9]+),([0-9]+(?:\.[0-9]*)?),([0-9]{4}-[0-9]{2}-[0-9]{2})")
_HEADER = re.compile(rb"([0-9]{1,9}):")

RANGES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "full": (("1999-12-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "3m": (("2005-09-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "6m": (("2005-06-01", "2005-11-30"), ("2005-12-01", "2005-12-31")),
    "1y": (("2004-06-01", "2005-05-31"), ("2005-06-01", "2005-06-30")),
}
"""First and last day, both included, of the training and the test ratings of the Netflix Prize's splits."""
ALL_RATINGS = 100_480_507
PUBLISHED = {
    "full": (98_074_901, 477_412, 17_768, 2_250_481),
    "3m": (13_675_402, 311_315, 17_736, 2_082_559),
    "6m": (29_179_009, 390_795, 17_757, 2_175_535),
    "1y": (41_451_832, 345_855, 16_907, 3_888_684),
}
"""Training ratings, users and items, and ratings for validation and test together (DeepRecommender's README)."""


def day(text: str) -> int:
    """A day such as 2005-12-31 as the number that `read` gives it: days since the first of 1970."""
    return (date.fromisoformat(text) - _EPOCH).days


def find_files(folder: str | Path) -> list[Path]:
    """The files of the set in a folder, or in `training_set` in it; none where it is not there."""
    folder = Path(folder)
    for place in (folder, folder / "training_set"):
        for pattern in PATTERNS:
            if files := sorted(place.glob(pattern)):
                return files
    return []


def is_netflix_file(path: str | Path) -> bool:
    path = Path(path)
    with path.open("rb") as file:
        return _HEADER.fullmatch(file.readline(64).strip()) is not None


def read(files: list[Path], console: Console) -> Ratings:
    """All ratings of the files; `times` are days. DataError with the first bad line."""
    table = GrowingRatings(np.int32, np.int32, np.float32, np.int32)
    with console.progress("reading ratings", sum(path.stat().st_size for path in files)) as bar:
        for path in files:
            for pieces, size in _read_sections(path):
                table.append(pieces)
                bar.advance(size)
    ratings = table.finish()
    if not len(ratings):
        raise DataError(f"{files[0].parent}: no ratings in {len(files)} files")
    return ratings


def _read_sections(path: Path) -> Iterator[tuple[list[NDArray[Any]], int]]:
    """Users, items, ratings and days of each section, and the bytes that it had."""
    if not path.stat().st_size:
        raise DataError(f"{path}: no ratings in this file")
    csv = import_arrow_csv()
    import pyarrow as pa

    names = {"user": pa.int32(), "rating": pa.float32(), "day": pa.date32()}
    settings = (
        csv.ReadOptions(column_names=list(names), use_threads=False),
        csv.ParseOptions(quote_char=False, double_quote=False),
        csv.ConvertOptions(column_types=names, null_values=[]),
    )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for item, begin, end in _sections(path, data):
            body = data[begin:end]
            if not body.strip():
                continue
            try:
                table = csv.read_csv(pa.BufferReader(body), *settings)
            except pa.ArrowInvalid as error:
                raise _bad_line(path, data, begin, body, str(error)) from None
            users, ratings = table["user"].to_numpy(), table["rating"].to_numpy()
            if not (ratings.min(initial=1) > 0 and ratings.max(initial=1) < np.inf):
                raise _bad_line(path, data, begin, body, "a rating that is not above 0")
            days = table["day"].cast(pa.int32()).to_numpy()
            yield [users, np.full(len(users), item, np.int32), ratings, days], end - begin


def _sections(path: Path, data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """Movie, first byte and end of each section's lines of ratings."""
    colon = data.find(b":")
    if data.rfind(b"\n", 0, max(colon, 0)) >= 0 or colon < 0:
        raise DataError(f"{path}: line 1: expected 'MovieID:', as in the Netflix Prize's files")
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", colon) + 1 or len(data)
        header = _HEADER.fullmatch(data[begin:end].strip())
        if header is None:
            raise DataError(
                f"{path}: line {_line_number(data, begin)}: {_quote(data[begin:end])} is not a 'MovieID:'"
            )
        colon = data.find(b":", end)
        following = data.rfind(b"\n", end - 1, colon) + 1 if colon >= 0 else len(data)
        yield int(header[1]), end, following
        begin = following


def _bad_line(path: Path, data: mmap.mmap, begin: int, body: bytes, said: str) -> DataError:
    for number, line in enumerate(body.splitlines(), _line_number(data, begin)):
        if line and (reason := _line_fault(line)):
            return DataError(f"{path}: line {number}: {reason}")
    return DataError(
        f"{path}: cannot be read after line {_line_number(data, begin)} ({' '.join(said.split())})"
    )


def _line_fault(line: bytes) -> str:
    fields = _LINE.fullmatch(line.strip())
    if fields is None:
        return f"{_quote(line)} is not 'CustomerID,Rating,YYYY-MM-DD'"
    if len(fields[1]) > 10 or int(fields[1]) >= 2**31:
        return f"customer {fields[1][:60].decode()} is too large"
    try:
        date.fromisoformat(fields[3].decode())
    except ValueError as error:
        return f"{fields[3].decode()} is not a day ({error})"
    return "" if float(fields[2]) > 0 else f"rating {fields[2].decode()} is not above 0"


def _line_number(data: mmap.mmap, place: int) -> int:
    return data[:place].count(b"\n") + 1


def _quote(text: bytes) -> str:
    return repr(text.strip()[:60].decode("utf-8", "replace"))
