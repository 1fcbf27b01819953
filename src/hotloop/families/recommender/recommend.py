"""`hotloop recommender recommend`: the best items that users have not rated, as a table, or of all users in a file.

One line says what the lists are ordered by and what that order was worth when the run was evaluated: a model of ratings
ranks far worse than it rates.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.data.titles import read_titles
from hotloop.engine import processes
from hotloop.engine.device import platform
from hotloop.engine.feed import fill_up
from hotloop.engine.progress import Console, compiling
from hotloop.engine.run import current_records, read_events
from hotloop.errors import DataError, OptionError, RunError
from hotloop.families.recommender import batches, model
from hotloop.families.recommender.commands_config import RecommendOptions
from hotloop.families.recommender.config import KS
from hotloop.families.recommender.evaluate import (
    check_rating_options,
    load_observed,
    load_on_devices,
    on_all,
    pad_users,
    write_lines,
)
from hotloop.families.recommender.measures import ScoringRules, first_places, make_rules
from hotloop.families.recommender.saved_run import SavedRun

Block = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]
"""How many users it has; row, column and score of each entry of their lists."""
USERS_AT_ONCE = {"cpu": 256}  # more do not fit into its caches
MOST_USERS = 4096


def run(config: RecommendOptions, console: Console) -> Mapping[str, Any]:
    found, mesh = load_on_devices(config)
    check_rating_options(config, found)
    train = load_observed(config.ratings_file, found, console)
    users = find_rows(config, train)
    titles = None if config.titles is None else TitleColumn(config, train, console)
    rules = ScoringRules() if found.job.is_ranking else make_rules(config, found.low, found.high)
    size = config.batch_size or USERS_AT_ONCE.get(platform(), MOST_USERS)
    console.say(describe_order(found))
    lists = Lists(found, train, users, config.top, size, rules, mesh)
    result = {"run": str(config.run), "step": found.step, "users": len(users), "top": config.top}
    if config.output is None:
        return {**result, "recommendations": show_lists(lists, titles, console)}
    with write_lines(config.output) as (append,), console.progress("recommending", len(users)) as bar:
        lists.compile()
        began = time.perf_counter()
        for count, rows, columns, values in lists:
            names = () if titles is None else (titles.of(columns),)
            append(train.user_ids[rows], train.item_ids[columns], values, *names)
            bar.advance(count)
        seconds = time.perf_counter() - began
    rate = len(users) / seconds
    console.say(
        f"{config.top} items for each of {len(users):,} users, {rate:,.0f} users/s with the writing; "
        f"written: {config.output}"
    )
    return {**result, "output": str(config.output), "seconds": seconds, "users_per_second": rate}


def show_lists(lists: "Lists", titles: "TitleColumn | None", console: Console) -> list[dict[str, Any]]:
    """Every user's list, in a table and as it is returned."""
    train, by = lists.train, "log-probability" if lists.found.job.is_ranking else "prediction"
    with console.progress("recommending"):
        lists.compile()
        blocks = list(lists)
    shown: dict[int, dict[str, Any]] = {}
    table = []
    for row, column, value in (each for block in blocks for each in zip(*block[1:], strict=True)):
        user, item = int(train.user_ids[row]), int(train.item_ids[column])
        own = shown.setdefault(user, {"user": user, "items": [], "predictions": []})
        own["items"].append(item)
        own["predictions"].append(float(value))
        line = [user, len(own["items"]), item, f"{float(value):.3f}"]
        if titles is not None:
            line.append(titles.names[column])
            own.setdefault("titles", []).append(titles.names[column])
        table.append(line)
    console.table(["user", "place", "item", by, *(["title"] if titles else [])], table)
    if len(shown) < len(lists.users):
        console.warn(f"{len(lists.users) - len(shown):,} of these users have rated every item")
    return list(shown.values())


def describe_order(found: SavedRun) -> str:
    """What lists are ordered by, and what the run's own evaluation of these weights found that order to be worth."""
    by = "log-probability (--objective ranking)" if found.job.is_ranking else "predicted rating"
    ndcg, events = f"ndcg@{KS[0]}", []
    with suppress(
        RunError
    ):  # an earlier version's run, or records that are not there: lists can be made all the same
        events = [
            event
            for event in current_records(read_events(found.folder))
            if event["event"] == "evaluation" and event["update"] == found.step and ndcg in event
        ]
    config = found.config
    held_out = config.validation_data_file or config.test_data_file
    if config.training_data_file and config.no_validation and not held_out:
        return f"ranked by {by}: no ratings were held out (--no-validation) that could say what that order is worth"
    if not events:
        advice = (
            f"`hotloop recommender baselines --run {found.folder}` compares that with popularity and EASE"
        )
        return f"ranked by {by}: {advice}"
    last = events[-1]  # of the test part, where there is one
    line = f"ranked by {by}: NDCG@{KS[0]} {last[ndcg]:.4f} on the {last['split']} part"
    line += f", where popularity has {last[f'popularity_{ndcg}']:.4f}"
    return line if found.job.is_ranking else f"{line}; --objective ranking learns the order itself"


