"""`hotloop recommender predict`: a run's predictions for known ratings, as a text file with the original ids.

One line a rating: user TAB item TAB prediction TAB truth, by rows and columns of the training ratings. The device
gives only the places that are asked for, and works on the next users while the last ones are written.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from hotloop.data.rating_matrix import RatingMatrix, build_matrix
from hotloop.data.ratings import read_triples
from hotloop.engine.progress import Console, compiling
from hotloop.families.recommender import batches, model, saved_run
from hotloop.families.recommender.commands_config import PredictOptions
from hotloop.families.recommender.evaluation import asked_for, batch_size
from hotloop.families.recommender.measures import ScoringRules, make_rules
from hotloop.families.recommender.prediction_text import writing
from hotloop.families.recommender.saved_run import SavedRun


class Block(NamedTuple):
    """Some users' ratings: row and column of each, what is predicted, and what is true."""

    rows: NDArray[np.int64]
    columns: NDArray[Any]
    predictions: NDArray[np.float32]
    truth: NDArray[np.float32]


def run(config: PredictOptions, console: Console) -> Mapping[str, Any]:
    """Write the file; the errors are those of its lines."""
    found = saved_run.load_run(config.run, config.step, best=config.best)
    asked = asked_for(config, found, observed(config.ratings_file, found, console), console)
    rules = make_rules(found.low, found.high, config.clip, whole=config.round)
    path = config.output or config.run / "predictions" / f"{asked.short}-{found.step}.txt"
    size = batch_size(config.batch_size, found)
    squares = absolutes = 0.0
    with writing(path) as append, console.progress("predicting", asked.truth.ratings) as bar:
        for block in predicted(found, asked.train, asked.truth, size, rules):
            users, items = asked.train.user_ids[block.rows], asked.train.item_ids[block.columns]
            append(users, items, block.predictions, block.truth)
            errors = block.predictions.astype(np.float64) - block.truth
            squares += float(np.square(errors).sum())
            absolutes += float(np.abs(errors).sum())
            bar.advance(len(errors))
    count = asked.truth.ratings
    rmse, mae = math.sqrt(squares / count), absolutes / count
    console.say(f"{asked.name}: {count:,} predictions, RMSE {rmse:.4f}, MAE {mae:.4f}; written: {path}")
    return {
        "run": str(config.run),
        "step": found.step,
        "data": asked.name,
        "notice": asked.notice,
        "output": str(path),
        "ratings": count,
        "rmse": rmse,
        "mae": mae,
    }


def observed(ratings_file: Path | None, found: SavedRun, console: Console) -> RatingMatrix:
    """What users have rated: the run's training ratings, or those of a file, whose users may be new."""
    if ratings_file is None:
        return saved_run.load_training(found)
    read = read_triples(ratings_file)
    return build_matrix(read.users, read.items, read.ratings, item_ids=found.item_ids, warn=console.warn)


def predicted(
    found: SavedRun, train: RatingMatrix, truth: RatingMatrix, size: int, rules: ScoringRules
) -> Iterator[Block]:
    """Every rating of `truth`, so many users at a time."""
    users = np.flatnonzero(np.diff(truth.starts)).astype(np.int32)
    size = min(size, len(users))
    most, room = batches.max_ratings(truth, size), batches.max_ratings(train, size)

    @jax.jit
    def at(state: Any, rows: batches.DeviceRows, users: Array, where: tuple[Array, Array]) -> Array:
        ratings = batches.densify(rows, users, train.n_items, room)
        return rules.prediction(model.predict(found.job, state, ratings)[where])

    resident, waiting = batches.send_rows(train), None
    for first in range(0, len(users), size):
        chosen = users[first : first + size]
        rows, columns, values = _ratings(truth, chosen)
        where = _filled(np.searchsorted(chosen, rows), most), _filled(columns, most)
        with nullcontext() if first else compiling():
            result = at(found.state, resident, _filled(chosen, size), where)
        if waiting:
            yield _block(*waiting)
        waiting = rows, columns, result, values
    if waiting:
        yield _block(*waiting)


def _ratings(truth: RatingMatrix, users: NDArray[np.int32]) -> tuple[NDArray[Any], ...]:
    """Row, column and rating of all that these users have, who are all that have any from the first to the last."""
    own = slice(int(truth.starts[users[0]]), int(truth.starts[users[-1] + 1]))
    codes = truth.codes[own]
    values = codes if truth.levels is None else truth.levels[codes]
    return np.repeat(users, np.diff(truth.starts)[users]), truth.items[own], values


def _filled(array: NDArray[Any], length: int) -> NDArray[np.int32]:
    """As int32 of one length for all calls; what is added repeats the last one."""
    return np.pad(array.astype(np.int32), (0, length - len(array)), mode="edge")


def _block(rows: Any, columns: Any, result: Array, values: Any) -> Block:
    return Block(rows, columns, np.asarray(result)[: len(rows)], values)
