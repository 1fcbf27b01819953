"""R-hat and effective sample sizes against arviz: golden numbers always, arviz itself where it is installed."""

import numpy as np
import pytest

from hotloop import hmc
from hotloop.errors import OptionError


def autoregression(chains: int, draws: int, correlation: float, apart: float = 0.0) -> np.ndarray:
    """Chains x' = c x + sqrt(1 - c^2) e whose means are `apart`."""
    noise = np.random.default_rng(0).normal(size=(chains, draws))
    found = noise.copy()
    for t in range(1, draws):
        found[:, t] = correlation * found[:, t - 1] + np.sqrt(1 - correlation**2) * noise[:, t]
    return found + apart * np.arange(chains)[:, None]


# (chains, draws, correlation, distance of means), rounded to whole numbers?, R-hat, bulk, tail; by arviz-stats 0.8.0,
# R-hat of one chain by its halves, where arviz has none.
GOLDEN = [
    ((4, 100, 0.5), False, 1.0063121660521654, 147.92649858100677, 260.2282680645355),
    ((4, 100, 0.5), True, 1.0099072611266466, 154.93404530776502, 162.5746516257463),
    ((1, 301, 0.9), False, 1.1799991790959177, 6.271977952704843, 46.78133267841795),
    ((8, 50, -0.6), False, 0.9890083000266061, 1040.823996531185, 484.7703246169251),
    ((4, 200, 0.3, 0.5), False, 1.160273577598589, 20.403103112999087, 453.1126555765056),
    ((2, 4, 0.0), False, 1.3187996416209968, 7.224719895935548, 7.224719895935548),
    ((3, 7, 0.2), True, 1.19345970620149, 22.594905091859506, 18.0),
]


@pytest.mark.parametrize(("made", "whole", "r_hat", "bulk", "tail"), GOLDEN)
def test_golden_numbers(made, whole, r_hat, bulk, tail) -> None:
    draws = autoregression(*made)
    draws = np.round(draws) if whole else draws
    assert hmc.r_hat(draws) == pytest.approx(r_hat, rel=1e-10)
    assert hmc.ess_bulk(draws) == pytest.approx(bulk, rel=1e-10)
    assert hmc.ess_tail(draws) == pytest.approx(tail, rel=1e-10)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_as_arviz(seed) -> None:
    stats = pytest.importorskip("arviz_stats.base").array_stats
    draw = np.random.default_rng(seed)
    chains, length = draw.integers(2, 7), draw.integers(4, 300)
    draws = autoregression(chains, length, draw.uniform(-0.9, 0.99), draw.exponential(0.2))
    axes = {"chain_axis": 0, "draw_axis": 1}
    assert hmc.r_hat(draws) == pytest.approx(stats.rhat(draws, **axes), rel=1e-10)
    assert hmc.ess_bulk(draws) == pytest.approx(stats.ess(draws, method="bulk", **axes), rel=1e-10)
    tail = stats.ess(draws, method="tail", prob=(0.05, 0.95), **axes)
    assert hmc.ess_tail(draws) == pytest.approx(tail, rel=1e-10)


def test_monotone_transforms_change_no_bulk_and_no_tail() -> None:
    draws = autoregression(4, 100, 0.5)
    assert hmc.ess_bulk(np.exp(3 * draws)) == hmc.ess_bulk(draws)
    assert hmc.ess_tail(np.exp(3 * draws)) == hmc.ess_tail(draws)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_the_bulk_of_an_autoregression_is_what_theory_says(correlation) -> None:
    draws = autoregression(200, 1000, correlation)
    expected = draws.size * (1 - correlation) / (1 + correlation)
    assert hmc.ess_bulk(draws) == pytest.approx(expected, rel=0.05)


def test_what_cannot_be_judged_is_nan_and_what_never_moves_has_no_r_hat() -> None:
    for bad in (np.zeros((4, 3)), np.full((4, 100), np.nan), np.array([[1.0, 2, np.inf, 3]])):
        assert all(np.isnan(estimate(bad)) for estimate in (hmc.r_hat, hmc.ess_bulk, hmc.ess_tail))
    assert np.isnan(hmc.r_hat(np.ones((4, 100)))) and hmc.ess_bulk(np.ones((4, 100))) == 400


@pytest.mark.parametrize("shape", [(10,), (2, 50, 3)])
def test_draws_of_another_form_are_refused_in_one_line(shape) -> None:
    for estimate in (hmc.r_hat, hmc.ess_bulk, hmc.ess_tail):
        with pytest.raises(OptionError, match=r"draws have shape \[.*\]: \[chains, draws\] of one number"):
            estimate(np.zeros(shape))


def test_a_chain_that_stays_elsewhere_is_seen() -> None:
    draws = autoregression(4, 500, 0.3)
    assert hmc.r_hat(draws) < 1.01
    draws[0] += 3
    assert hmc.r_hat(draws) > 1.1 and hmc.ess_bulk(draws) < 20
    wide = autoregression(4, 500, 0.3)
    wide[0] *= 5  # equal means, another spread: only the folded draws show it
    assert hmc.r_hat(wide) > 1.1
