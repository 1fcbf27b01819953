"""The baselines as models: ratings by mean + user bias + item bias, and EASE for ranking.

Damped means: an item's bias is the mean of its ratings above the overall mean, shrunk towards 0 as if it had so many
more ratings of none; then the same for users with what is left (Koren, 2008). Ridge: all biases at once, the least
squares with those dampings as penalties, by turns over items and users. Host arithmetic in float64, some millions of
ratings at a time.

EASE (Steck, 2019): a linear model of items by items, in closed form. With X the zeros and ones of what is relevant to
users, P = (X'X + lambda I)^-1 and weights B_ij = -P_ij / P_jj off the diagonal, 0 on it; an item's score for a user is
(x B)_j. All of it happens on the device in float32, the products in full precision; X'X is exact, a sum of ones. It
predicts no ratings.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import cho_factor, cho_solve
from numpy.typing import NDArray

from hotloop.data.rating_matrix import BLOCK, RatingMatrix
from hotloop.engine.device import platform
from hotloop.families.recommender import batches
from hotloop.families.recommender.batches import DeviceRows
from hotloop.families.recommender.measures import Batch, Scorer, is_relevant

Floats = NDArray[np.float64]
USUAL_DAMPINGS = (25.0, 10.0)
"""Item and user damping where there is nothing to choose them by (Koren, 2008)."""
ITEM_GRID, USER_GRID = (1.0, 2.5, 5.0, 10.0, 25.0), (1.0, 5.0, 25.0)
"""What is tried otherwise."""
CONVERGED, MAX_TURNS = 1e-3, 30
"""The ridge fit ends when no bias moves by more than this, a thousandth of a star."""
LAMBDA_GRID = (50.0, 100.0, 200.0, 500.0, 1000.0)
"""Values of lambda to choose from."""
USUAL_LAMBDA = 500.0
"""Lambda where there is nothing to choose it by: that of the paper for MovieLens-20M."""
USERS_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Biases:
    """A prediction is `mean` + `user`[row] + `item`[column]."""

    mean: float
    user: Floats
    item: Floats
    how: str = ""


def additive_state(fit: Biases) -> dict[str, Array]:
    """Biases on the device, for `score_additive`."""
    return {name: jnp.asarray(getattr(fit, name), jnp.float32) for name in ("mean", "user", "item")}


def score_additive(state: Mapping[str, Array], batch: Batch) -> Array:
    return state["mean"] + state["user"][batch["users"]][:, None] + state["item"]


def fit_mean(train: RatingMatrix) -> Biases:
    total = sum(float(values.sum()) for _, _, values in _blocks(train))
    return Biases(total / train.ratings, np.zeros(train.users), np.zeros(train.n_items), "overall mean")


def fit_damped_means(train: RatingMatrix, item_damping: float, user_damping: float) -> Biases:
    """Items first, then users with what the items leave."""
    start = fit_mean(train)
    item = _item_biases(train, start, item_damping)
    user = _user_biases(train, Biases(start.mean, start.user, item), user_damping)
    return Biases(start.mean, user, item, f"damped means, {item_damping:g} and {user_damping:g}")


def fit_ridge(
    train: RatingMatrix, item_damping: float, user_damping: float, start: Biases | None = None
) -> Biases:
    """Users and items together, from `start` where a similar fit is known."""
    now = start or fit_mean(train)
    for _ in range(MAX_TURNS):
        before = now
        now = Biases(now.mean, now.user, _item_biases(train, now, item_damping))
        now = Biases(now.mean, _user_biases(train, now, user_damping), now.item)
        now = _balance(now, item_damping, user_damping)
        if max(np.abs(now.user - before.user).max(), np.abs(now.item - before.item).max()) < CONVERGED:
            break
    return Biases(now.mean, now.user, now.item, f"ridge, {item_damping:g} and {user_damping:g}")


def _balance(now: Biases, item_damping: float, user_damping: float) -> Biases:
    """The same predictions with the least penalty: what all items share goes to the users, or back.

    Taking turns alone moves along this direction very slowly, since no rating speaks against it.
    """
    pull = item_damping * now.item.sum() - user_damping * now.user.sum()
    shift = pull / (item_damping * len(now.item) + user_damping * len(now.user))
    return Biases(now.mean, now.user + shift, now.item - shift)


def choose_biases(train: RatingMatrix, validation: RatingMatrix | None, low: float, high: float) -> Biases:
    """Of both fits and all dampings the one with the smallest clipped RMSE on the validation ratings.

    Without any, damped means with the usual dampings.
    """
    if validation is None:
        return fit_damped_means(train, *USUAL_DAMPINGS)
    best, least, last = None, math.inf, None
    for dampings in product(ITEM_GRID, USER_GRID):
        last = fit_ridge(train, *dampings, start=last)
        for fit in (fit_damped_means(train, *dampings), last):
            if (error := biases_rmse(fit, validation, low, high)) < least:
                best, least = fit, error
    assert best is not None
    return best


def biases_rmse(biases: Biases, truth: RatingMatrix, low: float, high: float) -> float:
    """Over all ratings of a set with the same rows and columns."""
    total = 0.0
    for rows, columns, values in _blocks(truth):
        predicted = biases.mean + biases.user[rows] + biases.item[columns]
        total += float(np.square(np.clip(predicted, low, high) - values).sum())
    return math.sqrt(total / truth.ratings)


def _item_biases(train: RatingMatrix, now: Biases, damping: float) -> Floats:
    sums, counts = np.zeros(train.n_items), np.zeros(train.n_items)
    for rows, columns, values in _blocks(train):
        sums += np.bincount(columns, values - now.mean - now.user[rows], train.n_items)
        counts += np.bincount(columns, minlength=train.n_items)
    return sums / (counts + damping)


def _user_biases(train: RatingMatrix, now: Biases, damping: float) -> Floats:
    sums = np.zeros(train.users)
    for rows, columns, values in _blocks(train):
        sums += np.bincount(rows, values - now.mean - now.item[columns], train.users)
    return sums / (np.diff(train.starts) + damping)


def _blocks(matrix: RatingMatrix) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], Floats]]:
    """Rows, columns and ratings of some millions of ratings at a time, whole users."""
    first = 0
    while first < matrix.users:
        end = np.searchsorted(matrix.starts, matrix.starts[first] + BLOCK, "right") - 1
        last = max(int(end), first + 1)
        own = slice(int(matrix.starts[first]), int(matrix.starts[last]))
        rows = np.repeat(np.arange(first, last), np.diff(matrix.starts[first : last + 1]))
        yield rows, matrix.items[own], matrix.values(own).astype(np.float64)
        first = last


def count_pairs(train: RatingMatrix, relevant: float, rows: DeviceRows | None = None) -> Array:
    """X'X: to how many users both of two items are relevant."""
    size = min(USERS_AT_ONCE, train.users)
    room = batches.max_ratings(train, size)
    dtype = jnp.float32 if platform() == "cpu" else jnp.bfloat16  # exact for zeros and ones

    @jax.jit
    def total(rows: DeviceRows) -> Array:
        def add(turn: Array, so_far: Array) -> Array:
            users = turn * size + jnp.arange(size, dtype=jnp.int32)
            dense = batches.densify(rows, jnp.minimum(users, train.users - 1), train.n_items, room)
            x = (is_relevant(dense, relevant) & (users < train.users)[:, None]).astype(dtype)
            return so_far + jnp.matmul(x.T, x, preferred_element_type=jnp.float32)

        none = jnp.zeros((train.n_items, train.n_items), jnp.float32)
        turns = -(-train.users // size)
        result: Array = lax.fori_loop(0, turns, add, none)
        return result

    products: Array = total(rows or batches.send_rows(train))
    return products


@jax.jit
def ease_weights(products: Array, penalty: Array) -> Array:
    """B for one lambda."""
    eye = jnp.eye(len(products), dtype=products.dtype)
    with jax.default_matmul_precision("highest"):
        inverse = cho_solve(cho_factor(products + penalty * eye, lower=True), eye)
    return jnp.where(eye > 0, 0, -inverse / jnp.diagonal(inverse))


def ease_scorer(relevant: float) -> Scorer:
    """Scores of a batch; the state is B."""

    def score(state: Array, batch: Batch) -> Array:
        x = is_relevant(batch["ratings"], relevant).astype(state.dtype)
        return jnp.matmul(x, state, precision="highest")

    return score
