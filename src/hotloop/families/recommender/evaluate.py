"""The commands that use a run (evaluate, predict, recommend), and what predictions and orders of items are worth.

RMSE and MAE are over all ratings at once. NDCG@k and Recall@k have binary relevance; candidates are the items that
the user has not rated in training, equal scores in the order of their columns. Scores are ranked as they are, since
clipping would make ties.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
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
    RecommendOptions,
    TruthOptions,
)
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.families.recommender.saved_run import SavedRun
from hotloop.options import to_jsonable

Columns = tuple[NDArray[Any], ...]
Batch = Mapping[str, Array]
Scorer = Callable[
    [Any, Batch], Array
]  # (state, batch) -> scores [B, items]: autoencoder, table of biases, EASE


def is_relevant(ratings: Array, least: float) -> Array:
    return (ratings > 0) & (ratings >= least)


def ranking_values(scores: Array, rated: Array, relevant: Array, ks: Sequence[int]) -> dict[str, Array]:
    """For each user `ndcg` and `recall` [B, len(ks)], and `ranked`: whether there is anything relevant to find.

    Where there is nothing, both are 0: leave those users out of a mean. An item that is rated is never relevant.
    """
    wanted = relevant & ~rated
    depth = min(max(ks), scores.shape[-1])
    _, first = lax.top_k(jnp.where(rated, -jnp.inf, scores), depth)
    hits = jnp.take_along_axis(wanted, first, axis=-1).astype(jnp.float32)
    discounts = (1 / np.log2(np.arange(depth) + 2.0)).astype(np.float32)
    total, ends = wanted.sum(-1), [min(k, depth) for k in ks]
    ideal = np.append(0, np.cumsum(discounts)).astype(np.float32)
    best = jnp.asarray(ideal)[jnp.minimum(total[:, None], jnp.asarray(ends))]

    def sum_to_ends(entries: Array) -> Array:
        return jnp.stack([entries[:, :end].sum(-1) for end in ends], axis=-1)

    return {
        "ndcg": sum_to_ends(hits * discounts) / jnp.maximum(best, 1),  # an only item in first place has 1
        "recall": sum_to_ends(hits) / jnp.maximum(total, 1)[:, None],
        "ranked": total > 0,
    }


@dataclass(frozen=True)
class ScoringRules:
    low: float = -math.inf
    high: float = math.inf
    round: bool = False  # predictions to whole numbers
    ks: tuple[int, ...] = ()  # lengths of the lists that are ranked; none: no ranking
    relevant: float = 4.0  # the rating from which an item counts as relevant

    def predict(self, scores: Array) -> Array:
        clipped = jnp.clip(scores, self.low, self.high)
        return jnp.round(clipped) if self.round else clipped


def make_rules(options: PredictionOptions, low: float, high: float) -> ScoringRules:
    """What a command's options ask for; `low` and `high` are the range of the training ratings."""
    bounds = (low, high) if options.clip else (-math.inf, math.inf)
    if isinstance(options, RankingOptions):
        return ScoringRules(*bounds, options.round, options.k, options.relevant)
    return ScoringRules(*bounds, options.round)


def make_measures(
    scorer: Scorer,
    train: RatingMatrix,
    truth: RatingMatrix,
    batch_size: int,
    rules: ScoringRules,
    rows: batches.DeviceRows | None = None,
    mesh: Mesh | None = None,
) -> Callable[[Any], Figures]:
    """From a state to all figures of a scorer by the ratings of `truth`, compiled once; see `evaluate_users`."""
    users = len(batches.find_users(truth))

    def values(state: Any, batch: Batch) -> dict[str, Array]:
        scores, truth = scorer(state, batch), batch["truth"]
        figures = batches.sum_errors(rules.predict(scores), truth)
        # The old program's RMSE of whole batches, never clipped, dealt out to its users so that their sum is it.
        there = truth > 0
        rmse = jnp.sqrt(jnp.square(jnp.where(there, scores - truth, 0)).sum() / there.sum())
        figures["batch_rmse"] = jnp.where(batch["in_whole_batch"], rmse / len(scores), 0)
        if rules.ks:
            relevant = is_relevant(truth, rules.relevant)
            figures |= ranking_values(scores, batch["ratings"] > 0, relevant, rules.ks)
        return figures

    evaluation = batches.evaluate_users(values, train, truth, batch_size, rows, mesh)
    whole_batches = evaluation.samples // evaluation.batch_size

    def measure(state: Any) -> Figures:
        sums = evaluation(state)
        figures = {
            "rmse": math.sqrt(sums["squared_error"] / sums["ratings"]),
            "mae": sums["absolute_error"] / sums["ratings"],
            "rmse_mean_of_batches": sums["batch_rmse"] / whole_batches,
            "users": users,
            "ratings": sums["ratings"],
        }
        if rules.ks:
            figures["ranked_users"] = ranked = sums["ranked"]
            # No figures where nothing is relevant to any user.
            for name in ("ndcg", "recall") if ranked else ():
                for k, total in zip(rules.ks, sums[name], strict=True):
                    figures[f"{name}@{k}"] = float(total / ranked)
        return figures

    return measure


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
    chosen = load_evaluation_set(config, found, found.load_training(), console)
    size = config.batch_size or found.batch_size
    started = time.perf_counter()
    with console.progress("evaluating"):
        rules = make_rules(config, found.low, found.high)
        measure = make_measures(found.score, chosen.train, chosen.truth, size, rules, mesh=mesh)
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
    console.say(
        f"as the old program averaged: {figures['rmse_mean_of_batches']:.4f}, the mean of RMSEs over whole batches of "
        f"{size} users, unclipped; for comparison only"
    )
    how = ("" if config.clip else "-unclipped") + ("-rounded" if config.round else "")
    path = config.run / "evaluations" / f"{chosen.short}-{found.step}{how}.json"
    if processes.is_writer():
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
    console.say(f"written: {path}")
    return {**to_jsonable(result), "path": str(path)}


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
    names = [f"{name}@{k}" for name in ("ndcg", "recall") for k in config.k]
    titles = [name.replace("ndcg", "NDCG").replace("recall", "Recall") for name in names]
    rows = [
        [label, *(f"{figures[name]:.4f}" if name in figures else "-" for name in ("rmse", "mae", *names))]
        for label, figures in found.items()
    ]
    console.table(["model", "RMSE", "MAE", *titles], rows)
    if config.k:
        ranked = max(figures.get("ranked_users", 0) for figures in found.values())
        about = f"mean over the {ranked:,} users with a rating of {config.relevant:g} or more"
        console.say(f"ranking: items not rated in training; {about}")


