"""The HMC benchmark: its exact oracle, its degenerate cases, its state from call to call."""

import math

import jax
import numpy as np
import pytest

from hotloop.cli.command import Context
from hotloop.engine.measure import Ceilings
from hotloop.errors import WrongResult
from hotloop.families.kernels import hmc, timing
from hotloop.families.kernels.config import Hmc
from hotloop.families.kernels.model import exact_products


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    known = Ceilings("test", {"float32": 0.1}, "float32", 10.0, "", "")
    monkeypatch.setattr(timing, "ceilings", lambda device: known)


def run(capsys=None, **options):
    result = hmc.run(Hmc(**options), jax.devices()[0], Context())
    return (result, capsys.readouterr().out) if capsys else result


def test_the_default_shows_the_exact_acceptance_and_moments(capsys):
    result, said = run(capsys, steps=40)
    assert hmc.toy_acceptance(1.0, 5) == pytest.approx(4 / math.pi * math.atan(1 / math.sqrt(2)))
    assert result["acceptance"] == pytest.approx(0.7837, abs=4 * result["acceptance_error"])
    assert result["acceptance_error"] < 1e-3
    found = result["statistics"]
    assert abs(found["mean"]["value"] + 0.5) < 4 * found["mean"]["error"] < 0.01
    assert abs(found["variance"]["value"] - 0.5) < 4 * found["variance"]["error"] < 0.01
    assert result["verdict"] == "agrees"
    assert said.count("hmc steps/sec") == 41
    assert "mean time of an HMC step" in said and "all within four standard errors" in said
    assert result["items_per_second"] == pytest.approx(10000 / result["seconds_per_step"])
    assert result["checked"]["errors"]["position"] < 1e-5


def test_a_wrong_gradient_is_refused(monkeypatch):
    true = hmc.toy(Hmc())
    wrong = lambda data, x: true.log_density(data, x * 1.001)  # noqa: E731
    monkeypatch.setattr(hmc, "toy", lambda _: hmc.Target(true.start, (), wrong, true.reference, true.cost))
    with pytest.raises(WrongResult, match="HMC: wrong result, not timed: the position"):
        run(steps=1, hmc_steps=10)


def test_two_leapfrogs_flip_between_one_and_minus_two(capsys):
    result, said = run(capsys, steps=1, hmc_steps=40, leapfrog_steps=2)
    assert result["verdict"] == "periodic" and "cannot mix" in said
    assert result["acceptance"] == pytest.approx(1, abs=1e-4)
    assert result["statistics"]["mean"]["value"] == pytest.approx(-0.5, abs=1e-3)
    assert result["statistics"]["variance"]["value"] == pytest.approx(2.25, abs=1e-2)


def judged(mean=-0.5, error=0.01, **options):
    found = {
        "acceptance": hmc.MeanWithError(hmc.toy_acceptance(0.9, 3), error),
        "mean": hmc.MeanWithError(mean, error),
        "variance": hmc.MeanWithError(0.5, error),
    }
    return hmc.judge(Hmc(**{"step_size": 0.9, "leapfrog_steps": 3} | options), found, Context())


def test_the_verdict_is_drawn_at_four_standard_errors(capsys):
    assert judged(mean=-0.461) == "agrees"
    assert judged(mean=-0.459) == "disagrees"
    assert "more than four standard errors" in capsys.readouterr().err


def test_the_verdict_names_what_cannot_be_judged():
    assert judged(error=math.nan) == "unknown"
    assert judged(step_size=1.0, leapfrog_steps=4) == "periodic"
    assert judged(step_size=1.5) == "unstable"


@pytest.mark.slow
def test_many_chains_agree_too_and_count_as_chain_steps():
    result = run(steps=2, hmc_steps=1010, chains=200, step_size=0.9, leapfrog_steps=2)
    assert result["verdict"] == "agrees"
    assert result["chain_steps_per_second"] == pytest.approx(200 * result["items_per_second"])


