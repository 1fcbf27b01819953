"""`hotloop recommender evaluate` and `predict`: what a run's predictions are worth, and the predictions themselves."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from hotloop.data.rating_matrix import RatingMatrix, build_matrix
from hotloop.data.ratings import Tables, read_rating_text, write_tables
from hotloop.engine import processes
from hotloop.engine.device import mesh_of_replicas, replicas_that_fit
from hotloop.engine.feed import fill_up, place_everywhere, placement_like
from hotloop.engine.progress import Console, compiling
from hotloop.engine.run import write_json
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import batches, model, rating_sets, saved_run
from hotloop.families.recommender.batches import Figures
from hotloop.families.recommender.commands_config import (
    CheckpointOptions,
    EvaluateOptions,
    PredictionOptions,
    PredictOptions,
    RankingOptions,
    TruthOptions,
)
from hotloop.families.recommender.measures import RANKED, ScoringRules, make_measures, make_rules
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.families.recommender.saved_run import SavedRun
from hotloop.options import to_jsonable

Columns = tuple[NDArray[Any], ...]


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """What predictions start from, what they are compared with, and its name, in full and for a file."""

    train: RatingMatrix
    truth: RatingMatrix
    name: str
    short: str
    notice: str = ""


def load_on_devices(config: CheckpointOptions) -> tuple[SavedRun, Mesh | None]:
    """The run of a command with its weights on every device that shares the users, and these devices."""
    if config.replicas is not None:
        mesh_of_replicas(config.replicas)  # too many are refused before anything is read
    found = saved_run.load_run(config.run, config.step, best=config.best)
    mesh = mesh_of_replicas(config.replicas or replicas_that_fit(found.config.replicas))
    return replace(found, state=place_everywhere(found.state, mesh)), mesh


def run(config: EvaluateOptions, console: Console) -> Mapping[str, Any]:
    found, mesh = load_on_devices(config)
    check_rating_options(config, found)
    chosen = load_evaluation_set(config, found, found.load_training(), console)
    size = config.batch_size or found.batch_size
    started = time.perf_counter()
    with console.progress("evaluating"):
        rules = make_rules(config, found.low, found.high)
        measure = make_measures(
            found.score, chosen.train, chosen.truth, size, rules, mesh=mesh, rates=not found.job.is_ranking
        )
        figures = measure(found.state)
    result = {
        "run": str(config.run),
        "step": found.step,
        "data": chosen.name,
        "notice": chosen.notice,
        **figures,
        "skipped_ratings": chosen.truth.skipped,
        "clip": config.clip,
        "round": config.round,
        "relevant": config.relevant,
        "batch_size": size,
        "seconds": time.perf_counter() - started,
    }
    show_figures({f"{config.run} (step {found.step:,})": figures}, config, chosen, console)
    if "rmse" in figures:
        console.say(
            f"as the old program averaged: {figures['rmse_mean_of_batches']:.4f}, the mean of RMSEs over whole batches "
            f"of {size} users, unclipped; for comparison only"
        )
    how = ("" if config.clip else "-unclipped") + ("-rounded" if config.round else "")
    path = config.run / "evaluations" / f"{chosen.short}-{found.step}{how}.json"
    if processes.is_writer():
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    console.say(f"written: {path}")
    return {**to_jsonable(result), "path": str(path)}


def check_rating_options(config: PredictionOptions, found: SavedRun) -> None:
    """OptionError for what changes predicted ratings, of which a run of --objective ranking has none."""
    given = "--round" if config.round else "" if config.clip else "--no-clip"
    if found.job.is_ranking and given:
        raise OptionError(
            f"{given}: {found.folder} was trained by --objective ranking and predicts no ratings"
        )


def load_evaluation_set(
    config: TruthOptions, found: SavedRun, train: RatingMatrix, console: Console
) -> EvaluationSet:
    """The truth of --data-file, or of the part of the run's own data that --split names."""
    if config.data_file is not None:
        truth = rating_sets.read_truth(config.data_file, train, console)
        chosen = EvaluationSet(train, truth, str(config.data_file), config.data_file.stem)
    else:
        data = rating_sets.load_sets(found.config, console)
        if not has_same_ratings(data.train, train):
            raise DataError(
                f"{config.run}: {data.name} has other training ratings than the run was trained on; give the truth "
                "with --data-file"
            )
        part = choose_part(data, "--split", config.split, "give a file with --data-file")
        chosen = replace(part, train=train)
        if data.notice:
            console.warn(data.notice)
    if not chosen.truth.ratings:
        raise DataError(f"{chosen.name}: no rating has a user and an item that the run knows")
    return chosen


def choose_part(data: RatingSets, option: str, name: str | None, advice: str) -> EvaluationSet:
    """The `validation` or `test` part; without a name, test where there is one, else validation."""
    name = name or ("test" if data.test is not None else "validation")
    truth = data.test if name == "test" else data.validation
    if truth is None:
        raise DataError(f"{option} {name}: {data.name} has no such ratings; {advice}")
    file = data.files[("validation", "test").index(name)]
    title = f"{name} ratings of {file}" if file else f"{name} part of {data.name}"
    return EvaluationSet(data.train, truth, title, name, data.notice)