def run_predict(config: PredictOptions, console: Console) -> Mapping[str, Any]:
    found, mesh = load_on_devices(config)
    chosen = load_evaluation_set(config, found, load_observed(config.ratings_file, found, console), console)
    rules = make_rules(config, found.low, found.high)
    path = config.output or config.run / "predictions" / f"{chosen.short}-{found.step}.txt"
    size = config.batch_size or found.batch_size
    squares = absolutes = 0.0
    with _write(path) as (append,), console.progress("predicting", chosen.truth.ratings) as bar:
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


def _write(path: Path) -> Tables:
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
        where = _pad(np.searchsorted(chosen, rows), most), _pad(columns, most)
        with nullcontext() if first else compiling():
            result = predict_at(found.state, resident, _pad(chosen, length), where)
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


def _pad(array: NDArray[Any], length: int) -> NDArray[np.int32]:
    """As int32 of one length for all calls; what is added repeats the last one."""
    return np.pad(array.astype(np.int32), (0, length - len(array)), mode="edge")


def run_recommend(config: RecommendOptions, console: Console) -> Mapping[str, Any]:
    found, mesh = load_on_devices(config)
    train = load_observed(config.ratings_file, found, console)
    users = find_rows(config, train)
    rules = make_rules(config, found.low, found.high)
    size = config.batch_size or found.batch_size
    best = recommend_blocks(found, train, users, config.top, size, rules, mesh)
    with_ids = ((train.user_ids[rows], train.item_ids[columns], values) for rows, columns, values in best)
    result = {"run": str(config.run), "step": found.step, "users": len(users), "top": config.top}
    if config.output is None:
        with console.progress("recommending"):
            blocks = list(with_ids)
        lists: dict[int, dict[str, Any]] = {}
        rows = []
        for user, item, prediction in (each for block in blocks for each in zip(*block, strict=True)):
            own = lists.setdefault(int(user), {"user": int(user), "items": [], "predictions": []})
            own["items"].append(int(item))
            own["predictions"].append(float(prediction))
            rows.append((int(user), len(own["items"]), int(item), f"{float(prediction):.3f}"))
        console.table(["user", "place", "item", "prediction"], rows)
        if len(lists) < len(users):
            console.warn(f"{len(users) - len(lists):,} of these users have rated every item")
        return {**result, "recommendations": list(lists.values())}
    with _write(config.output) as (append,), console.progress("recommending", len(users)) as bar:
        for columns in with_ids:
            append(*columns)
            bar.advance(len(np.unique(columns[0])))
    console.say(f"{config.top} items for each of {len(users):,} users; written: {config.output}")
    return {**result, "output": str(config.output)}


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


def recommend_blocks(
    found: SavedRun,
    train: RatingMatrix,
    users: NDArray[np.int32],
    top: int,
    size: int,
    rules: ScoringRules,
    mesh: Mesh | None = None,
) -> Iterator[Columns]:
    """Row, column and prediction of the best unrated items of these rows, best first, so many users at a time."""
    size, top = min(size, len(users)), min(top, train.n_items)
    length, dense = share_users(train, size, mesh)

    @partial(processes.JitTogether, out_shardings=on_all(mesh))
    def best(state: Any, rows: batches.DeviceRows, users: Array) -> tuple[Array, Array, Array]:
        ratings = dense(rows, users)
        scores = jnp.where(ratings > 0, -jnp.inf, model.predict(found.job, state, ratings))
        highest, columns = lax.top_k(scores, top)
        return rules.predict(highest), columns, highest > -jnp.inf

    resident = processes.place(batches.make_rows(train), on_all(mesh))
    for first in range(0, len(users), size):
        chosen = users[first : first + size]
        with nullcontext() if first else compiling():
            parts = best(found.state, resident, _pad(chosen, length))
        predictions, columns, there = (np.asarray(part)[: len(chosen)] for part in parts)
        yield np.repeat(chosen, there.sum(1)), columns[there], predictions[there]
