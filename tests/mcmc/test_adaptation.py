"""Warm-up's parts against float64 references written from the papers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.mcmc import adaptation


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def textbook_dual_averaging(first, acceptances, target, gamma, t0=10.0, kappa=0.75):
    """Hoffman & Gelman 2014, algorithm 5."""
    mu, h, log_average, log_step, steps = math.log(10 * first), 0.0, math.log(first), math.log(first), []
    for m, acceptance in enumerate(acceptances, start=1):
        h = (1 - 1 / (m + t0)) * h + (target - acceptance) / (m + t0)
        log_step = mu - math.sqrt(m) / gamma * h
        eta = m**-kappa
        log_average = eta * log_step + (1 - eta) * log_average
        steps.append((log_step, log_average))
    return np.array(steps)


def test_dual_averaging_is_the_papers(float64) -> None:
    acceptances = np.random.default_rng(0).uniform(size=60)
    state, found = adaptation.start_averaging(jnp.asarray(0.3)), []
    update = jax.jit(lambda state, acceptance: adaptation.average_step(state, acceptance, 0.8))
    for acceptance in acceptances:
        state = update(state, jnp.asarray(acceptance))
        found.append((float(state.log_step), float(state.log_average)))
    expected = textbook_dual_averaging(0.3, acceptances, 0.8, adaptation.GAMMA)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("warmup", "start", "ends"),
    [
        (1000, 75, [100, 150, 250, 450, 950]),
        (500, 75, [100, 150, 250, 450]),
        (150, 75, [100]),
        (100, 15, [90]),
        (20, 3, [18]),
        (19, 19, []),
        (0, 0, []),
    ],
)
def test_windows_are_stans(warmup, start, ends) -> None:
    plan = adaptation.schedule(warmup)
    assert plan.start == start and len(plan.collects) == warmup
    assert (np.flatnonzero(plan.ends) + 1).tolist() == ends
    collected = np.flatnonzero(plan.collects)
    assert collected.tolist() == (list(range(start, ends[-1])) if ends else [])


@pytest.mark.parametrize("chains", [1, 3, 64])
def test_running_moments_are_those_of_all_positions_at_once(float64, chains) -> None:
    positions = np.random.default_rng(1).normal(1e3, [1, 10, 0.1], size=(40, chains, 3))
    moments = adaptation.no_moments(jnp.zeros(3))
    for one in positions:
        moments = adaptation.add_positions(moments, jnp.asarray(one))
    pooled, seen = positions.reshape(-1, 3), 40 * chains
    np.testing.assert_allclose(moments.mean, pooled.mean(0), rtol=1e-12)
    variance = (seen * pooled.var(0, ddof=1) + 5 * 1e-3) / (seen + 5)
    np.testing.assert_allclose(np.square(adaptation.scale_of(moments)), variance, rtol=1e-8)


@pytest.mark.parametrize(("chains", "iterations", "tolerance"), [(1, 3000, 0.1), (200, 300, 0.05)])
def test_the_slowest_direction_is_found_in_units_of_the_scale(chains, iterations, tolerance) -> None:
    """Independent draws whose covariance, once scales are divided out, is known."""
    draw = np.random.default_rng(2)
    turned, _ = np.linalg.qr(draw.normal(size=(6, 6)))
    scale = np.array([1, 100, 0.01, 5, 1, 2.0])
    roots = np.array([3, 1, 0.7, 0.5, 0.4, 0.3])
    rows = (draw.normal(size=(iterations, chains, 6)) * roots) @ turned.T * scale + 50
    slowest = adaptation.guess_slowest(jnp.float32(rows[0]))
    follow = jax.jit(adaptation.follow_slowest)
    for one in rows:
        slowest = follow(slowest, jnp.float32(one), jnp.float32(scale))
    assert abs(float(slowest.direction @ turned[:, 0])) > 0.99
    assert float(slowest.variance) == pytest.approx(9, rel=tolerance)
    assert float(adaptation.trajectory_of(slowest)) == pytest.approx(adaptation.TURN * 3, rel=tolerance)


def test_another_scale_keeps_the_direction_in_space(float64) -> None:
    old, new = np.array([1.0, 2.0, 3.0]), np.array([2.0, 1.0, 0.5])
    direction = np.array([2.0, -1.0, 2.0]) / 3
    state = adaptation.Slowest(jnp.zeros(3), jnp.asarray(direction), jnp.asarray(4.0), jnp.asarray(10.0))
    found = adaptation.rescale_slowest(state, jnp.asarray(old), jnp.asarray(new))
    covariance = 4 * np.outer(direction * old, direction * old) / np.outer(new, new)
    values, vectors = np.linalg.eigh(covariance)
    assert float(found.variance) == pytest.approx(values[-1])
    assert abs(float(found.direction @ vectors[:, -1])) == pytest.approx(1)
    assert float(found.worth) == pytest.approx(10 * adaptation.REMEMBERED)


def test_the_length_of_a_trajectory_is_where_a_leapfrog_does_most() -> None:
    lengths = np.linspace(0.5, 1.57, 100001)
    best = lengths[np.argmax(np.sin(lengths) ** 2 / lengths)]
    assert best == pytest.approx(adaptation.TURN, abs=1e-4)
