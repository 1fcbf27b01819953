"""The trained autoencoder as a model to serve: what a user has rated in, the best items that it has not rated out.

Items go by their original ids, which are looked up in the program. With the training ratings inside, an original id of
a user may stand for that user's ratings. A row that makes no sense (an unknown user, a rating that is none) gets
predictions that are not numbers, which a server refuses for that row alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.exportable import (
    Arrays,
    Exportable,
    Signature,
    Tensor,
    best_step,
    describe_source,
    tolerance_of,
)
from hotloop.errors import CheckpointError, ModelError, OptionError
from hotloop.families.recommender import model
from hotloop.families.recommender.commands_config import FAMILY
from hotloop.families.recommender.ranking import log_probabilities
from hotloop.families.recommender.saved_run import BEST, SavedRun, load_run, read_setup
from hotloop.layers.highest import highest

TOP, MAX_RATINGS = 10, 512
NOBODY = -1
"""In `items` and `user`: nothing stands here."""
LARGEST_ID = 2**31 - 1
EXAMPLES, RATED = 3, 20  # rows of the examples, and ratings of each


@dataclass(frozen=True)
class Shape:
    """All that the program is made from but its weights."""

    layers: int
    linear: bool
    items: int
    low: float
    high: float
    top: int
    max_ratings: int
    capacity: int
    """Ratings of the user with most of them, where the training ratings are inside; 0 where they are not."""
    compute: str
    relevant: float = 0.0
    """Where an order was learnt, the rating from which a user likes an item; 0 where ratings were."""


def from_run(
    run: Path,
    *,
    step: int | None = None,
    best: bool = False,
    top: int | None = None,
    max_ratings: int | None = None,
    with_users: bool = False,
) -> Exportable:
    """The model of a run's checkpoint: that of a step, the best by its validation, else the newest."""
    if best:
        rule = BEST[read_setup(run).config.objective]
        checkpoints = Checkpoints(run / "checkpoints", rule, family=FAMILY)
        step = checkpoints.best()  # the one that `train` tested; else by the records
        if step is None:
            step = best_step(run, checkpoints.steps(), rule.metric, 1 if rule.mode == "max" else -1)
    found = load_run(run, step)
    if found.job.items < (top or 1):
        raise OptionError(f"top={top}: there are only {found.job.items} items")
    train = found.load_training() if with_users else None
    params = found.job.policy.to_compute(found.state["params"])
    weights = {"params": params, "item": _lookup(found.item_ids, "item")}
    if train is not None:
        weights |= {"user": _lookup(found.user_ids, "user"), "rated": _resident(train)}
    shape = Shape(
        layers=len(found.job.layers),
        linear=found.job.net.no_selu,
        items=found.job.items,
        low=found.low,
        high=found.high,
        top=min(TOP, found.job.items) if top is None else top,
        max_ratings=min(max_ratings or MAX_RATINGS, found.job.items),
        capacity=int(np.diff(train.starts).max(initial=1)) if train is not None else 0,
        compute=str(found.job.policy.compute),
        relevant=found.job.net.relevant if found.job.is_ranking else 0.0,
    )
    source = describe_source(run, found.step, f"{found.users:,} users, {found.job.items:,} items")
    return _describe(shape, weights, source, _examples(shape, found))


def rebuild(about: Mapping[str, Any], weights: Mapping[str, Any], examples: Arrays) -> Exportable:
    """The same model from its own folder: model.json's contents, its weights as a tree, and its examples."""
    try:
        shape = Shape(**about["config"])
        params = {
            side: tuple(weights["params"][side][str(number)] for number in range(shape.layers))
            for side in ("encoder", "decoder")
        }
        if "spread" in weights["params"]:
            params["spread"] = weights["params"]["spread"]
    except (KeyError, TypeError) as error:
        raise ModelError(f"its config in model.json cannot be read ({error!r})") from None
    return _describe(shape, {**weights, "params": params}, about["source"], examples)


