"""Stochastic rounding against a table of every finite half-precision number."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.engine.precision import random_bits, stochastic_round

HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
PATTERNS = np.arange(2**16, dtype=np.uint16)
halves = pytest.mark.parametrize("half", HALVES)
KEY = jax.random.key(20)


def widened(half: str, dtype: type) -> np.ndarray:
    """Every number of the half type, NaN and infinities among them, in a wider type."""
    with np.errstate(invalid="ignore"):
        return PATTERNS.view(HALVES[half]).astype(dtype)


def finite_values(half: str) -> np.ndarray:
    values = widened(half, np.float64)
    return np.unique(values[np.isfinite(values)])


TABLES = {half: finite_values(half) for half in HALVES}
rounder = jax.jit(stochastic_round, static_argnums=(1, 3))


def roundings(value: float, half: str, count: int, key=KEY) -> np.ndarray:
    x = jnp.full((count,), value, jnp.float32)
    return np.asarray(rounder(x, half, key, 0)).astype(np.float64)


@halves
@pytest.mark.parametrize(
    "value",
    [1.001, -1.001, 0.1, -3.14159, 1e-3, 6.1e-5, 6.0e-5, -1e-5, 6e-8, 3e-8, -1e-8, 1e-9, 1999.7, 65000.3],
)
def test_the_mean_of_many_roundings_is_the_value(half, value):
    value = float(np.float32(value))
    count = 1 << 20
    rounded = roundings(value, half, count)
    above = np.searchsorted(TABLES[half], value, side="right")
    low, high = TABLES[half][above - 1], TABLES[half][above]
    assert set(np.unique(rounded)) <= {low, high}
    chance = (value - low) / (high - low)
    standard_error = (high - low) * np.sqrt(chance * (1 - chance) / count)
    assert abs(rounded.mean() - value) <= 4 * standard_error


@pytest.mark.parametrize(
    ("half", "value"), [("bfloat16", 1e-39), ("float16", 2.0**-30), ("float16", 2.0**-36)]
)
def test_float32_subnormals_and_numbers_below_the_smallest_half_are_unbiased_too(half, value):
    unit = TABLES[half][TABLES[half] > 0][0]
    value = float(np.float32(value))
    counted = roundings(value, half, 1 << 20) / unit
    low = np.floor(value / unit)
    chance = value / unit - low
    assert set(np.unique(counted)) == {low, low + 1}
    assert abs(counted.mean() - value / unit) <= 4 * np.sqrt(chance * (1 - chance) / (1 << 20))


@halves
def test_every_half_precision_number_stays_as_it_is(half):
    values = widened(half, np.float32)
    ordinary = ~np.isnan(values)
    for seed in range(3):
        rounded = np.asarray(rounder(jnp.asarray(values), half, jax.random.key(seed), 0))
        np.testing.assert_array_equal(rounded.view(np.uint16)[ordinary], PATTERNS[ordinary])
        assert np.isnan(rounded[~ordinary]).all()


@halves
def test_a_nan_whose_payload_is_cut_off_stays_a_nan(half):
    nan = np.array([0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF], np.uint32).view(np.float32)
    assert jnp.isnan(rounder(jnp.asarray(nan), half, KEY, 0)).all()


@halves
def test_infinities_pass_and_finite_numbers_saturate(half):
    largest = TABLES[half][-1]
    x = jnp.array([jnp.inf, -jnp.inf, 3.4028235e38, -3.4028235e38], jnp.float32)
    rounded = np.asarray(rounder(jnp.tile(x, (1000, 1)), half, KEY, 0)).astype(np.float64)
    np.testing.assert_array_equal(rounded, np.tile([np.inf, -np.inf, largest, -largest], (1000, 1)))


def test_numbers_far_below_the_smallest_float16_go_to_zero():
    assert (roundings(1e-39, "float16", 1 << 20) == 0).all()


def test_float16_overflow_stays_at_the_largest_number():
    for value in (65504.5, 65519.9, 65520.0, 1e6):
        assert set(roundings(value, "float16", 1000)) == {65504.0}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(HALVES)),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(0, 2**31 - 1),
)
def test_the_result_is_a_neighbour_of_the_value(half, value, seed):
    table = TABLES[half]
    result = float(roundings(value, half, 1, jax.random.key(seed))[0])
    inside = min(max(value, table[0]), table[-1])
    assert result in (
        table[np.searchsorted(table, inside)],
        table[np.searchsorted(table, inside, "right") - 1],
    )
    assert np.signbit(result) == np.signbit(value)


@halves
def test_the_same_key_and_leaf_round_the_same_way_and_others_do_not(half):
    x = jax.random.normal(jax.random.key(1), (64, 33))
    first = rounder(x, half, KEY, 0)
    assert (first == stochastic_round(x, half, KEY)).all()
    assert (first != rounder(x, half, KEY, 1)).mean() > 0.2
    assert (first != rounder(x, half, jax.random.fold_in(KEY, 1), 0)).mean() > 0.2


def streams() -> list[np.ndarray]:
    """Bits of four leaves under each of thirty successive keys, as numbers around 0 of variance 1."""
    bits = jax.jit(lambda key, leaf: random_bits((1 << 15,), key, leaf), static_argnums=1)
    keys = [jax.random.fold_in(KEY, update) for update in range(30)]
    return [(np.asarray(bits(key, leaf)) / 2**32 - 0.5) * np.sqrt(12) for key in keys for leaf in range(4)]


def test_bits_are_even_and_unrelated_between_updates_leaves_and_places():
    numbers = np.stack(streams())
    count, size = numbers.shape
    correlation = (numbers @ numbers.T / np.sqrt(size))[np.triu_indices(count, 1)]
    neighbours = (numbers[:, 1:] * numbers[:, :-1]).sum(1) / np.sqrt(size)
    for scores in (correlation, neighbours, numbers.sum(1) / np.sqrt(size)):
        assert np.abs(scores).max() < 5
        assert abs(scores.std() - 1) < 4 / np.sqrt(2 * len(scores))
    assert len(np.unique(numbers[0])) == size


def test_no_update_sees_another_ones_bits_shifted():
    keys = jnp.stack([jnp.zeros(1 << 17, jnp.uint32), jnp.arange(1 << 17, dtype=jnp.uint32)], axis=1)
    bits = np.asarray(jax.jit(jax.vmap(lambda key: random_bits((8,), key)))(keys))
    order = np.argsort(bits, axis=None)
    owners, values = order // 8, bits.ravel()[order]
    twins = np.flatnonzero(values[1:] == values[:-1])
    pairs = np.sort(np.stack([owners[twins], owners[twins + 1]], axis=1), axis=1)
    # Single values meet by chance, about 128 times here; a shifted stream would meet again and again.
    assert 50 < len(pairs) < 250
    assert len(np.unique(pairs, axis=0)) == len(pairs)


def test_bits_depend_on_the_place_in_the_array_and_not_on_how_it_is_shaped():
    flat = random_bits((24,), KEY, 3)
    assert (random_bits((2, 3, 4), KEY, 3).reshape(-1) == flat).all()
    assert random_bits((), KEY, 3) == flat[0]


@halves
def test_a_sharded_array_rounds_like_a_whole_one(half):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one device")
    x = jax.random.normal(jax.random.key(2), (len(devices) * 4, 6))
    mesh = jax.make_mesh((len(devices),), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("replica")))
    assert (np.asarray(rounder(spread, half, KEY, 0)) == np.asarray(rounder(x, half, KEY, 0))).all()


def test_raw_keys_are_as_good_as_typed_ones():
    x = jax.random.normal(jax.random.key(1), (100,))
    raw = jax.random.key_data(KEY)
    assert (stochastic_round(x, jnp.bfloat16, raw) == stochastic_round(x, jnp.bfloat16, KEY)).all()


def test_other_types_are_a_plain_cast():
    x = jnp.array([1.1, 2.7])
    assert (stochastic_round(x, jnp.float32, KEY) == x).all()
    half = x.astype(jnp.bfloat16)
    assert (stochastic_round(half, jnp.bfloat16, KEY) == half).all()
    assert stochastic_round(jnp.arange(3), jnp.int32, KEY).dtype == jnp.int32
