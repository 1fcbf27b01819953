"""What predictions and orders of items are worth, over the users of a set of ratings, in one pass on the device.

RMSE and MAE are over all ratings at once. NDCG@k and Recall@k have binary relevance; candidates are the items that
the user has not rated in training, equal scores in the order of their columns. DCG@k adds 1 / log2(1 + place) over
the relevant items among the first k, and NDCG@k divides it by the best that is possible; Recall@k is the share of the
relevant items that are among the first k. Scores are ranked as they are, since clipping would make ties.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.loop import Evaluation, PerSample
from hotloop.errors import DataError
from hotloop.families.recommender.batches import DeviceRows, densify, make_rows, max_ratings
from hotloop.families.recommender.commands_config import PredictionOptions, RankingOptions

Batch = Mapping[str, Array]
Scorer = Callable[
    [Any, Batch], Array
]  # (state, batch) -> scores [B, items]: autoencoder, table of biases, EASE
Figures = dict[str, Any]


def sum_errors(predictions: Array, truth: Array) -> dict[str, Array]:
    """Of each user: squared and absolute error over its ratings, and their number."""
    there = truth > 0
    error = jnp.where(there, predictions - truth, 0)
    return {
        "squared_error": jnp.square(error).sum(-1),
        "absolute_error": jnp.abs(error).sum(-1),
        "ratings": there.sum(-1),
    }


def evaluate_users(
    values: PerSample,
    train: RatingMatrix,
    truth: RatingMatrix,
    batch_size: int,
    rows: DeviceRows | None = None,
) -> Evaluation:
    """`values` over the users that have a rating in `truth`, which has the rows and columns of `train`.

    A batch has `users` (row numbers), `ratings` (their training ratings, dense), `truth`, and whether it is
    `in_whole_batch`. `rows` are the training ratings where they are on the device already.
    """
    users = np.flatnonzero(np.diff(truth.starts)).astype(np.int32)
    if not len(users):
        raise DataError("no ratings to evaluate: none has a user and an item of the training data")
    size = min(batch_size, len(users))
    room = [max_ratings(matrix, size) for matrix in (train, truth)]

    def gather(data: Any, places: Array) -> dict[str, Array]:
        chosen = data["users"][places]
        return {
            "users": chosen,
            "ratings": densify(data["train"], chosen, train.n_items, room[0]),
            "truth": densify(data["truth"], chosen, train.n_items, room[1]),
            "in_whole_batch": jnp.broadcast_to(places[0] + size <= len(users), places.shape),
        }

    data = {"train": rows or make_rows(train), "truth": make_rows(truth), "users": users}
    return Evaluation(values, data, size, samples=len(users), gather=gather)


def make_rating_error(
    values: PerSample, train: RatingMatrix, truth: RatingMatrix, batch_size: int
) -> Callable[[Any], dict[str, float]]:
    """From a state to RMSE and MAE on the ratings of `truth`, compiled once; `values` is the family's `evaluate`."""
    evaluation = evaluate_users(values, train, truth, batch_size)

    def rating_error(state: Any) -> dict[str, float]:
        sums = evaluation(state)
        count = sums["ratings"]
        return {
            "rmse": float((sums["squared_error"] / count) ** 0.5),
            "mae": float(sums["absolute_error"] / count),
            "users": sums["samples"],
            "ratings": count,
        }

    return rating_error


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
    rows: DeviceRows | None = None,
) -> Callable[[Any], Figures]:
    """From a state to all figures of a scorer by the ratings of `truth`, compiled once; see `evaluate_users`."""

    def values(state: Any, batch: Batch) -> dict[str, Array]:
        scores, truth = scorer(state, batch), batch["truth"]
        figures = sum_errors(rules.predict(scores), truth)
        # The old program's RMSE of whole batches, never clipped, dealt out to its users so that their sum is it.
        there = truth > 0
        rmse = jnp.sqrt(jnp.square(jnp.where(there, scores - truth, 0)).sum() / there.sum())
        figures["batch_rmse"] = jnp.where(batch["in_whole_batch"], rmse / len(scores), 0)
        if rules.ks:
            relevant = is_relevant(truth, rules.relevant)
            figures |= ranking_values(scores, batch["ratings"] > 0, relevant, rules.ks)
        return figures

    evaluation = evaluate_users(values, train, truth, batch_size, rows)
    whole_batches = evaluation.samples // evaluation.batch_size

    def measure(state: Any) -> Figures:
        sums = evaluation(state)
        figures = {
            "rmse": math.sqrt(sums["squared_error"] / sums["ratings"]),
            "mae": sums["absolute_error"] / sums["ratings"],
            "rmse_mean_of_batches": sums["batch_rmse"] / whole_batches,
            "users": sums["samples"],
            "ratings": sums["ratings"],
        }
        if rules.ks:
            figures["ranked_users"] = ranked = sums["ranked"]
            # No figures where nothing is relevant to anybody.
            for name in ("ndcg", "recall") if ranked else ():
                for k, total in zip(rules.ks, sums[name], strict=True):
                    figures[f"{name}@{k}"] = float(total / ranked)
        return figures

    return measure
