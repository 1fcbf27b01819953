"""What a run is made of before there is a folder for it: options, ratings, the job, and what follows from them.

How they are brought together is `train`'s matter.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from jax import Array

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.plan import Plan
from hotloop.engine.progress import Console
from hotloop.families.recommender import model, saved_run
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.rating_error import RatingError
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.families.recommender.validator import prediction_bounds
from hotloop.options import to_jsonable

FILES = ("training_data_file", "validation_data_file", "test_data_file")


@dataclass(frozen=True, eq=False)
class Work:
    """A training that could begin."""

    config: TrainOptions
    data: RatingSets
    job: model.Job
    plan: Plan
    console: Console

    @property
    def validated(self) -> bool:
        """Whether there is something to validate with, and it is wanted."""
        return self.data.validation is not None and not self.config.no_validation

    @property
    def settings(self) -> Mapping[str, Any]:
        """What config.json holds: the options, and what the data said."""
        low, high = self.data.scale
        extra = {"users": self.data.train.users, "items": self.job.items, "drops": self.job.drops}
        options = asdict(self.config)
        # By paths that mean the same from everywhere, for whoever evaluates the run later.
        files = {name: path.absolute() for name in FILES if (path := options[name])}
        return dict(to_jsonable({**options, **files, **extra, "low": low, "high": high}))

    @property
    def key(self) -> Array:
        """All randomness of the run."""
        return seed_key(self.config.seed)

    def initial(self) -> model.State:
        """The state before the first update."""
        train = self.data.train
        return saved_run.initial_state(self.job, stream(self.key, "init", 0), train.user_ids, train.item_ids)

    @cached_property
    def validation_errors(self) -> RatingError:
        """Errors on the validation ratings as a function of weights, compiled once for all of the run."""
        assert self.data.validation is not None
        return self.errors(self.data.validation)

    def errors(self, truth: RatingMatrix) -> RatingError:
        """Errors on these ratings as a function of {"params": weights}."""
        assert self.config.validation_batch_size is not None
        limits = prediction_bounds(self.config.clip, *self.data.scale)
        return RatingError(self.job, self.data.train, truth, self.config.validation_batch_size, limits)

    def epoch(self, update: int) -> float:
        """So many updates, in epochs."""
        return float(update / self.plan.updates_per_epoch)
