"""Tables of ratings, and the text files that hold them: MovieLens-100K's u.data, any file of ratings, and our own. Ids
stay as the file has them; renumbering is for the matrix."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import Content, file_errors, read_chunks, read_content
from hotloop.errors import DataError, MissingExtra
from hotloop.options.files import whole_file

SCALE = (1, 5)
_LARGEST_ID = int(np.iinfo(np.int32).max)
_COLUMNS = {"user": (1, _LARGEST_ID), "item": (1, _LARGEST_ID), "rating": SCALE, "time": (0, 2**62)}
"""The columns of u.data in their order and the values each may have."""
_NAMES = ("user", "item", "rating", "time")
_KINDS = (np.int32, np.int32, np.float32, np.int64)
_EXPECTED = "expected 3 or 4: user, item, rating and perhaps a time"
_HEADER = (rb"user.*", rb"(item|movie).*", rb"rating.*", rb"time.*")
_WHOLE, _NUMBER = re.compile(rb"-?[0-9]+"), re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SMALLEST, _LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
_BLOCK_BYTES = 1 << 22
_UNPACKED, _UNPACKED_MORE = 25, 1 << 24
"""How many times its own size a gzipped file may unpack to, with so many bytes more: ratings reach 4 to 8."""
_LEAST_GROWTH = 1 << 16
Tables = AbstractContextManager[list[Callable[..., None]]]


@dataclass(frozen=True, eq=False)
class Ratings:
    """A table with the source's own ids: int32 where all of them fit, else int64."""

    users: NDArray[Any]
    items: NDArray[Any]
    values: NDArray[np.float32]
    times: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def take(self, which: NDArray[Any]) -> "Ratings":
        """The ratings at these places, or those where a mask is true."""
        times = None if self.times is None else self.times[which]
        return Ratings(self.users[which], self.items[which], self.values[which], times)


