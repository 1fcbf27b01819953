"""`hotloop recommender recommend`: for each user the items with the highest predictions that it has not rated.

All that is needed lies in the run's folder. Items are in the order of their scores before clipping, equal ones in
the order of their columns.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.progress import Console, compiling
from hotloop.errors import OptionError
from hotloop.families.recommender import batches, measures, model, saved_run
from hotloop.families.recommender.commands_config import RecommendOptions
from hotloop.families.recommender.evaluation import batch_size
from hotloop.families.recommender.measures import ScoringRules, make_rules
from hotloop.families.recommender.prediction_text import writing
from hotloop.families.recommender.predictions import observed
from hotloop.families.recommender.saved_run import SavedRun


class Lists(NamedTuple):
    """Lists of some users, end to end: row, column and predicted rating of each entry, best first."""

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    predictions: NDArray[np.float32]


def run(config: RecommendOptions, console: Console) -> Mapping[str, Any]:
    """A file, or a table and the lists themselves."""
    found = saved_run.load_run(config.run, config.step, best=config.best)
    train = observed(config.ratings_file, found, console)
    users = rows_of(config, train)
    rules = make_rules(found.low, found.high, config.clip, whole=config.round)
    lists = recommended(found, train, users, config.top, batch_size(config.batch_size, found), rules)
    named = ((train.user_ids[each.rows], train.item_ids[each.columns], each.predictions) for each in lists)
    result = {"run": str(config.run), "step": found.step, "users": len(users), "top": config.top}
    if config.output is None:
        with console.progress("recommending"):
            blocks: list[tuple[NDArray[Any], ...]] = list(named)
        shown = _shown(blocks, console)
        if len(shown) < len(users):
            console.warn(f"{len(users) - len(shown):,} of these users have rated every item")
        return {**result, "recommendations": shown}
    with writing(config.output) as append, console.progress("recommending", len(users)) as bar:
        for columns in named:
            append(*columns)
            bar.advance(len(np.unique(columns[0])))
    console.say(f"{config.top} items for each of {len(users):,} users; written: {config.output}")
    return {**result, "output": str(config.output)}


def rows_of(config: RecommendOptions, train: RatingMatrix) -> NDArray[np.int32]:
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


def recommended(
    found: SavedRun, train: RatingMatrix, users: NDArray[np.int32], top: int, size: int, rules: ScoringRules
) -> Iterator[Lists]:
    """The lists of these rows, so many users at a time; shorter where fewer items are left unrated."""
    size, top = min(size, len(users)), min(top, train.n_items)
    room = batches.max_ratings(train, size)

    @jax.jit
    def best(state: Any, rows: batches.DeviceRows, users: Array) -> tuple[Array, Array, Array]:
        ratings = batches.densify(rows, users, train.n_items, room)
        scores = measures.mask_rated(model.predict(found.job, state, ratings), ratings > 0)
        highest, columns = lax.top_k(scores, top)
        return rules.prediction(highest), columns, highest > -jnp.inf

    resident = batches.send_rows(train)
    for first in range(0, len(users), size):
        chosen = users[first : first + size]
        filled = np.pad(chosen, (0, size - len(chosen)), mode="edge")
        with nullcontext() if first else compiling():
            parts = best(found.state, resident, filled)
        predictions, columns, there = (np.asarray(part)[: len(chosen)] for part in parts)
        yield Lists(np.repeat(chosen, there.sum(1)), columns[there], predictions[there])


def _shown(blocks: list[tuple[NDArray[Any], ...]], console: Console) -> list[dict[str, Any]]:
    rows: list[tuple[int, int, int, str]] = []
    lists: list[dict[str, Any]] = []
    entries = ((int(u), int(i), float(p)) for block in blocks for u, i, p in zip(*block, strict=True))
    for user, item, prediction in entries:
        if not lists or lists[-1]["user"] != user:
            lists.append({"user": user, "items": [], "predictions": []})
        lists[-1]["items"].append(item)
        lists[-1]["predictions"].append(prediction)
        rows.append((user, len(lists[-1]["items"]), item, f"{prediction:.3f}"))
    console.table(["user", "place", "item", "prediction"], rows)
    return lists
