"""Ratings as a sparse matrix, users by items, in compressed rows (CSR), made in narrow types and a block at a time: a
hundred million ratings fit in 4 GiB with the text's own table beside them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import read_npz
from hotloop.errors import DataError
from hotloop.options.files import whole_file

BLOCK = 1 << 22
_LEVELS = 256
_SMALL_TABLE = 1 << 22


@dataclass(frozen=True, eq=False)
class RatingMatrix:
    """Row k has the items `items[starts[k] : starts[k + 1]]`, ascending; arrays of the host."""

    starts: NDArray[np.int64]
    items: NDArray[Any]  # column numbers: uint16 where there are at most 65,536 items, else uint32
    codes: NDArray[Any]  # uint8 places in `levels`; where that is None, the float32 ratings themselves
    levels: NDArray[np.float32] | None
    user_ids: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    skipped: int = 0  # ratings left out because the given maps do not have their user or item

    @property
    def users(self) -> int:
        return len(self.user_ids)

    @property
    def n_items(self) -> int:
        return len(self.item_ids)

    @property
    def ratings(self) -> int:
        return len(self.items)

    def values(self, which: slice = slice(None)) -> NDArray[np.float32]:
        """Every rating (of these places) as a float32, in the order of `items`."""
        codes = self.codes[which]
        return codes if self.levels is None else self.levels[codes]

    def write(self, path: Path) -> None:
        """All but the ids, whole or not at all."""
        arrays = {"starts": self.starts, "items": self.items, "codes": self.codes}
        if self.levels is not None:
            arrays["levels"] = self.levels
        with whole_file(path) as part, part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numbers alone: nothing is pickled

    @classmethod
    def read(cls, path: Path, user_ids: NDArray[np.int64], item_ids: NDArray[np.int64]) -> "RatingMatrix":
        """What `write` wrote; DataError or KeyError where it cannot be read or does not fit these ids."""
        arrays = read_npz(path)
        levels = arrays.get("levels")
        matrix = cls(arrays["starts"], arrays["items"], arrays["codes"], levels, user_ids, item_ids)
        sound = (
            matrix.starts.dtype == np.int64
            and matrix.starts.shape == (matrix.users + 1,)
            and matrix.items.dtype in (np.uint16, np.uint32)
            and matrix.codes.dtype == (np.float32 if levels is None else np.uint8)
            and matrix.items.shape == matrix.codes.shape == (matrix.starts[-1],)
            and matrix.starts[0] == 0
            and bool((np.diff(matrix.starts) >= 0).all())
            and matrix.items.max(initial=0) < max(matrix.n_items, 1)
            and (
                levels is None
                or (levels.dtype == np.float32 and matrix.codes.max(initial=0) < max(len(levels), 1))
            )
        )
        if not sound:
            raise DataError("rows, columns and ratings do not belong together")
        return matrix

    def row(self, user: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
        own = slice(self.starts[user], self.starts[user + 1])
        return self.items[own], self.values(own)


def build_matrix(
    users: NDArray[Any],
    items: NDArray[Any],
    values: NDArray[Any],
    *,
    user_ids: NDArray[np.int64] | None = None,
    item_ids: NDArray[np.int64] | None = None,
    warn: Callable[[str], None],
) -> RatingMatrix:
    """The matrix of these ratings; rows and columns in the order of first appearance, or as the maps give them.

    Ratings of users or items that a map does not have are left out; of those of the same user and item the last counts.
    """
    values = np.asarray(values, np.float32)
    if len(values) and not (values.min() > 0 and values.max() < np.inf):
        raise DataError("ratings must be above 0 and finite: zero and negative ratings are refused")
    rows, user_ids = number_ids(users, user_ids)
    columns, item_ids = number_ids(items, item_ids)
    codes, levels = _encode(values)
    if skipped := int(np.count_nonzero(unknown := (rows < 0) | (columns < 0))):
        warn(
            f"{skipped:,} of {len(rows):,} ratings are left out: their user or item is not in the training data"
        )
        rows, columns, codes = rows[~unknown], columns[~unknown], codes[~unknown]
    columns = columns.astype(np.uint16 if len(item_ids) <= 1 << 16 else np.uint32)
    # Sorted by row and column; of several ratings in a place the last is kept.
    own_items, own_codes = np.empty_like(columns), np.empty_like(codes)
    sizes = np.zeros(len(user_ids) + 1, np.int64)
    done = 0
    for first, last, places in group_by_rows(rows, len(user_ids)):
        row, column = rows[places] - first, columns[places]
        key = row.astype(np.int64) * len(item_ids) + column
        order = np.argsort(key, kind="stable")
        key = key[order]
        kept = order[np.append(key[1:] != key[:-1], True)[: len(key)]]
        new = slice(done, done + len(kept))
        own_items[new], own_codes[new] = column[kept], codes[places][kept]
        sizes[first + 1 : last + 1] = np.bincount(row[kept], minlength=last - first)
        done += len(kept)
    if repeated := len(rows) - done:
        warn(f"{repeated:,} ratings have the user and item of a later one: the last one counts")
    starts = np.cumsum(sizes)
    return RatingMatrix(starts, own_items[:done], own_codes[:done], levels, user_ids, item_ids, skipped)


def number_ids(
    ids: NDArray[Any], names: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Each id's number, and the ids by number: in the order of first appearance, or as in `names`, -1 for others."""
    if names is not None:
        return _find(ids, names), names
    if not len(ids):
        return np.empty(0, np.int32), np.empty(0, np.int64)
    if ids.min() < 0 or ids.max() >= max(_SMALL_TABLE, 4 * len(ids)):
        names = np.unique(ids).astype(np.int64)
        ids = _find(ids, names)
    table = np.full(int(ids.max()) + 1, -1, np.int32)
    numbers = np.empty(len(ids), np.int32)
    appeared: list[NDArray[Any]] = []
    count = 0
    for part, out in zip(_blocks(ids), _blocks(numbers), strict=True):
        new, first = np.unique(part[table[part] < 0], return_index=True)
        new = new[np.argsort(first)]
        table[new] = np.arange(count, count + len(new))
        count += len(new)
        appeared.append(new)
        out[:] = table[part]
    order = np.concatenate(appeared).astype(np.int64)
    return numbers, order if names is None else names[order]


