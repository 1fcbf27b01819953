"""How good an order of items is: NDCG@k and Recall@k of each user, with binary relevance.

Candidates are the items that the user has not rated in training; equal scores stand in the order of their columns.
DCG@k adds 1 / log2(1 + place) over the relevant items among the first k, and NDCG@k divides it by the best that is
possible; Recall@k is the share of the relevant items that are among the first k. It knows no model and no ratings.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
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
    discounts = (1 / np.log2(np.arange(depth) + 2.0)).astype(np.float32)
    total, ends = wanted.sum(-1), [min(k, depth) for k in ks]
    ideal = np.append(0, np.cumsum(discounts)).astype(np.float32)
    best = jnp.asarray(ideal)[jnp.minimum(total[:, None], jnp.asarray(ends))]
    return {
        "ndcg": _sums_to(hits * discounts, ends) / jnp.maximum(best, 1),  # an only item in first place has 1
        "recall": _sums_to(hits, ends) / jnp.maximum(total, 1)[:, None],
        "ranked": total > 0,
    }


def _sums_to(entries: Array, ends: Sequence[int]) -> Array:
    """Sums of the first entries of each row, one for each end."""
    return jnp.stack([entries[:, :end].sum(-1) for end in ends], axis=-1)
