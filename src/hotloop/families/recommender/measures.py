"""All figures of a way to score items, over the users of a set of ratings, in one pass on the device.

A scorer is any function (state, batch) -> scores [B, items]: the autoencoder, a table of biases, EASE. RMSE and MAE
are over all ratings at once, with predictions clipped and rounded as asked; NDCG and recall rank the scores as they
are, since clipping would make ties. None of these depends on the size of a batch. It knows no model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.data.matrix import RatingMatrix
from hotloop.engine.evaluate import Evaluation
from hotloop.families.recommender import batches, losses, ranking
from hotloop.families.recommender.batches import Rows

Batch = Mapping[str, Array]
Scorer = Callable[[Any, Batch], Array]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Rules:
    """What becomes of a score, and what is measured of it."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    """Round predictions to whole numbers."""
    ks: tuple[int, ...] = ()
    """Lengths of the lists that are ranked; none: no ranking."""
    relevant: float = 4.0
    """The rating from which an item counts as relevant."""

    def prediction(self, scores: Array) -> Array:
        """The rating that a score stands for."""
        clipped = jnp.clip(scores, self.low, self.high)
        return jnp.round(clipped) if self.whole else clipped


def bounded(low: float, high: float, clip: bool, **others: Any) -> Rules:
    """Rules that clip to these bounds, or to none."""
    return Rules(low, high, **others) if clip else Rules(**others)


class Measures:
    """A scorer and the ratings to measure it by, compiled once and called with state after state.

    A batch has `users` (row numbers), `ratings` (their training ratings, dense) and `truth`. Users without a rating
    in `truth` are not looked at. `rows` are the training ratings where they are on the device already.
    """

    def __init__(
        self,
        scorer: Scorer,
        train: RatingMatrix,
        truth: RatingMatrix,
        batch_size: int,
        rules: Rules,
        rows: Rows | None = None,
    ):
        size = min(batch_size, max(1, int(np.count_nonzero(np.diff(truth.starts)))))
        found = batches.pairs(train, truth, size, rows)

        def gather(data: Any, places: Array) -> dict[str, Array]:
            whole = places[0] + size <= found.users
            return {**found.gather(data, places), "in_whole_batch": jnp.broadcast_to(whole, places.shape)}

        self.rules, self.batches = rules, found.users // size
        self.evaluation = Evaluation(
            _values(scorer, rules), found.data, size, samples=found.users, gather=gather
        )

    def __call__(self, state: Any) -> Figures:
        """The figures of one state, in rating units."""
        sums = self.evaluation(state)
        figures = {
            "rmse": math.sqrt(sums["squared_error"] / sums["ratings"]),
            "mae": sums["absolute_error"] / sums["ratings"],
            "rmse_mean_of_batches": sums["batch_rmse"] / self.batches,
            "users": sums["samples"],
            "ratings": sums["ratings"],
        }
        return figures | (self._ranking(sums) if self.rules.ks else {})

    def _ranking(self, sums: Mapping[str, Any]) -> Figures:
        """Means over the users that have something relevant; no figures where nobody has."""
        ranked = sums["ranked"]
        means = {
            f"{name}@{k}": float(total / ranked)
            for name in ("ndcg", "recall")
            for k, total in zip(self.rules.ks, sums[name], strict=True)
            if ranked
        }
        return {**means, "ranked_users": ranked}


def _values(scorer: Scorer, rules: Rules) -> Callable[[Any, Batch], dict[str, Array]]:
    def values(state: Any, batch: Batch) -> dict[str, Array]:
        scores, truth = scorer(state, batch), batch["truth"]
        figures = losses.error_sums(rules.prediction(scores), truth) | {
            "batch_rmse": _old_rmse(scores, batch)
        }
        if rules.ks:
            liked = (truth > 0) & (truth >= rules.relevant)
            figures |= ranking.values(scores, batch["ratings"] > 0, liked, rules.ks)
        return figures

    return values


def _old_rmse(scores: Array, batch: Batch) -> Array:
    """The old program's RMSE of the batch, never clipped, dealt out evenly to its users so that their sum is it.

    A last batch that is not whole was left out.
    """
    there = batch["truth"] > 0
    error = jnp.where(there, scores - batch["truth"], 0)
    rmse = jnp.sqrt(jnp.square(error).sum() / there.sum())
    return jnp.where(batch["in_whole_batch"], rmse / len(scores), 0)