def group_by_rows(rows: NDArray[np.int32], count: int) -> Iterator[tuple[int, int, Any]]:
    """First row, end row and the places of their ratings, in blocks of about BLOCK ratings or one long row."""
    sizes = np.zeros(count, np.int64)
    for part in _blocks(rows):  # bincount makes an int64 copy of all that it is given
        sizes += np.bincount(part, minlength=count)
    ends = np.cumsum(sizes)
    grouped = all((part[1:] >= part[:-1]).all() for part in _blocks(rows, overlap=1))
    first = done = 0
    while first < count:
        last = max(int(np.searchsorted(ends, done + BLOCK, "right")), first + 1)
        end = int(ends[last - 1])
        yield first, last, slice(done, end) if grouped else np.flatnonzero((rows >= first) & (rows < last))
        first, done = last, end


def _blocks(array: NDArray[Any], overlap: int = 0) -> Iterator[NDArray[Any]]:
    return (array[place : place + BLOCK + overlap] for place in range(0, len(array), BLOCK))


def _find(ids: NDArray[Any], names: NDArray[np.int64]) -> NDArray[np.int32]:
    """The place of each id among the names, -1 where it is not there."""
    places = np.full(len(ids), -1, np.int32)
    if not len(names):
        return places
    order = np.argsort(names).astype(np.int32)
    ordered = names[order]
    for part, out in zip(_blocks(ids), _blocks(places), strict=True):
        at = np.minimum(np.searchsorted(ordered, part), len(names) - 1)
        out[:] = np.where(ordered[at] == part, order[at], -1)
    return places


def _encode(values: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Ratings as places in the few levels that they have; as they are where they have more than 256."""
    levels = np.unique(values[:BLOCK])
    for part in _blocks(values):
        if len(levels) > _LEVELS:
            return values, None
        at = np.minimum(np.searchsorted(levels, part), len(levels) - 1)
        levels = np.union1d(levels, part[levels[at] != part])
    if len(levels) > _LEVELS:
        return values, None
    codes = np.empty(len(values), np.uint8)
    for part, out in zip(_blocks(values), _blocks(codes), strict=True):
        out[:] = np.searchsorted(levels, part)
    return codes, levels
