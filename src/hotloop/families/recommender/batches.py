"""Sparse ratings on the device, batches of them made dense inside the compiled loop, and errors over all users.

A matrix stays compressed (two or four bytes an item, one a rating); a batch is scattered into zeros when its
update comes. Its ratings are laid end to end and found again by their place: rows cost what they hold. Of several
devices each has the whole matrix and makes its own share of a batch dense.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.device import platform
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Evaluation, PerSample
from hotloop.engine.precision import EVERYWHERE, SPLIT
from hotloop.errors import DataError

# Ratings at a time on a CPU: of a batch that is made dense, and of sums over sparse ratings.
CHUNK, FOLD_CHUNK = 4096, 1024
Figures = dict[str, Any]
Total = TypeVar("Total")


class DeviceRows(NamedTuple):
    """A compressed matrix on the device; `levels` may be None."""

    starts: Any
    items: Any
    codes: Any
    levels: Any


def make_rows(matrix: RatingMatrix) -> DeviceRows:
    """Its arrays, still the host's: `jax.device_put` sends them."""
    if matrix.ratings >= 2**31:
        raise ValueError("more than 2^31 ratings: places in a matrix are 32 bits on the device")
    return DeviceRows(matrix.starts.astype(np.int32), matrix.items, matrix.codes, matrix.levels)


def max_ratings(matrix: RatingMatrix, batch_size: int) -> int:
    """The most ratings that any batch of so many users can hold."""
    # A batch that runs over from one pass into the next may hold a user twice, so half of it may be counted twice.
    sizes: NDArray[np.int64] = np.sort(np.diff(matrix.starts))[::-1]
    again = 0 if len(sizes) % batch_size == 0 else batch_size // 2
    return max(1, int(sizes[: batch_size - again].sum() + sizes[:again].sum()))


class SparseFeed(Resident):
    """Its batches name users beside everybody's ratings, which every replica has whole: the update deals out users."""

    def finish(self, batch: Any, arguments: Any, step: Array) -> Any:
        return batch


def make_feed(
    train: RatingMatrix, batch_size: int, seed: int, dtype: Any, *, sparse: bool, mesh: Mesh | None = None
) -> Resident:
    """Batches of users, made dense inside the loop, or left sparse for an update that takes them so."""
    dense = make_dense(train, batch_size, mesh, dtype)

    def gather(rows: DeviceRows, users: Array) -> dict[str, Any]:
        return {"ratings": SparseBatch(rows, users) if sparse else dense(rows, users)}

    kind = SparseFeed if sparse else Resident
    sharding = split_over(mesh)
    return kind(
        make_rows(train), batch_size, seed=seed, samples=train.users, gather=gather, sharding=sharding
    )


def split_over(mesh: Mesh | None) -> NamedSharding | None:
    """The placement of a batch whose users are divided among the replicas."""
    return None if mesh is None else NamedSharding(mesh, SPLIT)


class Entries(NamedTuple):
    """Some ratings of a batch; those that are not `inside` are there for the shape alone and have the value 0."""

    row: Array
    column: Array
    value: Array
    inside: Array
    at: Array
    """The place of each among all ratings of the batch."""


class SparseBatch(NamedTuple):
    """The ratings of these users, end to end, not made dense."""

    rows: DeviceRows
    users: Array
    dtype: Any = jnp.float32

    @property
    def sizes(self) -> Array:
        sizes: Array = self.rows.starts[self.users + 1] - self.rows.starts[self.users]
        return sizes

    def entries(self, places: Array) -> Entries:
        first, sizes = self.rows.starts[self.users], self.sizes
        ends = jnp.cumsum(sizes)
        row = jnp.searchsorted(ends, places, side="right").astype(jnp.int32)
        inside = row < len(self.users)
        row = jnp.where(inside, row, 0)
        at = jnp.where(inside, first[row] + places - (ends[row] - sizes[row]), 0)
        codes = self.rows.codes[at]
        values = codes if self.rows.levels is None else self.rows.levels[codes]
        return Entries(
            row,
            jnp.where(inside, self.rows.items[at].astype(jnp.int32), 0),
            jnp.where(inside, values, 0).astype(self.dtype),
            inside,
            places,
        )

    def fold(self, add: Callable[[Total, Entries], Total], start: Total, chunk: int = FOLD_CHUNK) -> Total:
        """`add` over all ratings, a chunk at a time, in as many turns as are needed: good on a CPU."""
        turns = (self.sizes.sum() + chunk - 1) // chunk
        places = jnp.arange(chunk, dtype=jnp.int32)
        result: Total = lax.fori_loop(0, turns, lambda n, x: add(x, self.entries(places + n * chunk)), start)
        return result


