"""Loss scaling: scaled and unscaled runs agree, small gradients survive, overflow is skipped and mended."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from hotloop.engine.precision import AutoScale, Policy, ScaleState, init_trained, parse, update_weights
from hotloop.errors import OptionError

KEY = jax.random.key(3)
INPUTS = jax.random.normal(KEY, (32, 4))
TARGETS = INPUTS @ jnp.array([1.0, -2.0, 0.5, 3.0])


def train(policy: Policy, scale, *, updates: int = 200, size: float = 1.0, rate: float = 0.1):
    """Least squares with a loss `size` times as large, in one compiled call; parameters, scale states."""
    settings = {"policy": policy, "optimiser": optax.sgd(rate / size), "scale": scale}

    def loss(params, carry, samples, keys):
        x, y = samples
        predicted = (policy.to_compute(x) @ params).astype(jnp.float32)
        return size * 0.5 * jnp.mean((predicted - y) ** 2), (carry, {})

    def update(trained, n):
        key = jax.random.fold_in(KEY, n)
        trained, _ = update_weights(
            loss, trained, (INPUTS, TARGETS), key, key, mesh=None, accumulation=1, **settings
        )
        return trained, (trained.params, trained.scale)

    start = init_trained(**settings, params=jnp.zeros(4))
    trained, history = jax.jit(lambda start: lax.scan(update, start, jnp.arange(updates)))(start)
    return trained.params, history


def error(params) -> float:
    return float(jnp.abs(params.astype(jnp.float32) - jnp.array([1.0, -2.0, 0.5, 3.0])).max())


@pytest.mark.parametrize("mode", ["32.32", "16.32", "16.16"])
@pytest.mark.parametrize("scaling", [2.0**10, AutoScale(initial=2.0**6, patience=50)])
def test_scaled_and_unscaled_runs_agree_bit_for_bit(mode, scaling):
    policy = parse(mode)
    plain, _ = train(policy, 1.0)
    scaled, _ = train(policy, scaling)
    np.testing.assert_array_equal(np.asarray(scaled), np.asarray(plain))
    assert error(plain) < 0.05


def test_a_factor_that_is_no_power_of_two_agrees_to_rounding():
    plain, _ = train(parse("32.32"), 1.0)
    scaled, _ = train(parse("32.32"), 1000.0)
    np.testing.assert_allclose(scaled, plain, rtol=1e-5)


@pytest.mark.parametrize("scaling", [2.0**16, AutoScale(patience=20)])
def test_gradients_too_small_for_float16_survive_when_scaled(scaling):
    policy = parse("16.32", "float16")
    lost, _ = train(policy, 1.0, size=1e-8)
    assert (lost == 0).all()
    found, _ = train(policy, scaling, size=1e-8)
    assert error(found) < 0.01


def test_overflow_is_skipped_and_recovered_from():
    params, (path, scales) = train(parse("16.32", "float16"), AutoScale(initial=2.0**24), updates=300)
    skipped = int(scales.skipped[-1])
    assert 1 <= skipped < 30
    assert (path[: int(scales.skipped[0])] == 0).all()
    assert float(scales.scale[-1]) < 2.0**24
    assert error(params) < 0.01
    assert jnp.isfinite(path).all()


def test_a_static_factor_hides_no_overflow():
    params, _ = train(parse("16.32", "float16"), 2.0**24, updates=5)
    assert not jnp.isfinite(params).all()


def judged(scaling, finite: list[bool]) -> list[ScaleState]:
    states = [init_trained(parse("32.32"), optax.sgd(1.0), scaling, {}).scale]
    for good in finite:
        usable, state = scaling.judge(states[-1], {"w": jnp.array([1.0, 2.0 if good else jnp.inf])})
        assert bool(usable) == good
        states.append(state)
    return states


def test_the_automatic_factor_doubles_after_a_row_of_good_updates_and_halves_on_overflow():
    states = judged(AutoScale(initial=8.0, patience=3), [True, True, True, True, False, True, True, False])
    assert [float(state.scale) for state in states] == [8, 8, 8, 16, 16, 8, 8, 8, 4]
    assert [int(state.good) for state in states] == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    assert int(states[-1].skipped) == 2


def test_the_automatic_factor_stays_between_its_limits():
    scaling = AutoScale(initial=4.0, patience=1, least=2.0, most=8.0)
    assert [float(state.scale) for state in judged(scaling, [True, True, True])] == [4, 8, 8, 8]
    assert [float(state.scale) for state in judged(scaling, [False, False, False])] == [4, 2, 2, 2]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_one_bad_element_anywhere_makes_an_update_useless(bad, kind):
    state = ScaleState(jnp.float32(8), jnp.int32(0), jnp.int32(0))
    good = {"a": jnp.ones((2, 3), kind), "b": [jnp.zeros(4, kind)]}
    assert AutoScale().judge(state, good)[0]
    assert not AutoScale().judge(state, {"a": good["a"], "b": [good["b"][0].at[3].set(bad)]})[0]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_that_cannot_work_is_an_error(factor):
    for scale in (factor, AutoScale(initial=factor)):
        with pytest.raises(OptionError, match="scale="):
            init_trained(parse("32.32"), optax.sgd(1.0), scale, {})
