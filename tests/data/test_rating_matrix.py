import numpy as np
import pytest

from hotloop.data import rating_matrix
from hotloop.data.rating_matrix import build_matrix, group_by_rows, number_ids
from hotloop.data.stand_ins import draw_random_ratings, draw_random_sets
from hotloop.errors import DataError


def naive(users, items, values):
    """Rows of {column: rating} in plain Python, numbered by first appearance, the last one of several wins."""
    user_number, item_number, rows = {}, {}, []
    for user, item, value in zip(users.tolist(), items.tolist(), values.tolist(), strict=True):
        row = user_number.setdefault(user, len(user_number))
        column = item_number.setdefault(item, len(item_number))
        if row == len(rows):
            rows.append({})
        rows[row][column] = value
    return rows, list(user_number), list(item_number)


def drawn(count, users, items, seed=0, *, stretch=1, shift=0):
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 11, count).astype(np.float32) / 2
    ids = rng.integers(0, users, count) * stretch + shift, rng.integers(0, items, count) * stretch + shift
    return *ids, values


def rows_of(ratings):
    found = [ratings.row(user) for user in range(ratings.users)]
    return [dict(zip(items.tolist(), values.tolist(), strict=True)) for items, values in found]


@pytest.mark.parametrize(("stretch", "shift"), [(1, 0), (3, 17), (10**12, 5), (1, -20)])
@pytest.mark.parametrize("block", [7, 1 << 22])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_matrix_is_that_of_the_naive_loop(monkeypatch, stretch, shift, block, grouped):
    monkeypatch.setattr(rating_matrix, "BLOCK", block)
    users, items, values = drawn(500, 40, 30, stretch=stretch, shift=shift)
    if grouped:
        order = np.argsort(users, kind="stable")
        users, items, values = users[order], items[order], values[order]
    rows, user_ids, item_ids = naive(users, items, values)
    warnings = []
    built = build_matrix(users, items, values, warn=warnings.append)
    assert rows_of(built) == rows
    assert built.user_ids.tolist() == user_ids
    assert built.item_ids.tolist() == item_ids
    assert (built.users, built.n_items, built.ratings) == (len(rows), len(item_ids), sum(map(len, rows)))
    repeated = 500 - built.ratings
    assert repeated > 50
    assert warnings == [f"{repeated} ratings have the user and item of a later one: the last one counts"]


def test_columns_of_a_row_ascend_and_types_are_small():
    built = build_matrix(*drawn(2000, 50, 60), warn=lambda _: None)
    for user in range(built.users):
        assert (np.diff(built.row(user)[0].astype(int)) > 0).all()
    assert (built.items.dtype, built.codes.dtype) == (np.uint16, np.uint8)
    assert (built.starts.dtype, built.user_ids.dtype) == (np.int64, np.int64)
    assert built.levels.tolist() == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5]
    np.testing.assert_array_equal(built.values(), built.levels[built.codes])


