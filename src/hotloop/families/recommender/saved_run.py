"""A run as it begins, and its folder read back: options, weights, whose ratings they are for, and the ratings.

Nothing here needs the files that the run was trained with: checkpoints hold the original ids of users and items.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.checkpoint import Checkpoints, print_warnings
from hotloop.engine.checkpoint_folder import KeepBest
from hotloop.engine.plan import Plan
from hotloop.errors import DataError, RunError
from hotloop.families.recommender import model
from hotloop.families.recommender.commands_config import EXTRA, FAMILY, read_run_options
from hotloop.families.recommender.config import KS, TrainOptions
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.options import build

BEST = {
    "ratings": KeepBest("validation_rmse", "min", 1),
    "ranking": KeepBest(f"validation_ndcg@{KS[0]}", "max", 1),
}
"""Which checkpoint is best, by what a run learns."""


@dataclass(frozen=True, eq=False)
class Setup:
    """A training that could begin: options with everything filled in, ratings, and what follows from them."""

    config: TrainOptions
    data: RatingSets
    job: model.Job
    plan: Plan


@dataclass(frozen=True, eq=False)
class SavedRun:
    """What config.json says of a run, and a checkpoint where one is read; ratings are from `low` to `high`."""

    folder: Path
    config: TrainOptions
    job: model.Job
    users: int
    low: float
    high: float
    state: Any = None
    step: int = 0
    user_ids: Any = None
    item_ids: Any = None

    @property
    def batch_size(self) -> int:
        assert self.config.validation_batch_size is not None
        return self.config.validation_batch_size

    def score(self, state: Any, batch: Any) -> Any:
        """Predictions before clipping, or log-probabilities, as a scorer gives them."""
        return model.predict(self.job, state, batch["ratings"])

    def load_training(self) -> RatingMatrix:
        return read_matrix(self.folder, self.user_ids, self.item_ids)


def read_setup(folder: Path) -> SavedRun:
    options = read_run_options(folder)
    users, items, drops, low, high = (options.pop(name) for name in EXTRA)
    if "logdir" in options:  # as runs of earlier versions have it
        options["results_dir"] = options.pop("logdir")
    config = build(TrainOptions, options)
    if config.size is None or not all(type(drop) is int for drop in drops):
        raise RunError(f"{folder / 'config.json'}: not the config of a {FAMILY} run")
    job = model.make_job(config, users, items, tuple(drops), low, high)
    return SavedRun(folder, config, job, users, low, high)


def load_run(folder: str | Path, step: int | None = None, *, best: bool = False) -> SavedRun:
    """The newest whole checkpoint, that of a step, or the one that validated best."""
    folder = Path(folder)
    setup = read_setup(folder)
    counts = {"users": setup.users, "items": setup.job.items}
    ids = {name: np.empty((count, 2), np.uint32) for name, count in counts.items()}
    checkpoints = Checkpoints(folder / "checkpoints", BEST[setup.config.objective], family=FAMILY)
    if best and step is None and (step := checkpoints.best()) is not None:
        print_warnings(checkpoints.damaged())
    found = checkpoints.restore({**state_shapes(setup.job), "ids": ids}, step).warn()
    user_ids, item_ids = (
        np.ascontiguousarray(found.state["ids"][name]).view(np.int64).reshape(-1) for name in counts
    )
    return replace(setup, state=found.state, step=found.step, user_ids=user_ids, item_ids=item_ids)


def state_shapes(job: model.Job) -> Any:
    return jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))


def read_matrix(folder: Path, user_ids: NDArray[np.int64], item_ids: NDArray[np.int64]) -> RatingMatrix:
    """The training ratings of a run, or those that wait to be validated with."""
    path = folder / "ratings.npz"
    try:
        return RatingMatrix.read(path, user_ids, item_ids)
    except (DataError, KeyError) as error:
        raise RunError(f"{path}: the run's training ratings cannot be read ({error})") from None
