"""`hotloop recommender evaluate`: RMSE, MAE, NDCG and recall of a run's weights, as a table and a JSON file.

What is measured, and how, is in `measures`; this chooses the ratings and shows the figures.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.progress import Console
from hotloop.engine.run import write_json
from hotloop.errors import DataError
from hotloop.families.recommender import model, rating_sets, saved_run
from hotloop.families.recommender.commands_config import EvaluateOptions, TruthOptions
from hotloop.families.recommender.measures import Batch, Scorer, make_measures, make_rules
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.families.recommender.saved_run import SavedRun
from hotloop.options import to_jsonable


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """What predictions start from, what they are compared with, and its name, in full and for a file."""

    train: RatingMatrix
    truth: RatingMatrix
    name: str
    short: str
    notice: str = ""


def run(config: EvaluateOptions, console: Console) -> Mapping[str, Any]:
    found = saved_run.load_run(config.run, config.step, best=config.best)
    chosen = load_evaluation_set(config, found, found.load_training(), console)
    size = resolve_batch_size(config.batch_size, found)
    started = time.perf_counter()
    with console.progress("evaluating"):
        rules = make_rules(config, found.low, found.high)
        measure = make_measures(autoencoder_scorer(found.job), chosen.train, chosen.truth, size, rules)
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
    show_figures({f"{config.run} (step {found.step:,})": figures}, config.k, config.relevant, chosen, console)
    console.say(
        f"as the old program averaged: {figures['rmse_mean_of_batches']:.4f}, the mean of RMSEs over whole batches of "
        f"{size} users, unclipped; for comparison only"
    )
    how = ("" if config.clip else "-unclipped") + ("-rounded" if config.round else "")
    path = config.run / "evaluations" / f"{chosen.short}-{found.step}{how}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, result)
    console.say(f"written: {path}")
    return {**to_jsonable(result), "path": str(path)}


def autoencoder_scorer(job: model.Job) -> Scorer:
    """The network without dropout as a scorer; its state is a training state."""

    def score(state: Any, batch: Batch) -> Any:
        return model.predict(job, state, batch["ratings"])

    return score


def resolve_batch_size(given: int | None, found: SavedRun) -> int:
    """The option, else what the run validated with."""
    size = given or found.config.validation_batch_size
    assert size is not None
    return size


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
    found: Mapping[str, Mapping[str, Any]],
    ks: Sequence[int],
    relevant: float,
    chosen: EvaluationSet,
    console: Console,
) -> None:
    """Figures of several models on the same ratings in one table; a dash where a figure means nothing."""
    first = next(iter(found.values()))
    console.say(f"{chosen.name}: {first['ratings']:,} ratings of {first['users']:,} users")
    names = [f"{name}@{k}" for name in ("ndcg", "recall") for k in ks]
    titles = [name.replace("ndcg", "NDCG").replace("recall", "Recall") for name in names]
    rows = [
        [label, *(f"{figures[name]:.4f}" if name in figures else "-" for name in ("rmse", "mae", *names))]
        for label, figures in found.items()
    ]
    console.table(["model", "RMSE", "MAE", *titles], rows)
    if ks:
        ranked = max(figures.get("ranked_users", 0) for figures in found.values())
        about = f"mean over the {ranked:,} users with a rating of {relevant:g} or more"
        console.say(f"ranking: items not rated in training; {about}")
