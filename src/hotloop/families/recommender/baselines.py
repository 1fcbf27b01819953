"""`hotloop recommender baselines`: what simple methods reach on the same ratings, in one table with a trained run.

The overall mean, user and item biases, popularity and EASE, measured exactly as the autoencoder is. Whatever can be
chosen is chosen on the validation part, lambda by NDCG at the first of --k. A dash stands where a figure means nothing:
popularity and EASE predict no ratings, and the mean ranks nothing.

Biases by damped means: an item's is the mean of its ratings above the overall mean, shrunk towards 0 as if it had so
many more ratings of none; then the same for users with what is left (Koren, 2008). By ridge: all at once, the least
squares with those dampings as penalties, by turns over items and users. EASE (Steck, 2019): a linear model of items by
items, in closed form. With X the zeros and ones of what is relevant to users, P = (X'X + lambda I)^-1 and weights
B_ij = -P_ij / P_jj off the diagonal, 0 on it; an item's score for a user is (x B)_j.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from hotloop.engine.measure import memory_of_device
from hotloop.engine.progress import Console
from hotloop.errors import DataError
from hotloop.families.recommender import batches, rating_sets, saved_run
from hotloop.families.recommender.batches import Figures
from hotloop.families.recommender.commands_config import BaselineOptions
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.evaluate import EvaluationSet, choose_part, has_same_ratings, show_figures
from hotloop.families.recommender.measures import Batch, Scorer, count_likes, make_measures, make_rules
from hotloop.families.recommender.ranking import is_relevant
from hotloop.families.recommender.saved_run import SavedRun
from hotloop.options import to_jsonable

Floats = NDArray[np.float64]
USUAL_DAMPINGS = (25.0, 10.0)  # of items and users where there is nothing to choose them by (Koren, 2008)
ITEM_GRID, USER_GRID = (1.0, 2.5, 5.0, 10.0, 25.0), (1.0, 5.0, 25.0)  # what is tried otherwise
CONVERGED, MAX_TURNS = 1e-3, 30  # the ridge fit ends when no bias moves by more than a thousandth of a star
LAMBDA_GRID = (50.0, 100.0, 200.0, 500.0, 1000.0)
USUAL_LAMBDA = 500.0  # where there is nothing to choose it by: that of the paper for MovieLens-20M
USERS_AT_ONCE, BATCH = 512, 128
CPU_MEMORY, CPU_FLOPS = 8 << 30, 1e13  # what EASE may take of a CPU unasked: some minutes
RATING = ("rmse", "rmse_se", "mae", "rmse_mean_of_batches")
RANKING = ("ndcg", "recall", "coverage", "ranked_users")


def run(config: BaselineOptions, console: Console) -> Mapping[str, Any]:
    found = None
    if config.run is not None:
        found = saved_run.load_run(config.run, config.step, best=config.step is None)
    data = rating_sets.load_sets(choose_options(config, found), console)
    if found is not None and not has_same_ratings(data.train, found.load_training()):
        raise DataError(f"--run {config.run}: was trained on other ratings than those of {data.name}")
    chosen = choose_part(data, "--part", config.part, "give them in a file")
    if data.validation is None:
        console.warn("dampings and lambda: nothing to choose by: usual ones")
    elif chosen.short == "validation":
        console.warn("dampings and lambda: chosen on this same part")
    with console.progress("baselines"):
        rows = measure_baselines(config, data.validation, data.scale, chosen, found, console)
    show_figures(rows, config, chosen, console)
    if data.notice:
        console.warn(data.notice)
    return {"data": chosen.name, "models": to_jsonable(rows)}


def choose_options(config: BaselineOptions, found: SavedRun | None) -> TrainOptions:
    """Which ratings: those that the options name, with all of them to train on where the run did so; else the run's."""
    if found is None:
        return config.training()
    if not config.names_data:
        return found.config
    named = config.training()
    return replace(named, no_validation=named.no_validation or found.config.no_validation)


