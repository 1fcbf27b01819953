"""`hotloop recommender baselines`: what simple methods reach on the same ratings, in one table with a trained run.

The overall mean, user and item biases, popularity and EASE, measured exactly as the autoencoder is. Whatever can be
chosen is chosen on the validation part. A dash stands where a figure means nothing: popularity and EASE predict no
ratings, and the mean ranks nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.measure import memory_of_device
from hotloop.engine.progress import Console
from hotloop.errors import DataError
from hotloop.families.recommender import baseline_models as models
from hotloop.families.recommender import rating_sets, saved_run
from hotloop.families.recommender.batches import send_rows
from hotloop.families.recommender.commands_config import BaselineOptions
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.evaluate import (
    autoencoder_scorer,
    choose_part,
    has_same_ratings,
    show_figures,
)
from hotloop.families.recommender.measures import Figures, Scorer, make_measures, make_rules
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.families.recommender.saved_run import SavedRun
from hotloop.options import to_jsonable

BATCH = 128
CPU_MEMORY = 8 << 30
CPU_FLOPS = 1e13
"""What EASE may take of a CPU unasked: some minutes."""
RATING, RANKING = ("rmse", "mae", "rmse_mean_of_batches"), ("ndcg", "recall", "ranked_users")


def run(config: BaselineOptions, console: Console) -> Mapping[str, Any]:
    found = None
    if config.run is not None:
        found = saved_run.load_run(config.run, config.step, best=config.step is None)
    data = rating_sets.load_sets(choose_options(config, found), console)
    if found is not None and not has_same_ratings(data.train, found.load_training()):
        raise DataError(f"--run {config.run}: was trained on other ratings than those of {data.name}")
    table = BaselineTable(config, data, console)
    with console.progress("baselines"):
        rows = table.rows()
        if found is not None:
            measure = table.measure(autoencoder_scorer(found.job))
            rows[f"autoencoder (step {found.step:,})"] = measure(found.state)
    show_figures(rows, config.k, config.relevant, table.chosen, console)
    if data.notice:
        console.warn(data.notice)
    return {"data": table.chosen.name, "models": to_jsonable(rows)}


def choose_options(config: BaselineOptions, found: SavedRun | None) -> TrainOptions:
    """Which ratings: those that the options name, with all of them to train on where the run did so; else the run's."""
    if found is None:
        return config.training()
    if not config.names_data:
        return found.config
    named = config.training()
    return replace(named, no_validation=named.no_validation or found.config.no_validation)


class BaselineTable:
    """One part of the ratings, and every method on it."""

    def __init__(self, config: BaselineOptions, data: RatingSets, console: Console):
        self.config, self.data, self.console = config, data, console
        self.chosen = choose_part(data, "--part", config.part, "give them in a file")
        self.rules = make_rules(config, *data.scale)
        self.resident = send_rows(data.train)
        if data.validation is None:
            console.warn("dampings and lambda: nothing to choose by: usual ones")
        elif self.chosen.short == "validation":
            console.warn("dampings and lambda: chosen on this same part")

    def measure(self, scorer: Scorer, truth: RatingMatrix | None = None) -> Callable[[Any], Figures]:
        truth, size = truth or self.chosen.truth, self.config.batch_size or BATCH
        return make_measures(scorer, self.data.train, truth, size, self.rules, self.resident)

    def rows(self) -> dict[str, Figures]:
        """Each baseline's figures under its name."""
        train, relevant = self.data.train, self.config.relevant
        measure = self.measure(models.score_additive)
        fit = models.choose_biases(train, self.data.validation, self.rules.low, self.rules.high)
        liked = np.bincount(train.items[train.values() >= relevant], minlength=train.n_items)
        popularity = models.Biases(0.0, np.zeros(train.users), liked.astype(np.float64))
        rows = {
            "overall mean": _without(measure(models.additive_state(models.fit_mean(train))), RANKING),
            f"user + item bias ({fit.how})": measure(models.additive_state(fit)),
            f"popularity (ratings of {relevant:g} or more)": _without(
                measure(models.additive_state(popularity)), RATING
            ),
        }
        if self.wants_ease():
            products, scorer, best = (
                models.count_pairs(train, relevant, self.resident),
                models.ease_scorer(relevant),
                models.USUAL_LAMBDA,
            )
            if self.data.validation is not None:
                validate = self.measure(scorer, self.data.validation)
                by = f"ndcg@{max(self.config.k)}"
                found = {
                    each: validate(models.ease_weights(products, each)).get(by, 0.0)
                    for each in models.LAMBDA_GRID
                }
                best = max(models.LAMBDA_GRID, key=lambda each: found[each])
            figures = self.measure(scorer)(models.ease_weights(products, best))
            rows[f"EASE (lambda {best:g})"] = _without(figures, RATING)
        return rows

    def wants_ease(self) -> bool:
        train = self.data.train
        if self.config.ease != "auto" or not self.config.k:
            return self.config.ease == "yes" and bool(self.config.k)
        device = jax.devices()[0]
        is_cpu = device.platform == "cpu"
        room = CPU_MEMORY if is_cpu else memory_of_device(device) or CPU_MEMORY
        items, penalties = train.n_items, len(models.LAMBDA_GRID)
        needed = 5 * 4 * items**2  # at the peak, matrices of items by items in float32
        # X'X, and for each lambda an inverse and one pass over all users.
        work = 2.0 * train.users * items**2 * (1 + penalties) + 2.0 * penalties * items**3
        if needed <= room and (not is_cpu or work <= CPU_FLOPS):
            return True
        self.console.warn(
            f"EASE left out: {train.n_items:,} items would take {needed / 2**30:.1f} GiB and {work:.1e} FLOP; --ease "
            "yes does it all the same"
        )
        return False


def _without(figures: Figures, names: tuple[str, ...]) -> Figures:
    """A table shows a dash where a figure means nothing."""
    return {name: value for name, value in figures.items() if name.split("@")[0] not in names}
