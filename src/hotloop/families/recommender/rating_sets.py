"""The ratings of a run: from files, drawn, or MovieLens, split where they come in one table, as matrices.

Every choice of a split is a function of the seed and of ids and times alone, so the order in which ratings come does
not matter. A validation or test rating counts only where its user and its item have training ratings too: these number
users and items.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data import RatingSet, load_ratings
from hotloop.data.rating_matrix import BLOCK, RatingMatrix, build_matrix, group_by_rows, number_ids
from hotloop.data.ratings import Ratings, read_rating_text
from hotloop.data.stand_ins import draw_random_sets, draw_taste_ratings
from hotloop.engine.loading import check_same_data, load_once
from hotloop.engine.progress import Console
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender.config import TrainOptions

# Parts of a split; a rating OUTSIDE belongs to none, a STRANGER's user has no training rating.
TRAIN, VALID, TEST, OUTSIDE, STRANGER = range(5)
HALF = 1 << 31


@dataclass(frozen=True, eq=False)
class RatingSplit:
    table: Ratings
    parts: NDArray[np.uint8]
    unseen: NDArray[np.bool_]
    """Validation and test ratings that are removed, because no training rating has their item."""


def split_randomly(table: Ratings, fractions: Sequence[float], seed: int = 0) -> RatingSplit:
    """Each (user, item) goes to train, validation or test with these probabilities, which add up to 1."""
    # The test part is the top of the draws: 0.9, 0, 0.1 and 0.8, 0.1, 0.1 have the same one, but for strangers.
    draws = draw_numbers(seed, table.users, table.items)
    parts = (draws >= round(fractions[0] * 2**32)).astype(np.uint8)
    parts += draws >= round((fractions[0] + fractions[1]) * 2**32)
    return _without_strangers(table, parts)


def split_by_user_time(table: Ratings, seed: int = 0) -> RatingSplit:
    """The first 70 % of each user's ratings train; the others are for validation or test, by a coin for the user.

    Ratings of one moment are in the order of their items. Users with a single rating are left out.
    """
    parts = np.full(len(table), OUTSIDE, np.uint8)
    for order in order_blocks(table):
        users = table.users[order]
        begins = np.flatnonzero(np.append(True, users[1:] != users[:-1]))
        sizes = np.diff(np.append(begins, len(users)))
        place = np.arange(len(users)) - np.repeat(begins, sizes)
        later = np.where(draw_numbers(seed, users) < HALF, VALID, TEST)
        part = np.where(place < np.repeat(7 * sizes // 10, sizes), TRAIN, later)
        parts[order] = np.where(np.repeat(sizes, sizes) < 2, OUTSIDE, part)
    return _without_strangers(table, parts)


def split_by_date(table: Ratings, train: Sequence[int], test: Sequence[int], seed: int) -> RatingSplit:
    """Ratings of the first range of times (ends included) train; those of the second go by a coin each."""
    assert table.times is not None
    parts = np.full(len(table), OUTSIDE, np.uint8)
    parts[(table.times >= train[0]) & (table.times <= train[1])] = TRAIN
    later = np.flatnonzero((table.times >= test[0]) & (table.times <= test[1]))
    coin = draw_numbers(seed, table.users[later], table.items[later]) < HALF
    parts[later] = np.where(coin, VALID, TEST)
    return _without_strangers(table, parts)


def order_blocks(table: Ratings, among: NDArray[np.bool_] | None = None) -> Iterator[NDArray[np.intp]]:
    """Places of all ratings (`among` these) by user, time and item, whole users' and some millions at a time."""
    rows, names = number_ids(table.users)
    rank = np.empty(len(names), np.int32)
    rank[np.argsort(names)] = np.arange(len(names), dtype=np.int32)
    for begin in range(0, len(rows), BLOCK):
        rows[begin : begin + BLOCK] = rank[rows[begin : begin + BLOCK]]
    times = table.items if table.times is None else table.times
    for _, _, found in group_by_rows(rows, len(names)):
        places = np.arange(found.start, found.stop) if isinstance(found, slice) else found
        places = places if among is None else places[among[places]]
        keys = (table.values, table.items, times, rows)
        yield places[np.lexsort([key[places] for key in keys])]


