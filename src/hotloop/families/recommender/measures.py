"""What predictions and orders of items are worth, over exactly the users that have held-out ratings, on the device.

RMSE and MAE are over all ratings at once. Orders are over the users to whom a held-out item is relevant: rated as high
as `relevant` or more. Candidates are the items that the user has not rated in training, equal scores in the order of
their columns; scores are ranked as they are, since clipping would make ties. With h the hits in the first k places and
r the relevant held-out items of a user:

    NDCG@k      sum of 1 / log2(place + 1) over the hits, divided by the same sum for min(k, r) hits in the first places
    Recall@k    h / r: plain, not h / min(k, r) as Liang et al. (2018) have it
    coverage@k  items that are in the list of any of these users, over all items

NDCG and Recall are means over users. Standard errors are over users, too; that of RMSE is the usual one of a ratio of
two sums over users, by the first order of its root.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from numpy.typing import NDArray

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.errors import OptionError
from hotloop.families.recommender import batches
from hotloop.families.recommender.batches import Figures
from hotloop.families.recommender.commands_config import PredictionOptions, RankingOptions
from hotloop.families.recommender.ranking import is_relevant

Batch = Mapping[str, Array]
# (state, batch) -> scores [B, items]: autoencoder, table of biases, EASE
Scorer = Callable[[Any, Batch], Array]
LISTED = "listed"
RANKED = ("ndcg", "recall")


def first_places(scores: Array, rated: Array, depth: int) -> tuple[Array, Array]:
    """The columns of the best unrated items, best first, and which are there: a user may have rated nearly all."""
    best, columns = lax.top_k(jnp.where(rated, -jnp.inf, scores), min(depth, scores.shape[-1]))
    return columns, best > -jnp.inf


def ranking_values(scores: Array, rated: Array, relevant: Array, ks: Sequence[int]) -> dict[str, Array]:
    """For each user `ndcg` and `recall` [B, len(ks)], and `ranked`: whether there is anything relevant to find.

    Where there is nothing, both are 0: leave those users out of a mean. An item that is rated is never relevant.
    `listed` [B, items] are the first ks[0] items of users that are ranked.
    """
    wanted = relevant & ~rated
    first, there = first_places(scores, rated, max(ks))
    depth = first.shape[-1]
    hits = jnp.take_along_axis(wanted, first, axis=-1).astype(jnp.float32)
    discounts = (1 / np.log2(np.arange(depth) + 2.0)).astype(np.float32)
    total, ends = wanted.sum(-1), [min(k, depth) for k in ks]
    ideal = np.append(0, np.cumsum(discounts)).astype(np.float32)
    best = jnp.asarray(ideal)[jnp.minimum(total[:, None], jnp.asarray(ends))]

    def sum_to_ends(entries: Array) -> Array:
        return jnp.stack([entries[:, :end].sum(-1) for end in ends], axis=-1)

    row, shown = jnp.arange(len(scores))[:, None], there[:, : ends[0]] & (total > 0)[:, None]
    return {
        "ndcg": sum_to_ends(hits * discounts) / jnp.maximum(best, 1),  # an only item in first place has 1
        "recall": sum_to_ends(hits) / jnp.maximum(total, 1)[:, None],
        "ranked": total > 0,
        LISTED: jnp.zeros(scores.shape, bool).at[row, first[:, : ends[0]]].max(shown),
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
        check_reachable(options.relevant, high)
        return ScoringRules(*bounds, options.round, options.k, options.relevant)
    return ScoringRules(*bounds, options.round)


def check_reachable(relevant: float, high: float) -> None:
    """OptionError for a bound that was chosen and is above all ratings; the usual one is, on other scales."""
    if relevant > high and relevant != RankingOptions.relevant:
        raise OptionError(
            f"--relevant {relevant:g}: the training ratings go up to {high:g}; take a lower one"
        )


def make_measures(
    scorer: Scorer,
    train: RatingMatrix,
    truth: RatingMatrix,
    batch_size: int,
    rules: ScoringRules,
    rows: batches.DeviceRows | None = None,
    mesh: Mesh | None = None,
    *,
    rates: bool = True,
    likes: NDArray[np.int64] | None = None,
) -> Callable[[Any], Figures]:
    """From a state to all figures of a scorer by the ratings of `truth`, compiled once; see `evaluate_users`.

    A scorer that `rates` gives ratings; the scores of others are good for an order alone. With `likes` of each item
    there is the NDCG of the most liked ones for everybody, too, by the way.
    """
    users = len(batches.find_users(truth))

    def values(state: Any, batch: Batch) -> dict[str, Array]:
        scores, truth = scorer(state, batch), batch["truth"]
        figures = rating_values(scores, batch, rules) if rates else {"ratings": (truth > 0).sum(-1)}
        if rules.ks:
            relevant = is_relevant(truth, rules.relevant)
            order = ranking_values(scores, batch["ratings"] > 0, relevant, rules.ks)
            figures |= order | {f"{name}_square": jnp.square(order[name]) for name in RANKED}
            if likes is not None:
                popular = jnp.broadcast_to(jnp.asarray(likes, jnp.float32), scores.shape)
                found = ranking_values(popular, batch["ratings"] > 0, relevant, rules.ks[:1])
                figures["popular"] = found["ndcg"][:, 0]
        return figures

    united = (LISTED,) if rules.ks else ()
    evaluation = batches.evaluate_users(values, train, truth, batch_size, rows, mesh, united)
    whole_batches = evaluation.samples // evaluation.batch_size

    def measure(state: Any) -> Figures:
        sums = evaluation(state)
        figures = {"users": users, "ratings": sums["ratings"]}
        if rates:
            figures |= rating_figures(sums, users)
            figures["rmse_mean_of_batches"] = sums["batch_rmse"] / whole_batches
        figures |= ranking_figures(sums, rules.ks) if rules.ks else {}
        if "popular" in sums and sums["ranked"]:
            figures[f"popularity_ndcg@{rules.ks[0]}"] = sums["popular"] / sums["ranked"]
        return figures

    return measure


def rating_values(scores: Array, batch: Batch, rules: ScoringRules) -> dict[str, Array]:
    """Of each user: its errors, and the products of sums over users that the standard error takes."""
    truth = batch["truth"]
    figures = batches.sum_errors(rules.predict(scores), truth)
    # The old program's RMSE of whole batches, never clipped, dealt out to its users so that their sum is it.
    there = truth > 0
    rmse = jnp.sqrt(jnp.square(jnp.where(there, scores - truth, 0)).sum() / there.sum())
    figures["batch_rmse"] = jnp.where(batch["in_whole_batch"], rmse / len(scores), 0)
    error, count = figures["squared_error"], figures["ratings"].astype(jnp.float32)
    return figures | {
        "error_error": error * error,
        "error_count": error * count,
        "count_count": count * count,
    }


def rating_figures(sums: Mapping[str, Any], users: int) -> Figures:
    """RMSE with its standard error, and MAE, of sums over all users."""
    count, error = sums["ratings"], sums["squared_error"] / sums["ratings"]
    apart = sums["error_error"] - 2 * error * sums["error_count"] + error**2 * sums["count_count"]
    of_mean = math.sqrt(max(apart, 0) * users / max(users - 1, 1)) / count
    rmse = math.sqrt(error)
    return {
        "rmse": rmse,
        "rmse_se": of_mean / (2 * rmse) if rmse else 0.0,
        "mae": sums["absolute_error"] / count,
    }


def ranking_figures(sums: Mapping[str, Any], ks: Sequence[int]) -> Figures:
    """Means over the users that are ranked, their standard errors and the coverage; none where nobody is ranked."""
    ranked = sums["ranked"]
    figures: Figures = {"ranked_users": ranked}
    for name in RANKED if ranked else ():
        for k, total, squares in zip(ks, sums[name], sums[f"{name}_square"], strict=True):
            mean = float(total / ranked)
            spread = max(float(squares) / ranked - mean**2, 0) / max(ranked - 1, 1)
            figures |= {f"{name}@{k}": mean, f"{name}@{k}_se": math.sqrt(spread)}
    if ranked:
        figures[f"coverage@{ks[0]}"] = float(np.mean(sums[LISTED]))
    return figures


def count_likes(train: RatingMatrix, least: float) -> NDArray[np.int64]:
    """How many users like each item: what popularity ranks by."""
    return np.bincount(train.items[train.values() >= least], minlength=train.n_items)


def has_unrated_likes(train: RatingMatrix, truth: RatingMatrix, least: float) -> bool:
    """Whether any user likes a held-out item that it has not rated in training: if not, nobody is ranked."""
    for user in batches.find_users(truth):
        items, values = truth.row(user)
        if not np.isin(items[values >= least], train.row(user)[0]).all():
            return True
    return False