def _lookup(ids: NDArray[np.int64], what: str) -> dict[str, Any]:
    """Original ids in ascending order, and the place of each; ids by place."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= LARGEST_ID:
        raise CheckpointError(
            f"{what} ids from {ids.min()} to {ids.max()}: a served model takes those from 0 to {LARGEST_ID}"
        )
    order = np.argsort(ids, kind="stable").astype(np.int32)
    whole = ids.astype(np.int32)
    return {"ids": whole, "sorted": whole[order], "order": order}


def _resident(train: RatingMatrix) -> dict[str, Any]:
    if train.ratings > LARGEST_ID:
        raise OptionError(
            f"with_users=True: {train.ratings:,} ratings are more than {LARGEST_ID:,}; leave it out"
        )
    return {
        "starts": train.starts.astype(np.int32),
        "items": train.items.astype(np.int32),
        "values": np.asarray(train.values(), np.float32),
    }


def _examples(shape: Shape, found: SavedRun) -> Arrays:
    """Made-up users with a few ratings each, the last with none; where users are inside, it is the first of these."""
    generator = np.random.default_rng(0)
    items = np.full((EXAMPLES, shape.max_ratings), NOBODY, np.int32)
    ratings = np.zeros((EXAMPLES, shape.max_ratings), np.float32)
    count = min(RATED, shape.max_ratings)
    for row in range(EXAMPLES - 1):
        chosen = generator.choice(shape.items, count, replace=False)
        items[row, :count] = found.item_ids[chosen]
        ratings[row, :count] = generator.uniform(shape.low, shape.high, count)
    inputs: Arrays = {"items": items, "ratings": ratings}
    if shape.capacity:
        inputs["user"] = np.full(EXAMPLES, NOBODY, np.int32)
        inputs["user"][-1] = found.user_ids[0]
    return inputs


def _describe(
    shape: Shape, weights: Mapping[str, Any], source: Mapping[str, Any], examples: Arrays
) -> Exportable:
    inputs = [
        Tensor.of("items", np.int32, shape.max_ratings),
        Tensor.of("ratings", np.float32, shape.max_ratings),
    ]
    words = (
        f"Original ids of up to {shape.max_ratings} items, padded with -1, a rating above 0 for each; where an item "
        "stands twice the last rating counts. Items that the training did not have are passed over. Answers that are "
        "too few: padded with -1 and 0."
    )
    if shape.relevant:
        words += f" A user likes what it rates {shape.relevant:g} or more; predictions are log-probabilities of items."
    if shape.capacity:
        inputs.append(Tensor.of("user", np.int32))
        words += " `user`: an original id, for the ratings of the training besides those sent; -1 for nobody."
    outputs = (Tensor.of("items", np.int32, shape.top), Tensor.of("predictions", np.float32, shape.top))
    return Exportable(
        family=FAMILY,
        name=FAMILY,
        function=recommender(shape),
        weights=weights,
        signature=Signature(tuple(inputs), outputs),
        examples=examples,
        tolerance=tolerance_of(jnp.dtype(shape.compute)),
        preprocessing=words,
        config=asdict(shape),
        source=source,
    )


def find_places(lookup: Mapping[str, Array], ids: Array, missing: int) -> Array:
    """The place of each original id; `missing` for one that is not there."""
    at = jnp.minimum(jnp.searchsorted(lookup["sorted"], ids), lookup["sorted"].shape[0] - 1)
    return jnp.where(lookup["sorted"][at] == ids, lookup["order"][at], missing)


def recommender(shape: Shape) -> Callable[[Any, Mapping[str, Any]], dict[str, Array]]:
    """The best unrated items of each row, best first, and what the model predicts for them."""

    def recommend(weights: Any, inputs: Mapping[str, Any]) -> dict[str, Array]:
        columns = find_places(weights["item"], inputs["items"], shape.items)
        is_wrong = (inputs["items"] >= 0) & ~((inputs["ratings"] > 0) & jnp.isfinite(inputs["ratings"]))
        wrong = is_wrong.any(1)
        dense = jnp.zeros((inputs["items"].shape[0], shape.items), jnp.float32)
        if shape.capacity:
            own, values, unknown = _ratings_of_users(weights, inputs["user"], shape)
            dense, wrong = _scatter(dense, own, values), wrong | unknown
        dense = _scatter(dense, _keep_last(columns, shape.items), inputs["ratings"])
        scores = score_items(shape, weights["params"], dense)
        unrated = jnp.where(dense > 0, -jnp.inf, scores.astype(jnp.float32))
        best, places = highest(unrated, k=shape.top)
        there = best > -jnp.inf
        bounds = (-jnp.inf, jnp.inf) if shape.relevant else (shape.low, shape.high)
        predictions = jnp.where(there, jnp.clip(best, *bounds), 0)
        return {
            "items": jnp.where(there, weights["item"]["ids"][places], NOBODY),
            "predictions": jnp.where(wrong[:, None], jnp.nan, predictions),
        }

    return recommend


def score_items(shape: Shape, params: Any, ratings: Array) -> Array:
    """Predicted ratings; log-probabilities where an order was learnt."""
    if shape.relevant:
        return log_probabilities(params, ratings, shape.relevant, linear=shape.linear)
    return model.forward(params, ratings, linear=shape.linear)


def _keep_last(columns: Array, missing: int) -> Array:
    """Columns [n, k] of which the last of equals in a row stays and the others are `missing`: a device writes equals in
    whatever order it likes."""
    rows, places = jnp.arange(columns.shape[0])[:, None], jnp.arange(columns.shape[1])
    last = jnp.zeros((columns.shape[0], missing), jnp.int32).at[rows, columns].max(places, mode="drop")
    return jnp.where(last.at[rows, columns].get(mode="fill", fill_value=0) == places, columns, missing)


def _scatter(dense: Array, columns: Array, values: Array) -> Array:
    """Ratings put into their places; columns beyond the last are dropped."""
    rows = jnp.arange(dense.shape[0])[:, None]
    return dense.at[rows, columns].set(values, mode="drop")


def _ratings_of_users(weights: Any, users: Array, shape: Shape) -> tuple[Array, Array, Array]:
    """Columns and training ratings of users [n], padded with columns beyond the last; which of them are unknown."""
    row = find_places(weights["user"], users, NOBODY)
    starts, held = weights["rated"]["starts"], jnp.maximum(row, 0)
    first = starts[held]
    count = jnp.where(row >= 0, starts[held + 1] - first, 0)
    offsets = jnp.arange(shape.capacity)
    at = jnp.minimum(first[:, None] + offsets, weights["rated"]["items"].shape[0] - 1)
    inside = offsets < count[:, None]
    columns = jnp.where(inside, weights["rated"]["items"][at], shape.items)
    return columns, weights["rated"]["values"][at], (users >= 0) & (row < 0)
