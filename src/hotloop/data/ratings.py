"""Ratings as MovieLens-100K has them: user, item, rating and time on a line, separated by tabs.

Ids stay as the file has them; renumbering and splitting are for the model that needs them.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data import content
from hotloop.errors import DataError

SCALE = (1, 5)
_LARGEST = 1 << 24
"""Bytes; MovieLens-100K has 2 million."""
_LARGEST_ID = int(np.iinfo(np.int32).max)
_COLUMNS = {"user": (1, _LARGEST_ID), "item": (1, _LARGEST_ID), "rating": SCALE, "time": (0, 2**62)}
"""The columns in their order and the values each may have."""


@dataclass(frozen=True, eq=False)
class Ratings:
    """A table of ratings; entry n of each column belongs together."""

    users: NDArray[np.int32]
    items: NDArray[np.int32]
    values: NDArray[np.float32]
    times: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.values)


def read_ratings(path: str | Path) -> Ratings:
    """The table in a file; DataError with the line and the reason for the first line that is not a rating."""
    path = Path(path)
    data = content.read_content(path, _LARGEST)
    if not data.strip():
        raise DataError(f"{path}: line 1: no rating in this file")
    try:
        table = np.loadtxt(io.BytesIO(data), np.int64, comments=None, delimiter="\t", ndmin=2)
    except (ValueError, OverflowError):
        raise _first_bad(path, data) from None
    if table.shape[1] != len(_COLUMNS) or not _sound(table):
        raise _first_bad(path, data)
    users, items, values, times = table.T
    return Ratings(users.astype(np.int32), items.astype(np.int32), values.astype(np.float32), times.copy())


def _sound(table: NDArray[np.int64]) -> bool:
    low, high = np.array(list(_COLUMNS.values())).T
    return bool(((table >= low) & (table <= high)).all())


def _first_bad(path: Path, data: bytes) -> DataError:
    for number, line in enumerate(io.BytesIO(data), 1):
        if line.strip() and (reason := _wrong(line)):
            return DataError(f"{path}: line {number}: {reason}")
    return DataError(f"{path}: cannot be read as ratings")


def _wrong(line: bytes) -> str:
    """What is wrong with a line, or nothing."""
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
