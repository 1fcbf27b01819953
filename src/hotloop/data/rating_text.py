"""Ratings in text files, read fast: user, item, rating and perhaps a time on each line.

Columns are separated by a TAB, `::` or a comma, all lines alike; a first line of column names is skipped. Ids stay
as the file has them; renumbering is for the matrix, splitting for the model that needs it. The parser is pyarrow's;
only when it refuses a file are the lines read one by one, to name the first bad one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data import content
from hotloop.data.growing import Column
from hotloop.errors import DataError, MissingExtra

NAMES = ("user", "item", "rating", "time")
_KINDS = (np.int32, np.int32, np.float32, np.int64)
_EXPECTED = "expected 3 or 4: user, item, rating and perhaps a time"
_HEADER = (rb"user.*", rb"(item|movie).*", rb"rating.*", rb"time.*")
_WHOLE, _NUMBER = re.compile(rb"-?[0-9]+"), re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SMALLEST, _LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
_LONGEST_LINE = 4096
_BLOCK = 1 << 22
_UNPACKED, _MORE = 25, 1 << 24
"""How many times its own size a gzipped file may unpack to, with so many bytes more: ratings reach 4 to 8."""


@dataclass(frozen=True, eq=False)
class Triples:
    """A table of ratings with the file's own ids; entry n of each column belongs together.

    Ids are int32 where all of them fit, else int64: a hundred million ratings take 1.2 GB and not 2.
    """

    users: NDArray[Any]
    items: NDArray[Any]
    ratings: NDArray[np.float32]
    times: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.ratings)

    def take(self, which: NDArray[Any]) -> "Triples":
        """The ratings at these places, or those where a mask is true."""
        times = None if self.times is None else self.times[which]
        return Triples(self.users[which], self.items[which], self.ratings[which], times)


@dataclass(frozen=True)
class _Form:
    """How the lines of one file look."""

    separator: bytes
    columns: int
    header_lines: int


def read_triples(path: str | Path) -> Triples:
    """The ratings of a file (or of a gzipped one); DataError with the first bad line and what is wrong with it."""
    path = Path(path)
    form = _form(path)
    try:
        triples = _parse(path, form)
    except ValueError as error:
        raise _first_bad(path, form, error) from None
    if not len(triples):
        raise DataError(f"{path}: no ratings in this file")
    return triples


def arrow_csv() -> Any:
    """The module pyarrow.csv, or the advice to install it."""
    try:
        from pyarrow import csv
    except ImportError:
        raise MissingExtra("pyarrow", "recommender", "reading and writing files of ratings") from None
    return csv


def _form(path: Path) -> _Form:
    """What the first line that is not empty tells about the file."""
    head = next(_chunks(path), b"").removeprefix(b"\xef\xbb\xbf")
    if b"\0" in head:
        raise DataError(f"{path}: not a text file; expected lines of user, item and rating")
    lines = head.splitlines()
    first = next((place for place, line in enumerate(lines) if line), None)
    if first is None:
        raise DataError(f"{path}: no ratings in this file")
    line = lines[first]
    separator = next((each for each in (b"::", b"\t", b",") if each in line), None)
    if separator is None:
        raise DataError(f"{path}: line {first + 1}: no TAB, '::' or comma in {_shown(line)}; {_EXPECTED}")
    fields = line.split(separator)
    if len(fields) not in (3, 4):
        raise DataError(f"{path}: line {first + 1}: {len(fields)} columns, {_EXPECTED}")
    names = zip(_HEADER, fields, strict=False)
    header = all(re.fullmatch(name, field.strip(), re.IGNORECASE) for name, field in names)
    return _Form(separator, len(fields), first + 1 if header else 0)


def _parse(path: Path, form: _Form) -> Triples:
    """The table; ValueError (pyarrow's own errors are) where a line is not a rating."""
    table = [Column(kind) for kind in _KINDS[: form.columns]]
    for batch in _batches(path, form):
        pieces = [batch.column(name) for name in NAMES[: form.columns]]
        if any(piece.null_count for piece in pieces):
            raise ValueError("an empty field")
        rating = pieces[2].to_numpy()
        if not (rating.min(initial=1) > 0 and rating.max(initial=1) < np.inf):
            raise ValueError("a rating that is not above 0 and finite")
        for column, piece in zip(table, pieces, strict=True):
            column.append(piece.to_numpy())
    return Triples(*(column.finish() for column in table))


def _batches(path: Path, form: _Form) -> Iterator[Any]:
    """Record batches with the columns of NAMES; between the colons of `::` lies a column that must be empty."""
    csv = arrow_csv()
    import pyarrow as pa

    kinds = dict(zip(NAMES, (pa.int64(), pa.int64(), pa.float32(), pa.int64()), strict=True))
    names = list(NAMES[: form.columns])
    if form.separator == b"::":
        names = [part for name in names for part in (name, f"after {name}")][:-1]
    types = {name: kinds.get(name, pa.null()) for name in names}
    with content.Content(path, _most(path)) as unpacked:
        # pyarrow reads a plain file fastest by itself.
        stream = pa.PythonFile(unpacked, "r") if unpacked.packed else pa.input_stream(str(path))
        yield from csv.open_csv(
            stream,
            csv.ReadOptions(column_names=names, skip_rows=form.header_lines, block_size=_BLOCK),
            csv.ParseOptions(delimiter=form.separator[:1].decode(), quote_char=False, double_quote=False),
            csv.ConvertOptions(column_types=types, null_values=[""] if form.separator == b"::" else []),
        )


def _chunks(path: Path) -> Iterator[bytes]:
    return content.read_chunks(path, _most(path))


def _most(path: Path) -> int:
    """Bytes of content that a file of ratings may have; a plain file never has more than its size."""
    try:
        return _UNPACKED * path.stat().st_size + _MORE
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _first_bad(path: Path, form: _Form, error: ValueError) -> DataError:
    for number, line in enumerate(lines(path), 1):
        if number > form.header_lines and line and (reason := _wrong(line, form)):
            return DataError(f"{path}: line {number}: {reason}")
    return DataError(f"{path}: cannot be read as ratings ({' '.join(str(error).split())})")


def lines(path: Path) -> Iterator[bytes]:
    """The lines without their ends; one that is too long for any rating comes in pieces."""
    rest = b""
    for chunk in _chunks(path):
        *whole, rest = (rest + chunk).splitlines(keepends=True)
        yield from (line.rstrip(b"\r\n") for line in whole)
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest.rstrip(b"\r\n")


def _wrong(line: bytes, form: _Form) -> str:
    """What is wrong with a line, or nothing."""
    fields = line.removeprefix(b"\xef\xbb\xbf").split(form.separator)
    if len(fields) != form.columns:
        return f"{len(fields)} columns where the first line has {form.columns}: {_shown(line)}"
    for name, field in zip(NAMES, fields, strict=False):
        pattern, kind = (_NUMBER, "a number") if name == "rating" else (_WHOLE, "a whole number")
        if not pattern.fullmatch(field.strip()):
            return f"{name} {_shown(field)} is not {kind}"
        if name != "rating" and (len(field) > 99 or not -(2**63) <= int(field) < 2**63):
            return f"{name} {_shown(field)} is too large"
    rating = float(fields[2])
    if rating < _SMALLEST:
        return f"rating {_shown(fields[2])} is not above 0; zero and negative ratings are refused"
    return "" if rating <= _LARGEST else f"rating {_shown(fields[2])} is too large"


def _shown(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace"))