def densify(rows: DeviceRows, users: Array, items: int, capacity: int, dtype: Any = jnp.float32) -> Array:
    """The ratings of these users, `capacity` at most, as [B, items], zero where there is none."""
    sparse = SparseBatch(rows, users, dtype)

    def scattered(into: Array, some: Entries) -> Array:
        column = jnp.where(some.inside, some.column, items + some.at)  # past the end: dropped
        return into.at[some.row, column].set(some.value, mode="drop", unique_indices=True)

    # On an accelerator all at once; on a CPU a loop of as many turns as are needed costs nothing.
    zeros = jnp.zeros((len(users), items), dtype)
    if platform() != "cpu" or capacity <= CHUNK:
        return scattered(zeros, sparse.entries(jnp.arange(capacity, dtype=jnp.int32)))
    return sparse.fold(scattered, zeros, CHUNK)


def make_dense(
    matrix: RatingMatrix,
    batch_size: int,
    mesh: Mesh | None = None,
    dtype: Any = jnp.float32,
    capacity: int | None = None,
) -> Callable[[DeviceRows, Array], Array]:
    """(a matrix on the device, so many users) -> their dense ratings; each replica works on its share of them.

    A share has at most `capacity` ratings, where it is known which users meet.
    """
    share = batch_size if mesh is None else batch_size // mesh.size
    capacity = capacity or max_ratings(matrix, share)

    def dense(rows: DeviceRows, users: Array) -> Array:
        return densify(rows, users, matrix.n_items, capacity, dtype)

    if mesh is None:
        return dense
    specs = EVERYWHERE, SPLIT
    return jax.shard_map(dense, mesh=mesh, in_specs=specs, out_specs=SPLIT, check_vma=False)


def sum_errors(predictions: Array, truth: Array) -> dict[str, Array]:
    """Of each user: squared and absolute error over its ratings, and their number."""
    there = truth > 0
    error = jnp.where(there, predictions - truth, 0)
    return {
        "squared_error": jnp.square(error).sum(-1),
        "absolute_error": jnp.abs(error).sum(-1),
        "ratings": there.sum(-1),
    }


def find_users(truth: RatingMatrix) -> NDArray[np.int32]:
    """The rows that have a rating."""
    return np.flatnonzero(np.diff(truth.starts)).astype(np.int32)


def fill_batches(users: NDArray[np.int32], size: int, shares: int) -> tuple[NDArray[np.int32], int]:
    """Users in batches that split into equal shares, and the length of such a batch: -1 stands where nobody does.

    Every whole batch of `size` users is filled up by itself, so that it holds the users that it has on one device.
    """
    length = -(-size // shares) * shares
    whole = len(users) // size * size
    filled = np.pad(users[:whole].reshape(-1, size), ((0, 0), (0, length - size)), constant_values=-1)
    return np.concatenate([filled.reshape(-1), users[whole:]]), length


def evaluate_users(
    values: PerSample,
    train: RatingMatrix,
    truth: RatingMatrix,
    batch_size: int,
    rows: DeviceRows | None = None,
    mesh: Mesh | None = None,
    united: tuple[str, ...] = (),
) -> Evaluation:
    """`values` over the users that have a rating in `truth`, which has the rows and columns of `train`.

    `rows` are the training ratings where they are on the device already. With a `mesh` each replica has its share of
    every batch; a place that only fills up a batch has no truth, and so adds 0 to sums over ratings.
    """
    users = find_users(truth)
    if not len(users):
        raise DataError("no ratings to evaluate: none has a user and an item of the training data")
    shares = 1 if mesh is None else mesh.size
    filled, size = fill_batches(users, min(batch_size, len(users)), shares)
    dense_train, dense_truth = (make_dense(matrix, size, mesh) for matrix in (train, truth))

    def gather(data: Any, places: Array) -> dict[str, Array]:
        found = data["users"][places]
        chosen = jnp.maximum(found, 0)
        known = dense_truth(data["truth"], chosen)
        return {
            "users": chosen,
            "ratings": dense_train(data["train"], chosen),
            "truth": known if mesh is None else jnp.where(found[:, None] < 0, 0, known),
            "in_whole_batch": jnp.broadcast_to(places[0] + size <= len(filled), places.shape),
        }

    data = {"train": rows or make_rows(train), "truth": make_rows(truth), "users": filled}
    sharding = split_over(mesh)
    return Evaluation(
        values, data, size, samples=len(filled), gather=gather, sharding=sharding, united=united
    )


def make_rating_error(
    values: PerSample,
    train: RatingMatrix,
    truth: RatingMatrix,
    batch_size: int,
    mesh: Mesh | None = None,
) -> Callable[[Any], dict[str, float]]:
    """From a state to RMSE and MAE on the ratings of `truth`, compiled once; `values` is the family's `evaluate`."""
    evaluation, users = evaluate_users(values, train, truth, batch_size, mesh=mesh), len(find_users(truth))

    def rating_error(state: Any) -> dict[str, float]:
        sums = evaluation(state)
        count = sums["ratings"]
        return {
            "rmse": float((sums["squared_error"] / count) ** 0.5),
            "mae": float(sums["absolute_error"] / count),
            "users": users,
            "ratings": count,
        }

    return rating_error