class GrowingRatings:
    """Columns of ratings, appended in place, so that there is never a list of pieces beside their sum. An int32 column
    becomes int64 with the first number that needs it."""

    def __init__(self, *kinds: Any):
        self._columns: list[NDArray[Any]] = [np.empty(0, kind) for kind in kinds]
        self._size = 0

    def append(self, pieces: Sequence[NDArray[Any]]) -> None:
        end = self._size + len(pieces[0])
        least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        for place, (column, piece) in enumerate(zip(self._columns, pieces, strict=True)):
            if column.dtype == np.int32 and len(piece) and (piece.min() < least or piece.max() > most):
                self._columns[place] = column = column.astype(np.int64)
            if end > len(column):
                # Large arrays are moved by the page table alone; an eighth more keeps small ones from moving often.
                column.resize(end + max(_LEAST_GROWTH, end // 8), refcheck=False)
            column[self._size : end] = piece
        self._size = end

    def finish(self) -> Ratings:
        for column in self._columns:
            column.resize(self._size, refcheck=False)
        return Ratings(*self._columns)


def read_u_data(path: str | Path) -> Ratings:
    """The table in a file, read without pyarrow, which not everybody has; DataError names the first bad line."""
    path = Path(path)
    data = read_content(path, most=1 << 24)  # MovieLens-100K has 2 million bytes
    if not data.strip():
        raise DataError(f"{path}: line 1: no rating in this file")
    low, high = np.array(list(_COLUMNS.values())).T
    try:
        table = np.loadtxt(io.BytesIO(data), np.int64, comments=None, delimiter="\t", ndmin=2)
        if table.shape[1] != len(_COLUMNS) or not ((table >= low) & (table <= high)).all():
            raise ValueError("a line that is not a rating")
    except (ValueError, OverflowError):
        raise _bad_line(path, enumerate(io.BytesIO(data), 1), _u_data_fault) from None
    users, items, values, times = table.T
    return Ratings(users.astype(np.int32), items.astype(np.int32), values.astype(np.float32), times.copy())


def _u_data_fault(line: bytes) -> str:
    if not line.strip():
        return ""
    fields = line.decode("ascii", "replace").rstrip("\r\n").split("\t")
    if len(fields) != len(_COLUMNS):
        return f"{len(fields)} fields, expected {len(_COLUMNS)} separated by tabs ({', '.join(_COLUMNS)})"
    for (name, (low, high)), text in zip(_COLUMNS.items(), fields, strict=True):
        try:
            value = int(text)
        except ValueError:
            return f"{name} {text[:60]!r} is not a whole number"
        if not low <= value <= high:
            return f"{name} {value} is not between {low} and {high}"
    return ""


def _bad_line(
    path: Path, lines: Iterable[tuple[int, bytes]], fault: Callable[[bytes], str], otherwise: str = ""
) -> DataError:
    """What to say of a file that the parser refuses: the first line that has a fault."""
    for number, line in lines:
        if line and (reason := fault(line)):
            return DataError(f"{path}: line {number}: {reason}")
    return DataError(f"{path}: cannot be read as ratings{otherwise}")


def read_rating_text(path: str | Path) -> Ratings:
    """The ratings of a file (or of a gzipped one); DataError with the first bad line and what is wrong with it.

    Lines are user, item, rating and perhaps a time, separated by a TAB, `::` or a comma; column names may come first.
    """
    path = Path(path)
    head = next(read_chunks(path, _largest_content(path)), b"").removeprefix(b"\xef\xbb\xbf")
    if b"\0" in head:
        raise DataError(f"{path}: not a text file; expected lines of user, item and rating")
    lines = head.splitlines()
    first = next((place for place, line in enumerate(lines) if line), None)
    if first is None:
        raise DataError(f"{path}: no ratings in this file")
    separator = next((each for each in (b"::", b"\t", b",") if each in lines[first]), None)
    if separator is None:
        raise DataError(
            f"{path}: line {first + 1}: no TAB, '::' or comma in {_quote(lines[first])}; {_EXPECTED}"
        )
    fields = lines[first].split(separator)
    if len(fields) not in (3, 4):
        raise DataError(f"{path}: line {first + 1}: {len(fields)} columns, {_EXPECTED}")
    titles = zip(_HEADER, fields, strict=False)
    titled = all(re.fullmatch(title, field.strip(), re.IGNORECASE) for title, field in titles)
    header = first + 1 if titled else 0
    try:
        ratings = _parse(path, separator, len(fields), header)
    except ValueError as error:  # only now are the lines read one by one, to name the first bad one
        numbered = islice(enumerate(_read_lines(path), 1), header, None)
        fault = partial(_line_fault, separator, len(fields))
        raise _bad_line(path, numbered, fault, f" ({' '.join(str(error).split())})") from None
    if not len(ratings):
        raise DataError(f"{path}: no ratings in this file")
    return ratings


def import_arrow_csv() -> Any:
    """The module pyarrow.csv, or the advice to install it."""
    try:
        from pyarrow import csv
    except ImportError:
        raise MissingExtra("pyarrow", "recommender", "reading and writing files of ratings") from None
    return csv


def _parse(path: Path, separator: bytes, columns: int, header: int) -> Ratings:
    """The table after `header` lines; ValueError (pyarrow's own errors are) where a line is not a rating."""
    csv = import_arrow_csv()
    import pyarrow as pa

    kinds = dict(zip(_NAMES, (pa.int64(), pa.int64(), pa.float32(), pa.int64()), strict=True))
    own = list(_NAMES[:columns])
    doubled = separator == b"::"  # between the colons lies a column that must be empty
    names = [part for name in own for part in (name, f"after {name}")][:-1] if doubled else own
    table = GrowingRatings(*_KINDS[:columns])
    with closing(Content(path, _largest_content(path))) as unpacked:
        # pyarrow reads a plain file fastest by itself.
        stream = pa.PythonFile(unpacked, "r") if unpacked.packed else pa.input_stream(str(path))
        types = {name: kinds.get(name, pa.null()) for name in names}
        for batch in csv.open_csv(
            stream,
            csv.ReadOptions(column_names=names, skip_rows=header, block_size=_BLOCK_BYTES),
            csv.ParseOptions(delimiter=separator[:1].decode(), quote_char=False, double_quote=False),
            csv.ConvertOptions(column_types=types, null_values=[""] if doubled else []),
        ):
            pieces = [batch.column(name) for name in own]
            if any(piece.null_count for piece in pieces):
                raise ValueError("an empty field")
            rating = pieces[2].to_numpy()
            if not (rating.min(initial=1) > 0 and rating.max(initial=1) < np.inf):
                raise ValueError("a rating that is not above 0 and finite")
            table.append([piece.to_numpy() for piece in pieces])
    return table.finish()


def _largest_content(path: Path) -> int:
    """Bytes of content that a file of ratings may have; a plain file never has more than its size."""
    with file_errors(path):
        return _UNPACKED * path.stat().st_size + _UNPACKED_MORE


def _read_lines(path: Path) -> Iterator[bytes]:
    """The lines without their ends; one that is too long for any rating comes in pieces."""
    rest = b""
    for chunk in read_chunks(path, _largest_content(path)):
        *whole, rest = (rest + chunk).splitlines(keepends=True)
        yield from (line.rstrip(b"\r\n") for line in whole)
        if len(rest) > 4096:
            yield rest
            rest = b""
    if rest:
        yield rest.rstrip(b"\r\n")


def _line_fault(separator: bytes, columns: int, line: bytes) -> str:
    fields = line.removeprefix(b"\xef\xbb\xbf").split(separator)
    if len(fields) != columns:
        return f"{len(fields)} columns where the first line has {columns}: {_quote(line)}"
    for name, field in zip(_NAMES, fields, strict=False):
        pattern, kind = (_NUMBER, "a number") if name == "rating" else (_WHOLE, "a whole number")
        if not pattern.fullmatch(field.strip()):
            return f"{name} {_quote(field)} is not {kind}"
        if name != "rating" and (len(field) > 99 or not -(2**63) <= int(field) < 2**63):
            return f"{name} {_quote(field)} is too large"
    rating = float(fields[2])
    if rating < _SMALLEST:
        return f"rating {_quote(fields[2])} is not above 0; zero and negative ratings are refused"
    return "" if rating <= _LARGEST else f"rating {_quote(fields[2])} is too large"


def _quote(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace"))


@contextmanager
def write_tables(paths: Sequence[Path], name: str) -> Iterator[list[Callable[..., None]]]:
    """For each path a function that appends equally long columns as text, separated by TABs; numbers read back as the
    same float32, texts must hold no TAB and no end of line. The files get their names when all of them are whole; a
    DataError begins with `name`."""
    csv = import_arrow_csv()
    import pyarrow as pa
    from pyarrow import compute

    plain = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")

    def append(file: Any, *columns: Any) -> None:
        table = pa.table({str(place): column for place, column in enumerate(columns)})
        if not any(pa.types.is_string(column.type) for column in table.columns):
            csv.write_csv(table, file, plain)
        elif len(table):  # pyarrow refuses quotes in texts, which no reader of ours takes for anything else
            texts = [column.cast(pa.string()) for column in table.columns]
            lines = compute.binary_join_element_wise(*texts, "\t").to_pylist()
            file.write("".join(f"{line}\n" for line in lines).encode())

    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as names:
            parts = [names.enter_context(whole_file(path)) for path in paths]
            with ExitStack() as files:  # all of them are closed before the first one gets its name
                yield [partial(append, files.enter_context(part.open("wb"))) for part in parts]
    except OSError as error:
        raise DataError(f"{name}: cannot be written ({error.strerror or error})") from error