@pytest.mark.parametrize(("items", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_columns_are_wide_only_where_they_must_be(items, dtype):
    ids = np.arange(items)
    built = build_matrix(np.zeros(items, int), ids, np.ones(items), warn=pytest.fail)
    assert built.items.dtype == dtype
    np.testing.assert_array_equal(built.items, ids)


def test_more_levels_than_a_byte_can_number_are_kept_as_they_are(monkeypatch):
    monkeypatch.setattr(rating_matrix, "BLOCK", 100)
    values = np.linspace(0.5, 9.5, 257, dtype=np.float32)
    many = build_matrix(np.arange(257) // 16, np.arange(257) % 16, values, warn=pytest.fail)
    assert many.levels is None
    np.testing.assert_array_equal(many.values(), values)
    few = build_matrix(np.arange(256) // 16, np.arange(256) % 16, values[:256], warn=pytest.fail)
    assert len(few.levels) == 256
    np.testing.assert_array_equal(few.values(), values[:256])


def test_without_repeats_nothing_is_said_and_the_last_of_repeats_wins():
    build_matrix(np.array([1, 1]), np.array([1, 2]), np.array([3.0, 4.0]), warn=pytest.fail)
    warnings = []
    built = build_matrix(
        np.array([1, 2, 1]), np.array([1, 1, 1]), np.array([3.0, 4.0, 2.5]), warn=warnings.append
    )
    assert rows_of(built) == [{0: 2.5}, {0: 4.0}]
    assert len(warnings) == 1


def test_with_maps_rows_and_columns_are_the_maps_and_strangers_are_counted_out():
    warnings = []
    built = build_matrix(
        np.array([9, 5, 7, 5]),
        np.array([1, 3, 3, 8]),
        np.array([1.0, 2.0, 3.0, 4.0]),
        user_ids=np.array([7, 4, 5]),
        item_ids=np.array([3, 1]),
        warn=warnings.append,
    )
    assert rows_of(built) == [{0: 3.0}, {}, {0: 2.0}]
    assert (built.users, built.n_items, built.skipped) == (3, 2, 2)
    assert warnings == ["2 of 4 ratings are left out: their user or item is not in the training data"]


def test_nothing_is_an_empty_matrix():
    empty = np.empty(0, np.int32)
    built = build_matrix(
        empty, empty, empty, user_ids=np.array([4, 2]), item_ids=np.array([1]), warn=pytest.fail
    )
    assert (built.users, built.ratings, built.starts.tolist()) == (2, 0, [0, 0, 0])
    assert build_matrix(empty, empty, empty, warn=pytest.fail).users == 0


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_ratings_that_are_not_above_zero_are_refused(bad):
    with pytest.raises(DataError, match="zero and negative ratings are refused"):
        build_matrix(np.array([1, 2]), np.array([1, 2]), np.array([3.0, bad]), warn=pytest.fail)


def test_numbers_follow_the_first_appearance():
    numbers, names = number_ids(np.array([30, 10, 30, 20, 10]))
    assert (numbers.tolist(), names.tolist()) == ([0, 1, 0, 2, 1], [30, 10, 20])


def test_a_row_longer_than_a_block_comes_whole_and_every_place_comes_once(monkeypatch):
    monkeypatch.setattr(rating_matrix, "BLOCK", 10)
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(6), [3, 25, 0, 4, 6, 1])).astype(np.int32)
    blocks = [(first, last, sorted(rows[places].tolist())) for first, last, places in group_by_rows(rows, 6)]
    assert blocks == [(0, 1, [0] * 3), (1, 2, [1] * 25), (2, 5, [3] * 4 + [4] * 6), (5, 6, [5])]


def test_rows_that_ascend_in_each_block_but_not_across_are_not_taken_for_grouped(monkeypatch):
    monkeypatch.setattr(rating_matrix, "BLOCK", 10)
    rows = np.tile(np.arange(10, dtype=np.int32), 2)
    found = [rows[places].tolist() for _, _, places in group_by_rows(rows, 10)]
    assert found == [[0, 1, 2, 3, 4] * 2, [5, 6, 7, 8, 9] * 2]


def test_random_ratings_are_uniform_and_seeded():
    ratings = draw_random_ratings(50, 20, 20_000, seed=3)
    assert (np.unique(ratings.users).tolist(), np.unique(ratings.items).tolist()) == (
        list(range(50)),
        list(range(20)),
    )
    shares = np.bincount(ratings.values.astype(int), minlength=6) / 20_000
    assert shares[0] == 0
    np.testing.assert_allclose(shares[1:], 0.2, atol=0.015)  # five standard deviations
    again, other = draw_random_ratings(50, 20, 20_000, seed=3), draw_random_ratings(50, 20, 20_000, seed=4)
    np.testing.assert_array_equal(again.users, ratings.users)
    assert (other.users != ratings.users).mean() > 0.9


def test_random_validation_is_new_and_knows_only_what_train_knows():
    train, valid = draw_random_sets(300, 200, 200, 5000, seed=1)
    assert 0 < len(valid) < 5000
    assert set(valid.users.tolist()) <= set(train.users.tolist())
    assert set(valid.items.tolist()) <= set(train.items.tolist())
    build_matrix(train.users, train.items, train.values, warn=lambda _: None)
    assert not np.array_equal(valid.users[:50], train.users[:50])


@pytest.mark.slow
def test_random_ratings_have_the_shape_of_the_netflix_prize():
    train, valid = draw_random_sets()
    warnings = []
    built = build_matrix(train.users, train.items, train.values, warn=warnings.append)
    assert (built.users, built.n_items) == (480_000, 18_000)
    assert 9_300 < len(train) - built.ratings < 10_300  # 9,778 pairs are expected twice
    assert 419_000 < len(np.unique(valid.users)) < 421_500  # 420,233 are expected
    assert built.items.nbytes + built.codes.nbytes < 40e6
