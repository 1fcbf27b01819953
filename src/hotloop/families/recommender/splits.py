"""A table of ratings divided into train, validation and test: at random, by each user's time, or by date.

Every choice is a function of the seed and of ids and times alone, so the order in which ratings come does not matter.
A validation or test rating counts only where its user and its item have training ratings too. Files are not known
here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.matrix import BLOCK, by_rows, number
from hotloop.data.rating_text import Triples

TRAIN, VALID, TEST, OUTSIDE, STRANGER = range(5)
"""Parts of a split; a rating OUTSIDE belongs to none, a STRANGER's user has no training rating."""
HALF = 1 << 31
_MASK = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Split:
    """Which part each rating belongs to. The table itself is not copied until a part is asked for."""

    triples: Triples
    parts: NDArray[np.uint8]
    unseen: NDArray[np.bool_]
    """Validation and test ratings that are removed, because no training rating has their item."""

    def part(self, which: int) -> Triples:
        """The ratings of a part, in the order of the table."""
        return self.triples.take(self.chosen(which))

    def chosen(self, *which: int) -> NDArray[np.bool_]:
        """Where the ratings of these parts are."""
        return self.given(*which) & ~self.unseen

    def given(self, *which: int) -> NDArray[np.bool_]:
        """As `chosen`, with those that were removed because of their item."""
        found: NDArray[np.bool_] = np.logical_or.reduce([self.parts == each for each in which])
        return found


def random_split(triples: Triples, fractions: Sequence[float] = (0.8, 0.1, 0.1), seed: int = 0) -> Split:
    """Each (user, item) goes to train, validation or test with these probabilities, which add up to 1.

    The test part depends on the seed and its own fraction: 0.9, 0, 0.1 and 0.8, 0.1, 0.1 have the same one, but for
    ratings whose user or item only the larger train part has.
    """
    draws = drawn(seed, triples.users, triples.items)
    parts = (draws >= round(fractions[0] * 2**32)).astype(np.uint8)
    parts += draws >= round((fractions[0] + fractions[1]) * 2**32)
    return _without_strangers(triples, parts)


def user_time_split(triples: Triples, seed: int = 0) -> Split:
    """The first 70 % of each user's ratings train; the others are for validation or test, by a coin for the user.

    Ratings of one moment are in the order of their items. Users with a single rating are left out.
    """
    parts = np.full(len(triples), OUTSIDE, np.uint8)
    for order in in_order(triples):
        users = triples.users[order]
        begins = np.flatnonzero(np.append(True, users[1:] != users[:-1]))
        sizes = np.diff(np.append(begins, len(users)))
        place = np.arange(len(users)) - np.repeat(begins, sizes)
        later = np.where(drawn(seed, users) < HALF, VALID, TEST)
        part = np.where(place < np.repeat(7 * sizes // 10, sizes), TRAIN, later)
        parts[order] = np.where(np.repeat(sizes, sizes) < 2, OUTSIDE, part)
    return _without_strangers(triples, parts)


def date_split(triples: Triples, train: tuple[int, int], test: tuple[int, int], seed: int = 0) -> Split:
    """Ratings of the first range of times (ends included) train; those of the second go by a coin each."""
    assert triples.times is not None
    parts = np.full(len(triples), OUTSIDE, np.uint8)
    parts[(triples.times >= train[0]) & (triples.times <= train[1])] = TRAIN
    later = np.flatnonzero((triples.times >= test[0]) & (triples.times <= test[1]))
    coin = drawn(seed, triples.users[later], triples.items[later]) < HALF
    parts[later] = np.where(coin, VALID, TEST)
    return _without_strangers(triples, parts)


def in_order(triples: Triples, among: NDArray[np.bool_] | None = None) -> Iterator[NDArray[np.intp]]:
    """Places of all ratings (`among` these) by user, time and item, whole users' and some millions at a time."""
    rows, names = number(triples.users)
    rank = np.empty(len(names), np.int32)
    rank[np.argsort(names)] = np.arange(len(names), dtype=np.int32)
    for begin in range(0, len(rows), BLOCK):
        rows[begin : begin + BLOCK] = rank[rows[begin : begin + BLOCK]]
    times = triples.items if triples.times is None else triples.times
    for _, _, found in by_rows(rows, len(names)):
        places = np.arange(found.start, found.stop) if isinstance(found, slice) else found
        places = places if among is None else places[among[places]]
        keys = (triples.ratings, triples.items, times, rows)
        yield places[np.lexsort([key[places] for key in keys])]


def drawn(seed: int, *columns: NDArray[Any]) -> NDArray[np.uint32]:
    """A uniform 32-bit number for each row of ids, the same wherever and whenever the row is met."""
    out = np.empty(len(columns[0]), np.uint32)
    for begin in range(0, len(out), BLOCK):
        here = slice(begin, begin + BLOCK)
        state = np.full(len(out[here]), seed & _MASK, np.uint64)
        for column in columns:
            state = _mixed(_mixed(state) ^ column[here].astype(np.int64).view(np.uint64))
        out[here] = _mixed(state) >> np.uint64(32)
    return out


def distinct(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Each id once, in no special order; about three times as fast as np.unique for millions of scattered users."""
    return number(ids)[1]


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of the splitmix64 generator (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _without_strangers(triples: Triples, parts: NDArray[np.uint8]) -> Split:
    train = parts == TRAIN
    later = np.flatnonzero((parts == VALID) | (parts == TEST))
    stranger = ~np.isin(triples.users[later], distinct(triples.users[train]))
    parts[later[stranger]] = STRANGER
    later = later[~stranger]
    unseen = np.zeros(len(parts), bool)
    unseen[later] = ~np.isin(triples.items[later], distinct(triples.items[train]))
    return Split(triples, parts, unseen)
