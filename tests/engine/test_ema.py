"""The average of weights: its formula, its warm-up, and its own type."""

import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine import ema


@pytest.mark.parametrize(("updates", "decay"), [(0, 1 / 10), (1, 2 / 11), (80, 81 / 90), (10_000, 0.99)])
def test_the_decay_grows_to_the_one_that_was_asked_for(updates, decay):
    assert float(ema.decay_at(0.99, jnp.int32(updates))) == pytest.approx(decay, rel=1e-6)


def test_the_average_is_that_of_its_formula_in_float64():
    draws = np.random.default_rng(0).normal(size=(50, 7))
    average, wanted = ema.start({"w": jnp.asarray(draws[0], jnp.float32)}), draws[0]
    for number, values in enumerate(draws[1:]):
        average = ema.move(average, {"w": jnp.asarray(values, jnp.float32)}, ema.decay_at(0.9, number))
        decay = min(0.9, (1 + number) / (10 + number))
        wanted = decay * wanted + (1 - decay) * values
    np.testing.assert_allclose(average["w"], wanted, rtol=1e-5)


def test_averages_of_sixteen_bits_are_float32_and_move_by_less_than_those_have():
    weights = {"w": jnp.full(3, 1.0, jnp.bfloat16)}
    average = ema.start(weights)
    moved = ema.move(average, {"w": jnp.full(3, 1.0078125, jnp.bfloat16)}, jnp.float32(0.999))
    assert average["w"].dtype == moved["w"].dtype == jnp.float32
    np.testing.assert_allclose(moved["w"], 1 + 0.0078125 / 1000, rtol=1e-7)


def test_the_first_average_is_a_copy():
    weights = {"w": jnp.ones(3)}
    assert ema.start(weights)["w"].unsafe_buffer_pointer() != weights["w"].unsafe_buffer_pointer()
