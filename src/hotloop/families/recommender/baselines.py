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
from hotloop.families.recommender import baseline_models, batches, rating_sets, saved_run
from hotloop.families.recommender.baseline_models import Biases
from hotloop.families.recommender.commands_config import BaselineOptions
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.evaluation import Asked, autoencoder, same_ratings, show
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
    found = (
        None if config.run is None else saved_run.load_run(config.run, config.step, best=config.step is None)
    )
    data = rating_sets.load_sets(choose_options(config, found), console)
    if found is not None and not same_ratings(data.train, saved_run.load_training(found)):
        raise DataError(f"--run {config.run}: was trained on other ratings than those of {data.name}")
    bench = Comparison(config, data, console)
    with console.progress("baselines"):
        rows = bench.rows()
        if found is not None:
            rows[f"autoencoder (step {found.step:,})"] = bench.trained(found)
    show(rows, config.k, config.relevant, bench.asked, console)
    if data.notice:
        console.warn(data.notice)
    return {"data": bench.asked.name, "models": to_jsonable(rows)}


def choose_options(config: BaselineOptions, found: SavedRun | None) -> TrainOptions:
    """Which ratings: those that the options name, with all of them to train on where the run did so; else the run's."""
    if found is None:
        return config.training()
    if not config.names_data:
        return found.config
    asked = config.training()
    return replace(asked, no_validation=asked.no_validation or found.config.no_validation)


class Comparison:
    """One part of the ratings, and every method on it."""

    def __init__(self, config: BaselineOptions, data: RatingSets, console: Console):
        part = config.part or ("test" if data.test is not None else "validation")
        truth = getattr(data, part)
        if truth is None:
            raise DataError(f"--part {part}: {data.name} has no such ratings; give them in a file")
        self.config, self.data, self.console = config, data, console
        self.asked = Asked(data.train, truth, data.describe(part), part, data.notice)
        self.rules = make_rules(
            *data.scale, config.clip, whole=config.round, ks=config.k, relevant=config.relevant
        )
        self.resident = batches.send_rows(data.train)
        if part == "validation" or data.validation is None:
            how = (
                "nothing to choose by: usual ones" if data.validation is None else "chosen on this same part"
            )
            console.warn(f"dampings and lambda: {how}")

    def measures(
        self, scorer: Any, truth: RatingMatrix | None = None, rules: ScoringRules | None = None
    ) -> Measures:
        """A scorer on the part, or on other ratings by other rules."""
        size = self.config.batch_size or BATCH
        return Measures(
            scorer, self.data.train, truth or self.asked.truth, size, rules or self.rules, self.resident
        )

    def rows(self) -> dict[str, Figures]:
        """Each baseline's figures under its name."""
        train, config = self.data.train, self.config
        measure = self.measures(score_additive)
        fit = baseline_models.choose_biases(train, self.data.validation, self.rules.low, self.rules.high)
        rows = {
            "overall mean": _only(measure(_state(baseline_models.fit_mean(train))), ratings=True),
            f"user + item bias ({fit.how})": measure(_state(fit)),
            f"popularity (ratings of {config.relevant:g} or more)": _only(
                measure(_state(_popularity(train, config.relevant))), ratings=False
            ),
        }
        if self._wants_ease():
            best, figures = self._ease()
            rows[f"EASE (lambda {best:g})"] = _only(figures, ratings=False)
        return rows

    def trained(self, found: SavedRun) -> Figures:
        """The figures of a run's weights."""
        return self.measures(autoencoder(found.job))(found.state)

    def _ease(self) -> tuple[float, Figures]:
        """The best lambda on the validation part by NDCG at the longest list, and its figures."""
        relevant, best = self.config.relevant, baseline_models.USUAL_LAMBDA
        products = baseline_models.count_pairs(self.data.train, relevant, self.resident)
        scorer = baseline_models.ease_scorer(relevant)
        if self.data.validation is not None:
            longest = max(self.config.k)
            validate = self.measures(scorer, self.data.validation, replace(self.rules, ks=(longest,)))
            found = {
                each: validate(baseline_models.ease_weights(products, each))
                for each in baseline_models.LAMBDA_GRID
            }
            best = max(baseline_models.LAMBDA_GRID, key=lambda each: found[each].get(f"ndcg@{longest}", 0.0))
        return best, self.measures(scorer)(baseline_models.ease_weights(products, best))

    def _wants_ease(self) -> bool:
        train = self.data.train
        if self.config.ease != "auto" or not self.config.k:
            return self.config.ease == "yes" and bool(self.config.k)
        device = jax.devices()[0]
        is_cpu = device.platform == "cpu"
        room = CPU_MEMORY if is_cpu else memory_of_device(device) or CPU_MEMORY
        needed = baseline_models.ease_bytes(train.n_items)
        work = baseline_models.ease_flops(train.users, train.n_items, len(baseline_models.LAMBDA_GRID))
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
    """How many users liked an item, in the shape of biases."""
    items = train.items[train.values() >= relevant]
    return Biases(0.0, np.zeros(train.users), np.bincount(items, minlength=train.n_items).astype(np.float64))


def _only(figures: Figures, *, ratings: bool) -> Figures:
    """The figures that mean something: those of ratings, or those of ranking."""
    ranking = [name for name in figures if "@" in name or name == "ranked_users"]
    return {name: value for name, value in figures.items() if name not in (ranking if ratings else RATING)}