def draw_numbers(seed: int, *columns: NDArray[Any]) -> NDArray[np.uint32]:
    """A uniform 32-bit number for each row of ids, the same wherever and whenever the row is met."""
    out = np.empty(len(columns[0]), np.uint32)
    for begin in range(0, len(out), BLOCK):
        here = slice(begin, begin + BLOCK)
        state = np.full(len(out[here]), seed & (1 << 64) - 1, np.uint64)
        for column in columns:
            state = _mix(_mix(state) ^ column[here].astype(np.int64).view(np.uint64))
        out[here] = _mix(state) >> np.uint64(32)
    return out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of the splitmix64 generator (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _without_strangers(table: Ratings, parts: NDArray[np.uint8]) -> RatingSplit:
    train = parts == TRAIN
    later = np.flatnonzero((parts == VALID) | (parts == TEST))
    # The ids of `number_ids`: about three times as fast as np.unique for millions of scattered users.
    stranger = ~np.isin(table.users[later], number_ids(table.users[train])[1])
    parts[later[stranger]] = STRANGER
    later = later[~stranger]
    unseen = np.zeros(len(parts), bool)
    unseen[later] = ~np.isin(table.items[later], number_ids(table.items[train])[1])
    return RatingSplit(table, parts, unseen)


@dataclass(frozen=True, eq=False)
class RatingSets:
    """Training ratings, and those of the same users to validate and to test with; None where there are none."""

    name: str
    train: RatingMatrix
    validation: RatingMatrix | None
    test: RatingMatrix | None
    scale: tuple[float, float]  # the smallest and largest training rating
    notice: str = ""
    files: tuple[str, str] = ("", "")  # that the validation and the test ratings are from, where they are


def load_sets(config: TrainOptions, console: Console) -> RatingSets:
    name: str = config.data
    notice, files = "", ("", "")
    others: Sequence[Ratings | None] = (None, None)
    with console.progress("reading ratings"):
        if config.training_data_file is not None:
            console.say("Loading training data")
            name, table = config.training_data_file.name, read_rating_text(config.training_data_file)
            paths = (config.validation_data_file, config.test_data_file)
            others = [None if path is None else read_rating_text(path) for path in paths]
            files = (paths[0].name if paths[0] else "", paths[1].name if paths[1] else "")
        elif config.data == "random":
            console.say("Generating random training data")
            console.say("Generating random evaluation data")
            table, drawn = draw_random_sets(seed=config.seed)
            others = (drawn, None)
        elif config.data == "procedural":
            console.say("data: ratings drawn here from hidden tastes, as asked")
            table = draw_taste_ratings(seed=config.seed)
        else:
            loading = partial(load_ratings, say=console.say, progress=console.progress)
            found = load_once(loading, RatingSet)
            table, notice = found.ratings, found.notice
        is_whole = config.training_data_file is not None and config.no_validation
        if not any(others) and not is_whole:
            table, *others = _split(config, name, table, console)
            name = f"{name} ({config.split} split)"
        train = build_matrix(table.users, table.items, table.values, warn=console.warn)
        ids = {"user_ids": train.user_ids, "item_ids": train.item_ids}
        validation, test = (
            build_matrix(part.users, part.items, part.values, **ids, warn=console.warn) if part else None
            for part in others
        )
        counts = [None if part is None else part.ratings for part in (train, validation, test)]
        check_same_data(users=train.users, items=train.n_items, ratings=counts)
        console.say(f"Users: {train.users:,}  Items: {train.n_items:,}  Ratings: {train.ratings:,}")
    values = train.values() if train.levels is None else train.levels
    scale = float(values.min()), float(values.max())
    return RatingSets(name, train, validation, test, scale, notice, files)


def _split(config: TrainOptions, name: str, table: Ratings, console: Console) -> list[Ratings]:
    if config.split == "user-time" and table.times is None:
        raise OptionError(f"--split user-time: {name} has no times; --split random needs none")
    split = (
        split_randomly(table, config.fractions, config.seed)
        if config.split == "random"
        else split_by_user_time(table, config.seed)
    )
    parts = [table.take((split.parts == which) & ~split.unseen) for which in (TRAIN, VALID, TEST)]
    if not len(parts[0]):
        raise DataError(f"{name}: no rating falls into the training part of --split {config.split}")
    counts = "{:,} ratings to train with, {:,} to validate and {:,} to test".format(*map(len, parts))
    console.say(f"{name}: --split {config.split} gives {counts}")
    return parts


def read_truth(path: Path, train: RatingMatrix, console: Console) -> RatingMatrix:
    with console.progress("reading ratings"):
        part = read_rating_text(path)
        ids = {"user_ids": train.user_ids, "item_ids": train.item_ids}
        return build_matrix(part.users, part.items, part.values, **ids, warn=console.warn)