def measure_baselines(
    config: BaselineOptions,
    validation: RatingMatrix | None,
    scale: tuple[float, float],
    chosen: EvaluationSet,
    found: SavedRun | None,
    console: Console,
) -> dict[str, Figures]:
    train, relevant, rules = chosen.train, config.relevant, make_rules(config, *scale)
    resident = jax.device_put(batches.make_rows(train))

    def measure(
        scorer: Scorer, truth: RatingMatrix = chosen.truth, *, rates: bool = True
    ) -> Callable[[Any], Figures]:
        return make_measures(scorer, train, truth, config.batch_size or BATCH, rules, resident, rates=rates)

    def without(figures: Figures, names: tuple[str, ...]) -> Figures:
        return {name: value for name, value in figures.items() if name.split("@")[0] not in names}

    def score_additive(state: Mapping[str, Array], batch: Batch) -> Array:
        return state["mean"] + state["user"][batch["users"]][:, None] + state["item"]

    measure_additive = measure(score_additive)

    def additive(fit: Biases) -> Figures:
        names = ("mean", "user", "item")
        return measure_additive({name: jnp.asarray(getattr(fit, name), jnp.float32) for name in names})

    fit = choose_biases(train, validation, rules.low, rules.high)
    likes = count_likes(train, relevant).astype(np.float64)
    popularity = Biases(0.0, np.zeros(train.users), likes)
    rows = {
        "overall mean": without(additive(fit_mean(train)), RANKING),
        f"user + item bias ({fit.how})": additive(fit),
        f"popularity (ratings of {relevant:g} or more)": without(additive(popularity), RATING),
    }
    if config.k and (config.ease == "yes" or (config.ease == "auto" and can_afford_ease(train, console))):

        def score_ease(state: Array, batch: Batch) -> Array:
            x = is_relevant(batch["ratings"], relevant).astype(state.dtype)
            return jnp.matmul(x, state, precision="highest")

        products, best = count_pairs(train, relevant, resident), USUAL_LAMBDA
        if validation is not None:
            validate, by = measure(score_ease, validation, rates=False), f"ndcg@{config.k[0]}"
            tried = {each: validate(ease_weights(products, each)).get(by, 0.0) for each in LAMBDA_GRID}
            if any(tried.values()):
                best = max(LAMBDA_GRID, key=lambda each: tried[each])
        figures = measure(score_ease, rates=False)(ease_weights(products, best))
        rows[f"EASE (lambda {best:g})"] = figures
    if found is not None:
        objective = ", --objective ranking" if found.job.is_ranking else ""
        figures = measure(found.score, rates=not found.job.is_ranking)(found.state)
        rows[f"autoencoder (step {found.step:,}{objective})"] = figures
    return rows


def can_afford_ease(train: RatingMatrix, console: Console) -> bool:
    device = jax.devices()[0]
    is_cpu = device.platform == "cpu"
    room = CPU_MEMORY if is_cpu else memory_of_device(device) or CPU_MEMORY
    items, penalties = train.n_items, len(LAMBDA_GRID)
    needed = 5 * 4 * items**2  # at the peak, matrices of items by items in float32
    # X'X, and for each lambda an inverse and one pass over all users.
    work = 2.0 * train.users * items**2 * (1 + penalties) + 2.0 * penalties * items**3
    if needed <= room and (not is_cpu or work <= CPU_FLOPS):
        return True
    console.warn(
        f"EASE left out: {items:,} items would take {needed / 2**30:.1f} GiB and {work:.1e} FLOP; --ease yes does it "
        "all the same"
    )
    return False


@dataclass(frozen=True, eq=False)
class Biases:
    """A prediction is `mean` + `user`[row] + `item`[column]."""

    mean: float
    user: Floats
    item: Floats
    how: str = ""


def fit_mean(train: RatingMatrix) -> Biases:
    total = sum(float(values.sum()) for _, _, values in _blocks(train))
    return Biases(total / train.ratings, np.zeros(train.users), np.zeros(train.n_items), "overall mean")


def fit_damped_means(train: RatingMatrix, item_damping: float, user_damping: float) -> Biases:
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
        user = _user_biases(train, now, user_damping)
        # The same predictions with the least penalty: what all items share goes to the users, or back. Taking turns
        # alone moves along this direction very slowly, since no rating changes along it.
        pull = item_damping * now.item.sum() - user_damping * user.sum()
        shift = pull / (item_damping * len(now.item) + user_damping * len(user))
        now = Biases(now.mean, user + shift, now.item - shift)
        if max(np.abs(now.user - before.user).max(), np.abs(now.item - before.item).max()) < CONVERGED:
            break
    return replace(now, how=f"ridge, {item_damping:g} and {user_damping:g}")


def choose_biases(train: RatingMatrix, validation: RatingMatrix | None, low: float, high: float) -> Biases:
    """Of both fits and all dampings the one with the smallest clipped RMSE on the validation ratings, if any."""
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


def count_pairs(train: RatingMatrix, relevant: float, rows: batches.DeviceRows | None = None) -> Array:
    """X'X: to how many users both of two items are relevant; exact, a sum of ones."""
    size = min(USERS_AT_ONCE, train.users)
    room = batches.max_ratings(train, size)
    dtype = jnp.float32 if platform() == "cpu" else jnp.bfloat16  # exact for zeros and ones

    @jax.jit
    def total(rows: batches.DeviceRows) -> Array:
        def add(turn: Array, so_far: Array) -> Array:
            users = turn * size + jnp.arange(size, dtype=jnp.int32)
            dense = batches.densify(rows, jnp.minimum(users, train.users - 1), train.n_items, room)
            x = (is_relevant(dense, relevant) & (users < train.users)[:, None]).astype(dtype)
            return so_far + jnp.matmul(x.T, x, preferred_element_type=jnp.float32)

        none = jnp.zeros((train.n_items, train.n_items), jnp.float32)
        result: Array = lax.fori_loop(0, -(-train.users // size), add, none)
        return result

    products: Array = total(rows or jax.device_put(batches.make_rows(train)))
    return products


@jax.jit
def ease_weights(products: Array, penalty: Array) -> Array:
    eye = jnp.eye(len(products), dtype=products.dtype)
    with jax.default_matmul_precision("highest"):
        inverse = cho_solve(cho_factor(products + penalty * eye, lower=True), eye)
    return jnp.where(eye > 0, 0, -inverse / jnp.diagonal(inverse))