def has_same_ratings(one: RatingMatrix, other: RatingMatrix) -> bool:
    """Whether both have the same users, items and rated places: then no test rating was trained on."""
    names = ("user_ids", "item_ids", "starts", "items")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def show_figures(
    found: Mapping[str, Figures], config: RankingOptions, chosen: EvaluationSet, console: Console
) -> None:
    """Figures of several models on the same ratings in one table; a dash where a figure means nothing."""
    first = next(iter(found.values()))
    console.say(f"{chosen.name}: {first['ratings']:,} ratings of {first['users']:,} users")
    names = ["rmse", "mae"]
    if config.k:
        names += [f"{name}@{k}" for name in RANKED for k in config.k] + [f"coverage@{config.k[0]}"]

    def cell(figures: Figures, name: str) -> str:
        error = f" +- {figures[f'{name}_se']:.4f}" if f"{name}_se" in figures else ""
        return f"{figures[name]:.4f}{error}" if name in figures else "-"

    rows = [[label, *(cell(figures, name) for name in names)] for label, figures in found.items()]
    titles = (name.replace("ndcg", "NDCG").replace("recall", "Recall") for name in names[2:])
    console.table(["model", "RMSE", "MAE", *titles], rows)
    if config.k:
        ranked = max(figures.get("ranked_users", 0) for figures in found.values())
        about = f"mean over the {ranked:,} users with a rating of {config.relevant:g} or more"
        console.say(f"ranking: items not rated in training; {about}, +- standard errors over users")


def run_predict(config: PredictOptions, console: Console) -> Mapping[str, Any]:
    found, mesh = load_on_devices(config)
    if found.job.is_ranking:
        raise OptionError(
            f"{config.run}: was trained by --objective ranking, which orders items and predicts no ratings; "
            "`recommend` gives its lists"
        )
    chosen = load_evaluation_set(config, found, load_observed(config.ratings_file, found, console), console)
    rules = make_rules(config, found.low, found.high)
    path = config.output or config.run / "predictions" / f"{chosen.short}-{found.step}.txt"
    size = config.batch_size or found.batch_size
    squares = absolutes = 0.0
    with write_lines(path) as (append,), console.progress("predicting", chosen.truth.ratings) as bar:
        blocks = predict_blocks(found, chosen.train, chosen.truth, size, rules, mesh)
        for rows, columns, predictions, truth in blocks:
            append(chosen.train.user_ids[rows], chosen.train.item_ids[columns], predictions, truth)
            errors = predictions.astype(np.float64) - truth
            squares += float(np.square(errors).sum())
            absolutes += float(np.abs(errors).sum())
            bar.advance(len(errors))
    count = chosen.truth.ratings
    rmse, mae = math.sqrt(squares / count), absolutes / count
    console.say(f"{chosen.name}: {count:,} predictions, RMSE {rmse:.4f}, MAE {mae:.4f}; written: {path}")
    return {
        "run": str(config.run),
        "step": found.step,
        "data": chosen.name,
        "notice": chosen.notice,
        "output": str(path),
        "ratings": count,
        "rmse": rmse,
        "mae": mae,
    }


def write_lines(path: Path) -> Tables:
    if path.is_dir():
        raise OptionError(f"--output {path}: is a folder; give a file")
    return write_tables([path], f"--output {path}")


def load_observed(ratings_file: Path | None, found: SavedRun, console: Console) -> RatingMatrix:
    """What users have rated: the run's training ratings, or those of a file, whose users may be new."""
    if ratings_file is None:
        return found.load_training()
    read = read_rating_text(ratings_file)
    return build_matrix(read.users, read.items, read.values, item_ids=found.item_ids, warn=console.warn)


def predict_blocks(
    found: SavedRun,
    train: RatingMatrix,
    truth: RatingMatrix,
    size: int,
    rules: ScoringRules,
    mesh: Mesh | None = None,
) -> Iterator[Columns]:
    """Row, column, prediction and truth of every rating of `truth`, so many users at a time."""
    users = batches.find_users(truth)
    size = min(size, len(users))
    most, (length, dense) = batches.max_ratings(truth, size), share_users(train, size, mesh)

    @partial(processes.JitTogether, out_shardings=on_all(mesh))
    def predict_at(state: Any, rows: batches.DeviceRows, users: Array, where: tuple[Array, Array]) -> Array:
        return rules.predict(model.predict(found.job, state, dense(rows, users))[where])

    def collect(rows: Any, columns: Any, result: Array, values: Any) -> Columns:
        return rows, columns, np.asarray(result)[: len(rows)], values

    resident, before = processes.place(batches.make_rows(train), on_all(mesh)), None
    for first in range(0, len(users), size):
        chosen = users[first : first + size]
        # All that these users have: nobody between the first and the last has any but they.
        own = slice(int(truth.starts[chosen[0]]), int(truth.starts[chosen[-1] + 1]))
        rows, columns = np.repeat(chosen, np.diff(truth.starts)[chosen]), truth.items[own]
        where = pad_users(np.searchsorted(chosen, rows), most), pad_users(columns, most)
        with nullcontext() if first else compiling():
            result = predict_at(found.state, resident, pad_users(chosen, length), where)
        if before is not None:  # the device works on these users while the caller writes the last ones
            yield collect(*before)
        before = rows, columns, result, truth.values(own)
    if before is not None:
        yield collect(*before)


def share_users(
    train: RatingMatrix, size: int, mesh: Mesh | None
) -> tuple[int, Callable[[batches.DeviceRows, Array], Array]]:
    """So many users, or the next number that the replicas share evenly, and what makes so many's ratings dense."""
    length = fill_up(batches.split_over(mesh), size)
    return length, batches.make_dense(train, length, mesh)


def on_all(mesh: Mesh | None) -> NamedSharding | None:
    """The placement of what every device has; None for one device, where nothing is said."""
    return placement_like(batches.split_over(mesh), ())


def pad_users(array: NDArray[Any], length: int) -> NDArray[np.int32]:
    """As int32 of one length for all calls; what is added repeats the last one."""
    return np.pad(array.astype(np.int32), (0, length - len(array)), mode="edge")