def chain(**options):
    config = Hmc(**options)
    return hmc.prepare(config, hmc.toy(config), "cpu")


def test_two_calls_are_one_call_of_twice_the_steps():
    halves, whole = chain(hmc_steps=100), chain(hmc_steps=200)
    first, second = halves.step(), halves.step()
    np.testing.assert_allclose([*first.first, *second.first], whole.step().first, rtol=1e-6)
    np.testing.assert_allclose(halves.state.position, whole.state.position, rtol=1e-6)
    assert int(halves.block) == int(whole.block) == 4


@pytest.mark.slow
def test_steps_that_fill_no_block_run_too_and_unrolling_changes_nothing(monkeypatch):
    plain = chain(hmc_steps=50)
    monkeypatch.setitem(hmc.UNROLL, ("toy", "cpu"), 3)
    longer = chain(hmc_steps=57)
    for a, b in zip(plain.step(), longer.step(), strict=True):
        assert len(a) == len(b) == 1
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert (int(plain.block), int(longer.block)) == (1, 2)
    assert float(plain.state.position[0, 0]) != float(longer.state.position[0, 0])


@pytest.mark.slow
def test_the_decoder_target_samples_and_is_checked(capsys):
    result, said = run(capsys, target="vcd", chains=4, steps=2, hmc_steps=4, leapfrog_steps=1)
    assert "Target vcd, chains 4, leapfrog steps 1, step size 0.05" in said
    assert 0 < result["acceptance"] <= 1
    assert result["checked"]["errors"]["energy"] < 1e-5
    assert "verdict" not in result


def test_the_decoder_reference_gradient_is_that_of_its_density():
    target = hmc.vcd(Hmc(target="vcd", chains=2))
    data = jax.tree.map(np.float64, target.data)
    z = np.float64(target.start)
    value, gradient = target.reference(data, z)
    for axis in (0, 7):
        nudge = np.zeros_like(z)
        nudge[:, axis] = 1e-6
        slope = (target.reference(data, z + nudge)[0] - target.reference(data, z - nudge)[0]) / 2e-6
        np.testing.assert_allclose(slope, gradient[:, axis], rtol=1e-5)
    with exact_products(jax.default_backend()):
        found = target.log_density(target.data, target.start)
    np.testing.assert_allclose(found, value, rtol=1e-5)


@pytest.mark.parametrize(("size", "steps", "expected"), [(1.0, 1, 0.7837), (1.0, 5, 0.7837), (1.0, 2, 1.0)])
def test_exact_acceptance_of_the_toy(size, steps, expected):
    assert hmc.toy_acceptance(size, steps) == pytest.approx(expected, abs=5e-5)


def test_block_means_of_a_correlated_chain_give_its_true_error():
    """An autoregressive chain of correlation r: the error of its mean is sqrt((1 + r) / (1 - r) / n)."""
    generator = np.random.default_rng(0)
    r, length, blocks, chains = 0.6, 500, 400, 8
    x = np.zeros((blocks * length, chains))
    noise = generator.normal(0, math.sqrt(1 - r**2), x.shape)
    for t in range(1, len(x)):
        x[t] = r * x[t - 1] + noise[t]
    means = x.reshape(blocks, length, chains).mean(1)
    errors = [hmc.mean_of_blocks(means[:, chain]).error for chain in range(chains)]
    assert np.mean(errors) == pytest.approx(math.sqrt((1 + r) / (1 - r) / len(x)), rel=0.05)
    assert math.isnan(hmc.mean_of_blocks(means[:5, 0]).error)


def test_the_error_of_a_variance_is_that_of_repeated_estimates():
    generator = np.random.default_rng(1)
    samples = generator.normal(3, 1.5, (300, 40, 50))
    estimates = [hmc.variance_of_blocks(each.mean(1), (each**2).mean(1)) for each in samples]
    values = np.array([each.value for each in estimates])
    assert values.mean() == pytest.approx(2.25, rel=0.01)
    assert np.mean([each.error for each in estimates]) == pytest.approx(values.std(), rel=0.1)
