"""`hotloop recommender evaluate`: RMSE, MAE, NDCG and recall of a run's weights, as a table and a JSON file.

`evaluation` is the same for weights in memory. What is measured, and how, is in `measures` and `ranking`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.progress import Console
from hotloop.engine.records import write_json
from hotloop.errors import DataError
from hotloop.families.recommender import model, rating_sets, saved_run
from hotloop.families.recommender.batches import DeviceRows
from hotloop.families.recommender.commands_config import EvaluateOptions, TruthOptions
from hotloop.families.recommender.measures import Batch, Figures, Measures, Scorer, ScoringRules, make_rules
from hotloop.families.recommender.saved_run import SavedRun
from hotloop.options import to_jsonable


@dataclass(frozen=True, eq=False)
class Asked:
    """What predictions start from, what they are compared with, and its name, in full and for a file."""

    train: RatingMatrix
    truth: RatingMatrix
    name: str
    short: str
    notice: str = ""


def autoencoder(job: model.Job) -> Scorer:
    """The network without dropout as a scorer; its state is a training state."""

    def score(state: Any, batch: Batch) -> Any:
        return model.predict(job, state, batch["ratings"])

    return score


def evaluation(
    job: model.Job,
    train: RatingMatrix,
    truth: RatingMatrix,
    batch_size: int,
    low: float,
    high: float,
    k: Sequence[int] = (),
    rows: DeviceRows | None = None,
) -> Callable[[model.State], Figures]:
    """From training states to figures, compiled once; `low` and `high` may be infinite, without `k` nothing is ranked.

    `rows` are the training ratings where they are on the device already.
    """
    return Measures(autoencoder(job), train, truth, batch_size, ScoringRules(low, high, ks=tuple(k)), rows)


def run(config: EvaluateOptions, console: Console) -> Mapping[str, Any]:
    """Evaluate a checkpoint; the result is also written to the run's folder."""
    found = saved_run.load_run(config.run, config.step, best=config.best)
    asked = asked_for(config, found, saved_run.load_training(found), console)
    size = batch_size(config.batch_size, found)
    started = time.perf_counter()
    with console.progress("evaluating"):
        measures = Measures(autoencoder(found.job), asked.train, asked.truth, size, rules(config, found))
        figures = measures(found.state)
    result = {
        "run": str(config.run),
        "step": found.step,
        "data": asked.name,
        "notice": asked.notice,
        **figures,
        "skipped_ratings": asked.truth.skipped,
        "clip": config.clip,
        "round": config.round,
        "relevant": config.relevant,
        "batch_size": size,
        "seconds": time.perf_counter() - started,
    }
    show({f"{config.run} (step {found.step:,})": figures}, config.k, config.relevant, asked, console)
    console.say(f"as the old program averaged: {figures['rmse_mean_of_batches']:.4f}, {OLD.format(size)}")
    path = _write(config, asked.short, found.step, result)
    console.say(f"written: {path}")
    return {**to_jsonable(result), "path": str(path)}


OLD = "the mean of RMSEs over whole batches of {} users, unclipped; for comparison only"


def rules(config: EvaluateOptions, found: SavedRun) -> ScoringRules:
    """The run's range of ratings and the command's wishes."""
    return make_rules(
        found.low, found.high, config.clip, whole=config.round, ks=config.k, relevant=config.relevant
    )


def batch_size(asked: int | None, found: SavedRun) -> int:
    """The option, else what the run validated with."""
    size = asked or found.config.validation_batch_size
    assert size is not None
    return size


def asked_for(config: TruthOptions, found: SavedRun, train: RatingMatrix, console: Console) -> Asked:
    """The truth of --data-file, or of the part of the run's own data that --split names."""
    if config.data_file is not None:
        truth = rating_sets.read_truth(config.data_file, train, console)
        asked = Asked(train, truth, str(config.data_file), config.data_file.stem)
    else:
        asked = _part(config, found, train, console)
    if not asked.truth.ratings:
        raise DataError(f"{asked.name}: no rating has a user and an item that the run knows")
    return asked


def _part(config: TruthOptions, found: SavedRun, train: RatingMatrix, console: Console) -> Asked:
    data = rating_sets.load_sets(found.config, console)
    if not same_ratings(data.train, train):
        raise DataError(
            f"{config.run}: {data.name} has other training ratings than the run was trained on; give the truth with "
            "--data-file"
        )
    name = config.split or ("test" if data.test is not None else "validation")
    truth: RatingMatrix | None = getattr(data, name)
    if truth is None:
        raise DataError(f"--split {name}: {data.name} has no such ratings; give a file with --data-file")
    if data.notice:
        console.warn(data.notice)
    return Asked(train, truth, data.describe(name), name, data.notice)


def same_ratings(one: RatingMatrix, other: RatingMatrix) -> bool:
    """Whether both have the same users, items and rated places: then no test rating was trained on."""
    names = ("user_ids", "item_ids", "starts", "items")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def show(
    found: Mapping[str, Mapping[str, Any]], ks: Sequence[int], relevant: float, asked: Asked, console: Console
) -> None:
    """Figures of several models on the same ratings in one table; a dash where a figure means nothing."""
    first = next(iter(found.values()))
    console.say(f"{asked.name}: {first['ratings']:,} ratings of {first['users']:,} users")
    names = [f"{name}@{k}" for name in ("ndcg", "recall") for k in ks]
    titles = [name.replace("ndcg", "NDCG").replace("recall", "Recall") for name in names]
    rows = [
        [label, *(f"{figures[name]:.4f}" if name in figures else "-" for name in ("rmse", "mae", *names))]
        for label, figures in found.items()
    ]
    console.table(["model", "RMSE", "MAE", *titles], rows)
    if not ks:
        return
    ranked = max(figures.get("ranked_users", 0) for figures in found.values())
    console.say(
        f"ranking: items not rated in training; mean over the {ranked:,} users with a rating of {relevant:g} or more"
    )


def _write(config: EvaluateOptions, part: str, step: int, result: Mapping[str, Any]) -> Path:
    how = ("" if config.clip else "-unclipped") + ("-rounded" if config.round else "")
    path = config.run / "evaluations" / f"{part}-{step}{how}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, result)
    return path
