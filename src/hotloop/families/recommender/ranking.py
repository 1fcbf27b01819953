"""How good an order of items is: NDCG@k and Recall@k of each user, with binary relevance.

Candidates are the items that the user has not rated in training; equal scores stand in the order of their columns.
DCG@k adds 1 / log2(1 + place) over the relevant items among the first k, and NDCG@k divides it by the best that is
possible; Recall@k is the share of the relevant items that are among the first k. It knows no model and no ratings.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax


def candidates(scores: Array, rated: Array) -> Array:
    """The scores [B, items] of what may be recommended, minus infinity elsewhere."""
    return jnp.where(rated, -jnp.inf, scores)


def values(scores: Array, rated: Array, relevant: Array, ks: Sequence[int]) -> dict[str, Array]:
    """For each user `ndcg` and `recall` [B, len(ks)], and `ranked`: whether there is anything relevant to find.

    Where there is nothing, both are 0: leave those users out of a mean. An item that is rated is never relevant.
    """
    wanted = relevant & ~rated
    depth = min(max(ks), scores.shape[-1])
    _, first = lax.top_k(candidates(scores, rated), depth)
    hits = jnp.take_along_axis(wanted, first, axis=-1).astype(jnp.float32)
    discounts = 1 / jnp.log2(jnp.arange(depth, dtype=jnp.float32) + 2)
    total = wanted.sum(-1)
    ends = jnp.asarray([min(k, depth) for k in ks])
    best = _up_to(discounts, jnp.minimum(total[:, None], ends))
    found = jnp.cumsum(hits, axis=-1)[:, ends - 1]
    gained = jnp.cumsum(hits * discounts, axis=-1)[:, ends - 1]
    return {
        "ndcg": gained / jnp.maximum(best, 1),  # one relevant item in the first place is 1 already
        "recall": found / jnp.maximum(total, 1)[:, None],
        "ranked": total > 0,
    }


def _up_to(discounts: Array, count: Array) -> Array:
    """The sum of the first `count` discounts."""
    sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(discounts)])
    return sums[count]
