"""Importance sampling and its proposals against exact answers: linear-Gaussian evidence, plain numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.families.vcd import likelihood, networks
from hotloop.families.vcd.likelihood import BLOCK, Proposal
from hotloop.mcmc import hmc

KEY = jax.random.key(7)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


# A linear-Gaussian joint: z ~ N(0, I), x = z W + noise. Its posterior and its evidence are known.
W = np.random.default_rng(0).normal(size=(2, 5))
NOISE = 0.3
POSTERIOR = np.linalg.inv(np.eye(2) + W @ W.T / NOISE)


def linear_joint(x, z, xp=jnp):
    misfit = xp.square(x[:, None] - z @ W).sum(-1) / NOISE + 5 * np.log(2 * np.pi * NOISE)
    return -0.5 * (xp.square(z).sum(-1) + 2 * np.log(2 * np.pi) + misfit)


def evidence(x):
    covariance = W.T @ W + NOISE * np.eye(5)
    quadratic = (x @ np.linalg.inv(covariance) * x).sum(-1)
    return -0.5 * (quadratic + np.linalg.slogdet(covariance)[1] + 5 * np.log(2 * np.pi))


def posterior_mean(x):
    return x @ W.T @ POSTERIOR / NOISE


def observations(count):
    generator = np.random.default_rng(1)
    return generator.normal(size=(count, 2)) @ W + np.sqrt(NOISE) * generator.normal(size=(count, 5))


def importance(joint, proposal, key, images, samples, blocks):
    """The estimates for images of these numbers, with so many blocks of samples at once."""

    def one(chunk, sums):
        return likelihood.add_chunk(sums, joint, proposal, key, images, samples, chunk, blocks)

    start = likelihood.empty_sums((len(images),), proposal.mean.dtype)
    chunks = likelihood.chunks_of(samples, blocks)
    return likelihood.estimate(jax.lax.fori_loop(0, chunks, one, start), samples)


@jax.jit
def linear_estimate(x, mean, spread, samples):
    """In chunks of two blocks."""
    joint, images = partial(linear_joint, x), jnp.arange(len(x))
    return importance(joint, Proposal(mean, spread), KEY, images, samples, 2)


@jax.jit
def three_blocks(images, first):
    return likelihood.draw_normals(KEY, images, first, 3, 2, jnp.float64)


ROWS = 1000  # the same everywhere, and so compiled once


def wide(x, factor=1.2):
    return posterior_mean(x), np.broadcast_to(factor * np.sqrt(np.diag(POSTERIOR)), (len(x), 2))


def test_the_linear_gaussian_evidence_is_found_within_the_error_that_is_reported(float64):
    x = observations(ROWS)
    found = linear_estimate(x, *wide(x), 2000)
    deviations = np.sqrt(found.variance)
    errors = (np.asarray(found.log_likelihood) - evidence(x)) / deviations
    assert np.abs(errors).max() < 5
    assert np.mean(errors**2) == pytest.approx(
        1, abs=4 * np.sqrt(2 / ROWS)
    )  # reported errors are the real ones
    assert deviations.max() < 0.04


def test_the_bound_rises_with_the_samples_to_the_evidence_and_begins_at_the_elbo(float64):
    x = np.repeat(observations(1), ROWS, 0)
    mean, spread = wide(x, 0.8)
    mean = mean + 0.4
    found = {}
    for samples in (1, 10, 100):
        result = linear_estimate(x, mean, spread, samples)
        found[samples] = mean_and_error(result.log_likelihood)
    exact = evidence(x[:1])[0]
    assert all(value < exact + 3 * error for value, error in found.values())
    assert found[10][0] - found[1][0] > 5 * found[1][1]
    assert found[100][0] - found[10][0] > 5 * found[10][1]
    # E log p(x, z) for a Gaussian z is that at its mean less half the trace of (curvature x covariance).
    curvature = np.diag(np.linalg.inv(POSTERIOR))
    joint = linear_joint(x[:1], mean[:1, None], np)[0, 0] - 0.5 * (curvature * spread[0] ** 2).sum()
    elbo = joint + np.log(spread[0]).sum() + 1 + np.log(2 * np.pi)
    assert abs(found[1][0] - elbo) < 3 * found[1][1]
    value, error = mean_and_error(result.elbo)
    assert abs(value - elbo) < 3 * error


def mean_and_error(values):
    values = np.asarray(values)
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


@pytest.mark.slow
def test_any_number_of_samples_counts_exactly_those(float64):
    x = observations(ROWS)
    mean, spread = wide(x)
    eta = np.asarray(three_blocks(np.arange(ROWS), 0))
    log_proposal = -0.5 * (eta**2).sum(-1) - np.log(2 * np.pi) - np.log(spread).sum(-1)[:, None]
    all_ = linear_joint(x, mean[:, None] + spread[:, None] * eta, np) - log_proposal
    for samples in (1, 50, 100, 130):
        log_weights = all_[:, :samples]
        found = linear_estimate(x, mean, spread, samples)
        np.testing.assert_allclose(found.log_likelihood, direct(log_weights)[0], rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.effective, direct(log_weights)[1], rtol=1e-10)
        np.testing.assert_allclose(found.elbo, log_weights.mean(-1), rtol=0, atol=1e-10)


def test_the_numbers_of_an_image_are_its_own_and_no_two_blocks_share_them(float64):
    order = np.random.default_rng(4).permutation(ROWS)
    all_ = np.asarray(three_blocks(np.arange(ROWS), 0))
    later = np.asarray(three_blocks(order, 1))
    np.testing.assert_array_equal(later[:, : 2 * BLOCK], all_[order, BLOCK:])
    assert len(np.unique(all_)) == all_.size
    assert abs(all_.mean()) < 4 / np.sqrt(all_.size)
    assert all_.var() == pytest.approx(1, abs=4 * np.sqrt(2 / all_.size))


@pytest.mark.slow
def test_all_samples_of_a_perfect_proposal_are_effective_and_few_of_a_bad_one():
    mean, spread = np.float32([[0.5, -1.0], [2.0, 0.0], [0.0, 0.0]]), np.full((3, 2), 0.7, np.float32)
    level = np.float32([-90.0, 3.0, 0.0])[:, None]

    @jax.jit
    def found(away, factor):
        def joint(z):
            return level + networks.log_normal(z, mean[:, None], spread[:, None])

        proposal = Proposal(mean + away, spread * factor)
        return importance(joint, proposal, KEY, jnp.arange(3), 1030, 4)

    perfect = found(0.0, 1.0)
    np.testing.assert_allclose(perfect.effective, 1030, rtol=1e-5)
    np.testing.assert_allclose(perfect.log_likelihood, level[:, 0], atol=2e-5)
    np.testing.assert_allclose(perfect.variance, 0, atol=1e-8)
    bad = found(3.0, 0.5)
    assert (bad.effective < 20).all()
    assert (bad.effective >= 1 - 1e-6).all()
    np.testing.assert_allclose(bad.variance, 1 / bad.effective - 1 / 1030, rtol=1e-5)
    # 1.2 times too wide in two dimensions: E w^2 = (1.2^2 / sqrt(2 1.2^2 - 1))^2.
    expected = (2 * 1.44 - 1) / 1.2**4
    np.testing.assert_allclose(found(0.0, 1.2).effective / 1030, expected, rtol=0.05)


@jax.jit
def streamed(log_weights):
    """In chunks of 50, 30 and 40."""
    sums = likelihood.empty_sums(log_weights.shape[:1])
    for chunk in jnp.split(log_weights, (50, 80), axis=-1):
        sums = likelihood.add_weights(sums, chunk, jnp.ones(chunk.shape[-1], bool))
    return likelihood.estimate(sums, log_weights.shape[-1])


def direct(log_weights):
    pivot = log_weights.max(-1, keepdims=True)
    weights = np.exp(log_weights.astype(np.float64) - pivot)
    value = pivot[:, 0] + np.log(weights.mean(-1))
    return value, weights.sum(-1) ** 2 / (weights**2).sum(-1)


def test_sums_in_a_stream_equal_the_direct_ones_over_extreme_ranges():
    generator = np.random.default_rng(3)
    rows = [
        generator.uniform(-1e4, 1e3, 120),
        np.linspace(-1e4, 1e3, 120),  # each weight makes all before it vanish
        np.linspace(1e3, -1e4, 120),
        generator.normal(-95, 3, 120),
        np.full(120, -1e4),
        np.sort(generator.normal(-95, 1, 120)),  # the pivot rises, and what is behind it still counts
    ]
    weights = np.float32(rows)
    weights[1:4, 50:80] = -np.inf  # a whole chunk of weights that are zero
    weights[3, :50] = -np.inf  # and the first ones
    found = streamed(weights)
    value, effective = direct(weights)
    np.testing.assert_allclose(found.log_likelihood, value, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(found.effective, effective, rtol=1e-5)


def test_weights_of_zero_are_minus_infinity_and_a_nan_stays_with_its_image():
    weights = np.float32(np.random.default_rng(4).normal(-95, 3, (6, 120)))
    weights[0] = -np.inf
    weights[1, 70] = np.nan
    found = streamed(weights)
    assert found.log_likelihood[0] == -np.inf
    assert found.effective[0] == 0
    assert found.variance[0] == np.inf
    assert np.isnan(found.log_likelihood[1])
    np.testing.assert_allclose(found.log_likelihood[2:], direct(weights[2:])[0], rtol=1e-6)


@pytest.mark.parametrize(("samples", "chunk"), [(20_000, 668), (20_000, 83), (130, 10), (1, 1000), (51, 50)])
def test_chunks_are_whole_blocks_within_bounds_and_cover_all_samples(samples, chunk):
    blocks = likelihood.blocks_of(samples, chunk)
    chunks = likelihood.chunks_of(samples, blocks)
    assert blocks * BLOCK <= max(BLOCK, chunk)
    assert samples <= chunks * blocks * BLOCK < samples + chunks * BLOCK


# HMC over an ensemble: independent normal targets, N(centre, 0.5^2).
def normal_target(centre):
    return hmc.gradient_of(lambda z: -0.5 * jnp.square((z - centre) / 0.5).sum(-1))


@partial(jax.jit, static_argnames="count")
def one_iteration(ensemble, centres, number, burn_in, count):
    return likelihood.iterate_chains(normal_target, 5, count, KEY, centres, burn_in, number, ensemble)


begin = jax.jit(partial(likelihood.begin_chains, normal_target))


def sampled(centres, count, burn_in, kept, step_size=0.4):
    """The ensemble at the end, and the step size and position after each iteration."""
    ensemble = begin(centres, jnp.zeros_like(centres), jnp.float32(step_size))
    sizes, places = [], []
    for number in range(burn_in + kept):
        ensemble = one_iteration(ensemble, centres, number, burn_in, count)
        sizes.append(float(ensemble.step_size))
        places.append(np.asarray(ensemble.chains.position).reshape(-1, centres.shape[-1])[:count])
    return ensemble, np.array(sizes), np.array(places)


CENTRES = np.float32(np.random.default_rng(5).normal(size=(10, 2)))


def test_one_step_size_follows_all_chains_together_and_rests_after_burn_in():
    _, sizes, places = sampled(CENTRES[None], 10, burn_in=30, kept=20, step_size=0.6)
    moved = (np.diff(np.concatenate([np.zeros((1, 10, 2)), places]), axis=0) != 0).any(-1)
    assert 0 < moved.mean() < 1
    expected = 0.6 * np.cumprod(1 + 0.01 * (moved[:30].mean(-1) - 0.9) / 0.9)
    np.testing.assert_allclose(sizes[:30], expected, rtol=1e-5)
    assert (sizes[30:] == sizes[29]).all()


def test_groups_change_nothing_and_what_fills_them_up_has_no_vote():
    whole, sizes, _ = sampled(CENTRES[None], 10, burn_in=20, kept=20)
    padded = np.concatenate([CENTRES, np.full((2, 2), np.nan, np.float32)]).reshape(3, 4, 2)
    cut, cut_sizes, _ = sampled(padded, 10, burn_in=20, kept=20)
    np.testing.assert_array_equal(sizes, cut_sizes)
    np.testing.assert_allclose(cut.mean.reshape(-1, 2)[:10], whole.mean[0], atol=1e-5)
    np.testing.assert_allclose(cut.squares.reshape(-1, 2)[:10], whole.squares[0], rtol=1e-4)
    assert cut.acceptance == whole.acceptance


def test_the_moments_are_those_of_the_kept_samples_alone():
    ensemble, _, places = sampled(CENTRES[None], 10, burn_in=15, kept=25)
    kept = places[15:].astype(np.float64)
    np.testing.assert_allclose(ensemble.mean[0], kept.mean(0), atol=1e-5)
    np.testing.assert_allclose(ensemble.squares[0] / 24, kept.var(0, ddof=1), rtol=1e-4)
    moved = (np.diff(places, axis=0) != 0).any(-1)[14:]
    assert float(ensemble.acceptance) == pytest.approx(moved.mean(), abs=1e-5)


def test_chains_find_the_posterior():
    ensemble, _, _ = sampled(CENTRES[None], 10, burn_in=30, kept=400)
    away = np.asarray(ensemble.mean[0]) - CENTRES
    assert np.abs(away).max() < 0.2
    assert abs(away.mean()) < 4 * away.std(ddof=1) / np.sqrt(away.size)
    variances = np.asarray(ensemble.squares[0]) / 399
    assert abs(variances.mean() - 0.25) < 4 * variances.std(ddof=1) / np.sqrt(variances.size)
    assert variances.std() < 0.05


def test_proposals_are_a_fifth_wider_and_the_floor_comes_last():
    encoder = Proposal(jnp.float32([[1, 2, 3]]), jnp.float32([[0.5, 1e-5, 2]]))
    squares = jnp.float32([[9 * 0.25, 0, 9 * 9e-5**2]])
    found = likelihood.make_proposals(encoder, jnp.float32([[4, 5, 6]]), squares, kept=10)
    assert list(found) == ["encoder", "hmc_mean", "hmc_mean_std"]
    np.testing.assert_array_equal(found["encoder"].mean, encoder.mean)
    np.testing.assert_allclose(found["encoder"].spread, [[0.6, 1.2e-5, 2.4]], rtol=1e-6)
    for name in ("hmc_mean", "hmc_mean_std"):
        np.testing.assert_array_equal(found[name].mean, [[4, 5, 6]])
    np.testing.assert_array_equal(found["hmc_mean"].spread, found["encoder"].spread)
    # 1.2 x 9e-5 is above the floor: flooring first would give 1.2e-4.
    np.testing.assert_allclose(found["hmc_mean_std"].spread, [[0.6, 1e-4, 1.08e-4]], rtol=1e-5)


def test_a_single_kept_sample_gives_the_smallest_spread_and_no_nan():
    encoder = Proposal(jnp.ones((1, 2)), jnp.ones((1, 2)))
    found = likelihood.make_proposals(encoder, jnp.ones((1, 2)), jnp.zeros((1, 2)), kept=1)
    np.testing.assert_allclose(found["hmc_mean_std"].spread, 1e-4)
