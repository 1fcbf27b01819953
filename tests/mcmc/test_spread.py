"""Chains over several devices draw what they draw on one, to rounding."""

import re
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop import hmc
from hotloop.engine.interrupt import Interrupted
from hotloop.errors import DeviceError, OptionError
from hotloop.mcmc import saved_chains

KEY = jax.random.key(3)
PRECISION = jnp.array([[2.0, 0.5], [0.5, 1.0]])
START = {"a": jnp.zeros(()), "b": jnp.ones(2)}
FIXED: dict[str, Any] = {"warmup": 0, "step_size": 0.3, "leapfrogs": 4, "samples": 30}
several = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


def density(p: Any) -> Any:
    return -0.5 * p["b"] @ PRECISION @ p["b"] - 0.5 * (p["a"] - 3) ** 2 / 4


def sampler(devices: int, **options: Any) -> hmc.Sampler:
    return hmc.Sampler(density, START, chains=64, quiet=True, devices=devices, **options)


def assert_same_to_rounding(found: hmc.Result, expected: hmc.Result) -> None:
    """A position of 10 has units in the last place of 1e-6, and a device's shorter loops end in other instructions."""
    for a, b in zip(jax.tree.leaves(found.samples), jax.tree.leaves(expected.samples), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@several
@pytest.mark.parametrize("devices", [2, 4])
def test_without_adaptation_any_number_of_devices_draws_the_same(devices) -> None:
    one, spread = (sampler(each, **FIXED).run(KEY) for each in (1, devices))
    assert_same_to_rounding(spread, one)
    for name in ("leapfrogs", "mass", "step_size"):
        jax.tree.map(np.testing.assert_array_equal, getattr(one, name), getattr(spread, name))
    for leaf in jax.tree.leaves((spread.samples, spread.log_density)):
        assert leaf.sharding.num_devices == devices
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {64 // devices}
    assert next(iter(one.log_density.devices())) == jax.devices()[0] and len(one.log_density.devices()) == 1


@several
def test_with_adaptation_devices_differ_by_the_rounding_of_its_sums() -> None:
    """Each sum over 64 chains is rounded some dozen times, in another order; what is learnt is a mean of such sums, and
    moves no position by more than its share: 1e-4 is 800 units in the last place of the largest position, about 10."""
    one, four = (sampler(each, warmup=60, samples=40).run(KEY) for each in (1, 4))
    assert four.step_size == pytest.approx(one.step_size, rel=1e-5)
    assert four.trajectory == pytest.approx(one.trajectory, rel=1e-5)
    np.testing.assert_array_equal(one.leapfrogs, four.leapfrogs)
    for name in ("a", "b"):
        np.testing.assert_allclose(four.samples[name], one.samples[name], rtol=0, atol=1e-4)
    draws = np.asarray(four.samples["a"], float)
    for values, expected in ((draws, 3), ((draws - 3) ** 2, 4)):
        assert abs(values.mean() - expected) < 4.5 * values.std() / np.sqrt(hmc.ess_bulk(values))


@several
def test_draws_need_no_word_between_devices_and_warm_up_does() -> None:
    crossing = re.compile(r" (all|collective|reduce-scatter)[\w-]*\(")
    assert not crossing.search(sampler(4, **FIXED)._draw.as_text())
    assert crossing.search(sampler(4, warmup=60, samples=40)._warm.as_text())


def stop_after_first_piece(sampler: hmc.Sampler, folder: Path, monkeypatch) -> None:
    real = saved_chains.SavedChains.after_piece

    def stop(self: Any, *given: Any) -> None:
        self.request.number = signal.SIGTERM
        real(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(saved_chains.SavedChains, "after_piece", stop)
        with pytest.raises(Interrupted, match="after iteration 16 of "):
            sampler.run(KEY, folder=folder)


@several
def test_stopped_on_one_device_it_goes_on_on_four(tmp_path, monkeypatch, capfd) -> None:
    one, four = sampler(1, **FIXED), sampler(4, **FIXED)
    stop_after_first_piece(one, tmp_path / "run", monkeypatch)
    assert_same_to_rounding(four.run(KEY, folder=tmp_path / "run", resume=True), one.run(KEY))
    assert "warning: resumed with another config: devices: 1 -> 4" in capfd.readouterr().err


@several
@pytest.mark.parametrize("options", [FIXED, {"warmup": 25, "samples": 10}], ids=["draws", "warm-up"])
def test_stopped_on_four_devices_and_resumed_there_it_ends_with_the_same_bits(
    options, tmp_path, monkeypatch
) -> None:
    four = sampler(4, **options)
    stop_after_first_piece(four, tmp_path / "run", monkeypatch)
    found = four.run(KEY, folder=tmp_path / "run", resume=True)
    jax.tree.map(np.testing.assert_array_equal, found.samples, four.run(KEY).samples)


ROWS, SIZE = 20_000, 5


def logistic_and_its_mode() -> tuple[Any, np.ndarray]:
    """A logistic regression of large inputs, and where it is largest, to the last bit of a float32."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(scale=30, size=(ROWS, SIZE)).astype(np.float32)
    truth = draw.normal(scale=0.03, size=SIZE)
    labels = (draw.random(ROWS) < 1 / (1 + np.exp(-inputs @ truth))).astype(np.float32)
    exact, mode = inputs.astype(np.float64), np.zeros(SIZE)
    for _ in range(20):
        likely = 1 / (1 + np.exp(-exact @ mode))
        curvature = exact.T @ (exact * (likely * (1 - likely))[:, None]) + np.eye(SIZE)
        mode += np.linalg.solve(curvature, exact.T @ (labels - likely) - mode)

    def log_density(weights: Any) -> Any:
        logits = jnp.asarray(inputs) @ weights
        return (jnp.asarray(labels) * logits - jax.nn.softplus(logits)).sum() - 0.5 * (weights**2).sum()

    return log_density, mode.astype(np.float32)


@several
@pytest.mark.parametrize(
    "options",
    [
        {"warmup": 40, "samples": 10, "max_leapfrogs": 4},
        {"warmup": 0, "samples": 20, "step_size": 1e-4, "leapfrogs": 2},
        {"warmup": 0, "samples": 20, "step_size": 1e-2, "leapfrogs": 2, "jitter": 0.0},
    ],
    ids=["warm-up", "draws", "none has moved"],
)
def test_from_a_mode_it_goes_on_on_four_devices(options, tmp_path, monkeypatch) -> None:
    """There the gradient is rounding alone, and four devices round otherwise."""
    log_density, mode = logistic_and_its_mode()
    one, four = (
        hmc.Sampler(log_density, mode, chains=4, devices=devices, quiet=True, **options) for devices in (1, 4)
    )
    stop_after_first_piece(one, tmp_path / "run", monkeypatch)
    found = four.run(KEY, folder=tmp_path / "run", resume=True)
    stays = options.get("step_size") == 1e-2
    assert np.isfinite(found.samples).all() and (np.asarray(found.samples) == mode).all() == stays


@several
@pytest.mark.parametrize("devices", [1, 2])
def test_draws_that_lie_elsewhere_are_positions_to_begin_with(devices) -> None:
    drawn = sampler(4, **FIXED).run(KEY)
    last = jax.tree.map(lambda leaf: leaf[:, -1], drawn.samples)
    here = jax.tree.map(np.asarray, last)
    found, expected = (
        hmc.sample(density, start, key=KEY, devices=devices, quiet=True, **FIXED) for start in (last, here)
    )
    for a, b in zip(jax.tree.leaves(found.samples), jax.tree.leaves(expected.samples), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.num_devices == devices


@several
def test_positions_and_keys_of_another_device_draw_the_same() -> None:
    other = jax.devices()[1]
    for initial in (START, lambda key: {"a": jax.random.normal(key), "b": jnp.ones(2)}):
        one = hmc.Sampler(density, initial, chains=4, quiet=True, **FIXED)
        expected = one.run(KEY)
        assert {leaf.committed for leaf in jax.tree.leaves(expected.samples)} == {False}
        there = initial if callable(initial) else jax.device_put(initial, other)
        found = hmc.sample(density, there, key=jax.device_put(KEY, other), chains=4, quiet=True, **FIXED)
        jax.tree.map(np.testing.assert_array_equal, found.samples, expected.samples)
        assert found.log_density.devices() == expected.log_density.devices() != {other}


def test_devices_that_do_not_fit_are_one_line() -> None:
    with pytest.raises(DeviceError, match=r"^devices is 99: here are \d+ of \w+; use at most that$"):
        hmc.Sampler(density, START, chains=99, devices=99, **FIXED)
    with pytest.raises(OptionError, match=r"^devices is 0: an integer of at least 1"):
        sampler(0, **FIXED)


@several
def test_chains_that_do_not_divide_are_one_line() -> None:
    for chains, near in ((6, 8), (1, 4), (9, 8)):
        with pytest.raises(OptionError, match=f"^chains is {chains} and devices is 4: .* give {near} chains"):
            hmc.Sampler(density, START, chains=chains, devices=4, **FIXED)
