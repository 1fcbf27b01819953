"""A run's folder read back: options, weights, whose ratings they are for, and the training ratings themselves.

Checkpoints hold the original ids of users and items beside the weights; `ratings.npz` holds the training ratings,
which are what a prediction starts from. Nothing here needs the files that the run was trained with.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import read_npz
from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.checkpoint import Checkpoints, KeepBest, print_warnings
from hotloop.errors import DataError, RunError
from hotloop.families.recommender import model
from hotloop.families.recommender.commands_config import EXTRA, FAMILY, read_run_options
from hotloop.families.recommender.config import Schedule, TrainOptions, UpdateOptions
from hotloop.options import build
from hotloop.options.files import whole_file

__all__ = ["BEST", "EXTRA", "FAMILY", "SavedRun"]

BEST = KeepBest("validation_rmse", "min", 1)


@dataclass(frozen=True, eq=False)
class SavedRun:
    """What a run left."""

    config: TrainOptions
    job: model.Job
    state: Any
    step: int
    folder: Path
    user_ids: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    low: float
    high: float


def make_job(config: TrainOptions, items: int, schedule: Schedule) -> model.Job:
    """The part of the options that a state depends on."""
    return model.Job(update_options(config), items, schedule.drops)


def update_options(config: TrainOptions) -> UpdateOptions:
    """The options of the network alone."""
    return UpdateOptions(**{each.name: getattr(config, each.name) for each in fields(UpdateOptions)})


def initial_state(
    job: model.Job, key: Any, users: NDArray[np.int64], items: NDArray[np.int64]
) -> model.State:
    """The first state, with the ids that a checkpoint must hold."""
    return {**model.init(job, key), "ids": {"users": split_ids(users), "items": split_ids(items)}}


def split_ids(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """64-bit ids as pairs of 32 bits, which every device takes."""
    return np.ascontiguousarray(ids).view(np.uint32).reshape(len(ids), 2)


def join_ids(pairs: Any) -> NDArray[np.int64]:
    """What `halves` was given."""
    return np.ascontiguousarray(np.asarray(pairs)).view(np.int64).reshape(-1)


def load_run(folder: str | Path, step: int | None = None, *, best: bool = False) -> SavedRun:
    """The newest whole checkpoint, that of a step, or the one that validated best."""
    folder = Path(folder)
    options = read_run_options(folder)
    users, items, drops, low, high = (options.pop(name) for name in EXTRA)
    if "logdir" in options:  # as runs of earlier versions have it
        options["results_dir"] = options.pop("logdir")
    config = build(TrainOptions, options)
    if config.size is None or not all(type(drop) is int for drop in drops):
        raise RunError(f"{folder / 'config.json'}: not the config of a {FAMILY} run")
    job = model.Job(update_options(config), items, tuple(drops))
    like = {**_shapes(job), "ids": {"users": _pairs(users), "items": _pairs(items)}}
    checkpoints = Checkpoints(folder / "checkpoints", BEST, family=FAMILY, config=options)
    if best and step is None and (step := checkpoints.best()) is not None:
        print_warnings(checkpoints.damaged())
    restored = checkpoints.restore(like, step).warn()
    user_ids, item_ids = (join_ids(restored.state["ids"][name]) for name in ("users", "items"))
    return SavedRun(config, job, restored.state, restored.step, folder, user_ids, item_ids, low, high)


def _shapes(job: model.Job) -> Any:
    return jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))


def _pairs(count: int) -> Any:
    return jax.ShapeDtypeStruct((count, 2), jnp.uint32)  # type: ignore[no-untyped-call]


def write_training(folder: Path, matrix: RatingMatrix) -> None:
    """Keep the training ratings in the run's folder, whole or not at all."""
    arrays = {"starts": matrix.starts, "items": matrix.items, "codes": matrix.codes}
    if matrix.levels is not None:
        arrays["levels"] = matrix.levels
    with whole_file(folder / "ratings.npz") as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # numbers alone: nothing is pickled


def load_training(found: SavedRun) -> RatingMatrix:
    """The training ratings of a run."""
    path = found.folder / "ratings.npz"
    try:
        arrays = read_npz(path)
        matrix = RatingMatrix(
            arrays["starts"],
            arrays["items"],
            arrays["codes"],
            arrays.get("levels"),
            found.user_ids,
            found.item_ids,
        )
        matrix.check()
    except (DataError, KeyError) as error:
        raise RunError(f"{path}: the run's training ratings cannot be read ({error})") from None
    return matrix
