"""Sparse ratings made dense: against loops over the ratings, in one scatter and in chunks, and pass by pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recommender_small import quick

from hotloop.data.rating_matrix import build_matrix
from hotloop.engine.feed import Order, Resident
from hotloop.families.recommender import batches

ITEMS = 30


def matrix(sizes, items=ITEMS, values="stars", seed=0):
    """Rows of these many ratings of items drawn without repetition."""
    generator = np.random.default_rng(seed)
    users = np.repeat(np.arange(len(sizes)), sizes)
    columns = np.concatenate([generator.permutation(items)[:size] for size in sizes]).astype(np.int64)
    drawn = {
        "stars": generator.integers(1, 6, len(users)),
        "half stars": generator.integers(1, 11, len(users)) / 2,
        "reals": generator.uniform(0.1, 9, len(users)),
    }[values].astype(np.float32)
    ids = {"user_ids": np.arange(len(sizes)), "item_ids": np.arange(items)}
    return build_matrix(users, columns, drawn, **ids, warn=pytest.fail)


def naive(matrix, users):
    dense = np.zeros((len(users), matrix.n_items), np.float32)
    for place, user in enumerate(users):
        for item, rating in zip(*matrix.row(user), strict=True):
            dense[place, item] = rating
    return dense


def dense(matrix, *groups, dtype=jnp.float32):
    capacity = batches.max_ratings(matrix, len(groups[0]))
    fill = quick(lambda rows, users: batches.densify(rows, users, matrix.n_items, capacity, dtype))
    rows = jax.device_put(batches.make_rows(matrix))
    return [np.asarray(fill(rows, np.asarray(users, np.uint32))) for users in groups]


def check(matrix, *groups):
    """Groups of users, all of one size, so that they share a program."""
    for users, found in zip(groups, dense(matrix, *groups), strict=True):
        np.testing.assert_array_equal(found, naive(matrix, users))


PATHS = {"one scatter": (4096, "cpu"), "chunks": (4, "cpu"), "accelerator": (4, "gpu")}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    chunk, platform = PATHS[request.param]
    monkeypatch.setattr(batches, "CHUNK", chunk)
    monkeypatch.setattr(batches, "platform", lambda: platform)


SIZES = [3, 0, 0, 7, 30, 1, 4, 0, 12, 2, 5, 0]


@pytest.mark.parametrize("values", ["stars", "half stars", "reals"])
def test_dense_batches_are_those_of_a_loop(path, values):
    """Empty rows first, last, in between and alone, one row with every item, any order of users."""
    if values == "reals":
        rows = matrix([*SIZES, *[30] * 9], values=values)
        assert rows.levels is None and rows.codes.dtype == np.float32
    else:
        rows = matrix(SIZES, values=values)
        assert rows.levels is not None and rows.codes.dtype == np.uint8
    check(rows, [1, 4, 3, 2, 8, 0, 7, 11], [7, 2, 11, 1, 0, 3, 5, 4], [1, 2, 7, 11, 2, 1, 7, 11])


def test_all_users_at_once_and_one_user_alone(monkeypatch):
    monkeypatch.setattr(batches, "CHUNK", 4)
    rows = matrix(SIZES)
    check(rows, np.arange(len(SIZES)))
    check(rows, [4], [0], [1])


def test_one_very_long_row_among_short_ones_takes_several_chunks():
    rows = matrix([1, 0, 9_001, 2, 3], items=10_000)
    assert rows.items.dtype == np.uint16 and batches.max_ratings(rows, 2) > 2 * batches.CHUNK
    check(rows, [3, 2])


def test_more_items_than_16_bits_hold(path):
    rows = matrix([20, 0, 50], items=70_000)
    assert rows.items.dtype == np.uint32 and rows.items.max() > 65_535
    check(rows, [2, 0])


def test_half_stars_are_exact_in_16_bits():
    rows = matrix(SIZES, values="half stars")
    for dtype in (jnp.float16, jnp.bfloat16):
        (found,) = dense(rows, [4, 8, 3], dtype=dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(np.float32), naive(rows, [4, 8, 3]))


@pytest.mark.parametrize("batch", [1, 3, 5, 7, 8, 10, 11, 12])
def test_the_largest_batch_bounds_every_batch_that_a_pass_can_begin_and_the_next_one_end(batch):
    """A user may come twice in a batch that runs over into the next pass."""
    rows = matrix(SIZES)
    sizes = np.diff(rows.starts)
    bound = batches.max_ratings(rows, batch)
    order = Order(len(SIZES), batch, seed=1)
    sums = sizes[order.indices(order.start(0), np.arange(1000, dtype=np.uint32))].sum(1)
    assert sums.max() <= bound
    top = np.concatenate([[0], np.cumsum(np.sort(sizes)[::-1])])
    worst = max(top[k] + top[batch - k] for k in range(batch + 1))
    assert bound == top[batch] if len(SIZES) % batch == 0 else bound >= worst


def test_the_largest_batch_of_all_users_is_all_ratings_and_never_empty():
    assert batches.max_ratings(matrix(SIZES), len(SIZES)) == sum(SIZES)
    assert batches.max_ratings(matrix([0, 1, 0]), 1) == 1
    assert (
        batches.max_ratings(
            build_matrix(*np.zeros((3, 0)), user_ids=np.arange(3), item_ids=np.arange(4), warn=print), 1
        )
        == 1
    )


@pytest.mark.parametrize(("users", "batch"), [(12, 4), (11, 4), (5, 3)])
def test_every_user_comes_exactly_once_a_pass_with_all_ratings(users, batch):
    """Also where the last batch of a pass is only begun by it: nothing is left out, nothing is lost."""
    rows = matrix([29, 1, 4, 3, 12, 2, 5, 0, 8, 6, 9, 7][:users])
    capacity = batches.max_ratings(rows, batch)

    def gather(data, indices):
        return {"ratings": batches.densify(data, indices, ITEMS, capacity), "user": indices}

    feed = Resident(batches.make_rows(rows), batch, seed=2, samples=users, gather=gather)
    passes = 30
    updates = passes * users // batch + 1
    steps = jnp.arange(updates, dtype=jnp.uint32)
    found = quick(lambda data: jax.lax.map(lambda n: feed.batch(data, n), steps))(feed.arguments(0, updates))
    seen = np.asarray(found["user"]).ravel()
    np.testing.assert_array_equal(np.asarray(found["ratings"]).reshape(-1, ITEMS), naive(rows, seen))
    orders = [seen[n * users : (n + 1) * users] for n in range(passes)]
    assert all(sorted(order) == list(range(users)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
