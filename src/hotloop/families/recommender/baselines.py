"""`hotloop recommender baselines`: what simple methods reach on the same ratings, in one table with a trained run.

The overall mean, user and item biases, popularity and EASE, measured exactly as the autoencoder is. Whatever can be
chosen is chosen on the validation part. A dash stands where a figure means nothing: popularity and EASE predict no
ratings, and the mean ranks nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.measure import memory_of_device
from hotloop.engine.progress import Console
from hotloop.errors import DataError
from hotloop.families.recommender import batches, rating_sets, saved_run
from hotloop.families.recommender.baseline_models import (
    LAMBDA_GRID,
    USUAL_LAMBDA,
    Biases,
    choose_biases,
    count_pairs,
    ease_bytes,
    ease_flops,
    ease_scorer,
    ease_weights,
    fit_mean,
)
from hotloop.families.recommender.commands_config import BaselineOptions
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.evaluate import (
    EvaluationSet,
    autoencoder_scorer,
    has_same_ratings,
    show_figures,
)
from hotloop.families.recommender.measures import Batch, Figures, Measures, ScoringRules, make_rules
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.families.recommender.saved_run import SavedRun
from hotloop.options import to_jsonable

BATCH = 128
CPU_MEMORY = 8 << 30
CPU_FLOPS = 1e13
"""What EASE may take of a CPU unasked: some minutes."""
RATING = ("rmse", "mae", "rmse_mean_of_batches")


def run(config: BaselineOptions, console: Console) -> Mapping[str, Any]:
    """Fit, measure, show."""
    found = None
    if config.run is not None:
        found = saved_run.load_run(config.run, config.step, best=config.step is None)
    data = rating_sets.load_sets(choose_options(config, found), console)
    if found is not None and not has_same_ratings(data.train, found.load_training()):
        raise DataError(f"--run {config.run}: was trained on other ratings than those of {data.name}")
    comparison = Comparison(config, data, console)
    with console.progress("baselines"):
        rows = comparison.rows()
        if found is not None:
            measure = comparison.measures(autoencoder_scorer(found.job))
            rows[f"autoencoder (step {found.step:,})"] = measure(found.state)
    show_figures(rows, config.k, config.relevant, comparison.chosen, console)
    if data.notice:
        console.warn(data.notice)
    return {"data": comparison.chosen.name, "models": to_jsonable(rows)}


def choose_options(config: BaselineOptions, found: SavedRun | None) -> TrainOptions:
    """Which ratings: those that the options name, with all of them to train on where the run did so; else the run's."""
    if found is None:
        return config.training()
    if not config.names_data:
        return found.config
    named = config.training()
    return replace(named, no_validation=named.no_validation or found.config.no_validation)


class Comparison:
    """One part of the ratings, and every method on it."""

    def __init__(self, config: BaselineOptions, data: RatingSets, console: Console):
        part, truth = data.choose_part(config.part)
        if truth is None:
            raise DataError(f"--part {part}: {data.name} has no such ratings; give them in a file")
        self.config, self.data, self.console = config, data, console
        self.chosen = EvaluationSet(data.train, truth, data.describe(part), part, data.notice)
        self.rules = make_rules(config, *data.scale)
        self.resident = batches.send_rows(data.train)
        if data.validation is None:
            console.warn("dampings and lambda: nothing to choose by: usual ones")
        elif part == "validation":
            console.warn("dampings and lambda: chosen on this same part")

    def measures(
        self, scorer: Any, truth: RatingMatrix | None = None, rules: ScoringRules | None = None
    ) -> Measures:
        """A scorer on the part, or on other ratings by other rules."""
        size = self.config.batch_size or BATCH
        return Measures(
            scorer, self.data.train, truth or self.chosen.truth, size, rules or self.rules, self.resident
        )

    def rows(self) -> dict[str, Figures]:
        """Each baseline's figures under its name."""
        train, config = self.data.train, self.config
        measure = self.measures(score_additive)
        fit = choose_biases(train, self.data.validation, self.rules.low, self.rules.high)
        rows = {
            "overall mean": _only(measure(_state(fit_mean(train))), ratings=True),
            f"user + item bias ({fit.how})": measure(_state(fit)),
            f"popularity (ratings of {config.relevant:g} or more)": _only(
                measure(_state(_popularity(train, config.relevant))), ratings=False
            ),
        }
        if self._wants_ease():
            best, figures = self._ease()
            rows[f"EASE (lambda {best:g})"] = _only(figures, ratings=False)
        return rows

    def _ease(self) -> tuple[float, Figures]:
        """The best lambda on the validation part by NDCG at the longest list, and its figures."""
        relevant, best = self.config.relevant, USUAL_LAMBDA
        products = count_pairs(self.data.train, relevant, self.resident)
        scorer = ease_scorer(relevant)
        if self.data.validation is not None:
            longest = max(self.config.k)
            validate = self.measures(scorer, self.data.validation, replace(self.rules, ks=(longest,)))
            found = {each: validate(ease_weights(products, each)) for each in LAMBDA_GRID}
            best = max(LAMBDA_GRID, key=lambda each: found[each].get(f"ndcg@{longest}", 0.0))
        return best, self.measures(scorer)(ease_weights(products, best))

    def _wants_ease(self) -> bool:
        train = self.data.train
        if self.config.ease != "auto" or not self.config.k:
            return self.config.ease == "yes" and bool(self.config.k)
        device = jax.devices()[0]
        is_cpu = device.platform == "cpu"
        room = CPU_MEMORY if is_cpu else memory_of_device(device) or CPU_MEMORY
        needed = ease_bytes(train.n_items)
        work = ease_flops(train.users, train.n_items, len(LAMBDA_GRID))
        if needed <= room and (not is_cpu or work <= CPU_FLOPS):
            return True
        self.console.warn(
            f"EASE left out: {train.n_items:,} items would take {needed / 2**30:.1f} GiB and {work:.1e} FLOP; --ease "
            "yes does it all the same"
        )
        return False


def score_additive(state: Mapping[str, Array], batch: Batch) -> Array:
    """Scores that are a sum of a mean, a number for the user and one for the item."""
    return state["mean"] + state["user"][batch["users"]][:, None] + state["item"]


def _state(fit: Biases) -> dict[str, Array]:
    return {
        "mean": jnp.float32(fit.mean),
        "user": jnp.asarray(fit.user, jnp.float32),
        "item": jnp.asarray(fit.item, jnp.float32),
    }


def _popularity(train: RatingMatrix, relevant: float) -> Biases:
    """How many users an item is relevant to, in the shape of biases."""
    items = train.items[train.values() >= relevant]
    return Biases(0.0, np.zeros(train.users), np.bincount(items, minlength=train.n_items).astype(np.float64))


def _only(figures: Figures, *, ratings: bool) -> Figures:
    """The figures that mean something: those of ratings, or those of ranking."""
    ranking = [name for name in figures if "@" in name or name == "ranked_users"]
    return {name: value for name, value in figures.items() if name not in (ranking if ratings else RATING)}
