"""The shuffle is a bijection for any size, the same in numpy and jax, and mixes like a random permutation."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.engine.feed import LARGEST, permute, seed_words
from hotloop.errors import DataError

SIZES = (1, 2, 7, 200, 50_000)
on_device = jax.jit(permute, static_argnums=1)


def whole(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(n, dtype=np.uint32), n, seed, epoch)


@pytest.mark.parametrize("n", SIZES)
def test_every_sample_appears_once(n: int) -> None:
    np.testing.assert_array_equal(np.sort(whole(n, seed=5, epoch=3)), np.arange(n))


@given(n=st.integers(1, 3_000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**32 - 2))
@settings(max_examples=100, deadline=None)
def test_every_sample_appears_once_for_any_size_seed_and_epoch(n: int, seed: int, epoch: int) -> None:
    np.testing.assert_array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", SIZES)
def test_numpy_and_jax_agree_bit_for_bit(n: int) -> None:
    positions = np.arange(2 * n, dtype=np.uint32)  # this pass and the next
    for seed, epoch in ((0, 0), (2**40 + 9, 77)):
        device = on_device(positions, n, seed_words(seed), np.uint32(epoch))
        host = permute(positions, n, seed, epoch)
        assert device.dtype == host.dtype == np.uint32
        np.testing.assert_array_equal(device, host)


def test_the_largest_size_stays_in_range_and_agrees() -> None:
    positions = np.concatenate([np.arange(50), LARGEST - 1 - np.arange(50)]).astype(np.uint32)
    host = permute(positions, LARGEST, 1, 2)
    assert len(np.unique(host)) == 100 and int(host.max()) < LARGEST
    np.testing.assert_array_equal(on_device(positions, LARGEST, seed_words(1), np.uint32(2)), host)


def test_positions_from_n_on_belong_to_the_next_epoch() -> None:
    both = permute(np.arange(400, dtype=np.uint32), 200, 9, 4)
    np.testing.assert_array_equal(both, np.concatenate([whole(200, 9, 4), whole(200, 9, 5)]))


def test_one_epoch_for_each_row_equals_row_by_row() -> None:
    rows = np.arange(30, dtype=np.uint32).reshape(3, 10)
    epochs = np.array([[4], [0], [9]])
    together = permute(rows, 20, 1, epochs)
    for row, epoch, got in zip(rows, epochs[:, 0], together, strict=True):
        np.testing.assert_array_equal(got, permute(row, 20, 1, epoch))


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    n = 1_000
    orders = [whole(n, seed, epoch) for seed in (0, 1, 2**32, 2**63) for epoch in (0, 1, 2)]
    agreements = [np.sum(a == b) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(agreements) < 10  # independent orders agree in one place on average


def chi_square_bound(degrees: int) -> float:
    """Five standard deviations above the mean of the statistic."""
    return degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("n", [7, 20])
def test_every_sample_is_equally_likely_at_every_position(n: int) -> None:
    epochs = 20_000
    positions = np.broadcast_to(np.arange(n, dtype=np.uint32), (epochs, n))
    orders = permute(positions, n, 3, np.arange(epochs)[:, None])
    counts = np.stack([np.bincount(orders[:, place], minlength=n) for place in range(n)])
    statistic = np.sum((counts - epochs / n) ** 2 / (epochs / n))
    degrees = (n - 1) ** 2
    assert degrees - 5 * (2 * degrees) ** 0.5 < statistic < chi_square_bound(degrees)


def test_neighbours_do_not_stay_together() -> None:
    n, epochs = 20, 20_000
    positions = np.broadcast_to(np.arange(2, dtype=np.uint32), (epochs, 2))
    pairs = permute(positions, n, 8, np.arange(epochs)[:, None]).astype(np.int64)
    counts = np.bincount((pairs[:, 1] - pairs[:, 0]) % n, minlength=n)
    assert counts[0] == 0
    expected = epochs / (n - 1)
    assert np.sum((counts[1:] - expected) ** 2 / expected) < chi_square_bound(n - 2)


def test_a_long_pass_leaves_no_sample_near_its_place() -> None:
    n = 50_000
    moved = np.abs(whole(n).astype(np.int64) - np.arange(n)) / n
    assert abs(moved.mean() - 1 / 3) < 0.005  # the mean distance of two uniform places


@pytest.mark.parametrize("n", [0, -1, 2**31])
def test_sizes_that_do_not_fit_are_refused_in_one_line(n: int) -> None:
    with pytest.raises(DataError, match=f"a data set of {n} samples"):
        permute(np.zeros(1, np.uint32), n, 0, 0)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="so few indices cost an accelerator a start each")
def test_a_batch_of_indices_costs_far_less_than_a_sorted_permutation() -> None:
    n, batch, updates = 50_000, 64, 50

    @jax.jit
    def ours(words: jax.Array) -> jax.Array:
        def body(i: jax.Array, total: jax.Array) -> jax.Array:
            places = i.astype(jnp.uint32) * batch + jnp.arange(batch, dtype=jnp.uint32)
            return total + permute(places, n, words, total % 3).sum(dtype=jnp.uint32)

        return jax.lax.fori_loop(0, updates, body, jnp.uint32(0))

    @jax.jit
    def sorting(key: jax.Array) -> jax.Array:
        return jax.random.permutation(key, n)[:batch].sum()

    assert fastest(ours, seed_words(1)) / updates < fastest(sorting, jax.random.key(1)) / 20


def fastest(call, argument) -> float:
    call(argument).block_until_ready()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        call(argument).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