class TitleColumn:
    """The titles of a run's items, by column; an item without one has an empty text."""

    def __init__(self, config: RecommendOptions, train: RatingMatrix, console: Console):
        assert config.titles is not None
        known = read_titles(config.titles)
        self.names = [known.get(int(item), "") for item in train.item_ids]
        missing = self.names.count("")
        if missing == train.n_items:
            raise DataError(f"--titles {config.titles}: none of its ids is an item of {config.run}")
        if missing:
            console.warn(
                f"--titles {config.titles}: {missing:,} of {train.n_items:,} items have no title there"
            )

    def of(self, columns: NDArray[Any]) -> list[str]:
        return [self.names[column] for column in columns]


def find_rows(config: RecommendOptions, train: RatingMatrix) -> NDArray[np.int32]:
    """The rows of the users that are asked for, each once, in that order."""
    if config.all:
        return np.arange(train.users, dtype=np.int32)
    ids, users = train.user_ids, list(dict.fromkeys(config.users))
    order = np.argsort(ids)
    places = np.searchsorted(ids, users, sorter=order)
    rows = order[np.minimum(places, len(ids) - 1)]
    unknown = [str(user) for user, row in zip(users, rows, strict=True) if ids[row] != user]
    if unknown:
        where = config.ratings_file or f"the training ratings of {config.run}"
        raise OptionError(
            f"--users {' '.join(unknown)}: not in {where}, which has {len(ids):,} users with ids from {ids.min()} to "
            f"{ids.max()}"
        )
    return rows.astype(np.int32)


class Lists:
    """The best unrated items of these rows, best first, so many users at a time.

    The device works on the next block while the caller has the last one.
    """

    def __init__(
        self,
        found: SavedRun,
        train: RatingMatrix,
        users: NDArray[np.int32],
        top: int,
        size: int,
        rules: ScoringRules,
        mesh: Mesh | None = None,
    ):
        self.found, self.train, self.users = found, train, users
        self.size = min(size, len(users))
        self.length = fill_up(batches.split_over(mesh), self.size)
        dense = batches.make_dense(train, self.length, mesh, capacity=self._find_capacity(mesh))

        @partial(processes.JitTogether, out_shardings=on_all(mesh))
        def best(state: Any, rows: batches.DeviceRows, users: Array) -> tuple[Array, Array, Array]:
            ratings = dense(rows, users)
            scores = model.predict(found.job, state, ratings)
            columns, there = first_places(scores, ratings > 0, top)
            return rules.predict(jnp.take_along_axis(scores, columns, axis=-1)), columns, there

        self._best = best
        self._resident = processes.place(batches.make_rows(train), on_all(mesh))

    def _find_capacity(self, mesh: Mesh | None) -> int:
        """The most ratings that a device's share of any of these blocks has: which users meet is known."""
        sizes, shares = np.diff(self.train.starts), 1 if mesh is None else mesh.size
        blocks = (pad_users(chosen, self.length).reshape(shares, -1) for chosen in self._blocks())
        return max(1, max(int(sizes[block].sum(1).max()) for block in blocks))

    def _blocks(self) -> Iterator[NDArray[np.int32]]:
        return (self.users[first : first + self.size] for first in range(0, len(self.users), self.size))

    def _compute(self, chosen: NDArray[np.int32]) -> Any:
        return self._best(self.found.state, self._resident, pad_users(chosen, self.length))

    def compile(self) -> None:
        """Make the first block, whose result is not kept: so that what follows is as fast as it will be."""
        with compiling():
            jax.tree.map(np.asarray, self._compute(next(self._blocks())))

    def __iter__(self) -> Iterator[Block]:
        before = None
        for chosen in self._blocks():
            now = chosen, self._compute(chosen)
            if before is not None:
                yield self._collect(*before)
            before = now
        if before is not None:
            yield self._collect(*before)

    def _collect(self, chosen: NDArray[np.int32], parts: Any) -> Block:
        values, columns, there = (np.asarray(part)[: len(chosen)] for part in parts)
        return len(chosen), np.repeat(chosen, there.sum(1)), columns[there], values[there]
