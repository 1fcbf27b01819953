"""EASE (Steck, 2019): a linear model of items by items, in closed form, for ranking.

With X the zeros and ones of what users liked, P = (X'X + lambda I)^-1 and weights B_ij = -P_ij / P_jj off the
diagonal, 0 on it; an item's score for a user is (x B)_j. All of it happens on the device in float32, the products in
full precision; X'X is exact, a sum of ones. It predicts no ratings.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import cho_factor, cho_solve

from hotloop.data.matrix import RatingMatrix
from hotloop.engine.device import platform
from hotloop.families.recommender import batches
from hotloop.families.recommender.batches import Rows
from hotloop.families.recommender.measures import Batch

GRID = (50.0, 100.0, 200.0, 500.0, 1000.0)
"""Values of lambda to choose from."""
USUAL = 500.0
"""Lambda where there is nothing to choose it by: that of the paper for MovieLens-20M."""
USERS_AT_ONCE = 512
SQUARES = 5
"""Matrices of items by items that are on the device at the same time."""


def liked(ratings: Array, relevant: float) -> Array:
    """Where dense ratings are there and high enough."""
    return (ratings > 0) & (ratings >= relevant)


def gram(train: RatingMatrix, relevant: float, rows: Rows | None = None) -> Array:
    """X'X: how many users liked both of two items."""
    size = min(USERS_AT_ONCE, train.users)
    room = batches.largest(train, size)
    dtype = jnp.float32 if platform() == "cpu" else jnp.bfloat16  # exact for zeros and ones

    @jax.jit
    def total(rows: Rows) -> Array:
        def add(turn: Array, so_far: Array) -> Array:
            users = turn * size + jnp.arange(size, dtype=jnp.int32)
            dense = batches.densify(rows, jnp.minimum(users, train.users - 1), train.n_items, room)
            x = (liked(dense, relevant) & (users < train.users)[:, None]).astype(dtype)
            return so_far + jnp.matmul(x.T, x, preferred_element_type=jnp.float32)

        none = jnp.zeros((train.n_items, train.n_items), jnp.float32)
        turns = -(-train.users // size)
        result: Array = lax.fori_loop(0, turns, add, none)
        return result

    products: Array = total(rows or batches.on_device(train))
    return products


@jax.jit
def weights(products: Array, penalty: Array) -> Array:
    """B for one lambda."""
    eye = jnp.eye(len(products), dtype=products.dtype)
    with jax.default_matmul_precision("highest"):
        inverse = cho_solve(cho_factor(products + penalty * eye, lower=True), eye)
    return jnp.where(eye > 0, 0, -inverse / jnp.diagonal(inverse))


def scorer(relevant: float) -> Any:
    """Scores of a batch; the state is B."""

    def score(state: Array, batch: Batch) -> Array:
        return jnp.matmul(liked(batch["ratings"], relevant).astype(state.dtype), state, precision="highest")

    return score


def bytes_needed(items: int) -> int:
    """On the device, at the peak."""
    return SQUARES * 4 * items**2


def flops_needed(users: int, items: int, penalties: int) -> float:
    """For X'X, and an inverse and one pass over all users for each lambda."""
    return 2.0 * users * items**2 * (1 + penalties) + 2.0 * penalties * items**3
