"""An update's chains on a Hopper card against a float64 oracle: `pytest tests/families/test_vcd_hopper_card.py`."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vcd_oracle as oracle

from hotloop.families.vcd import hopper, model, networks
from hotloop.families.vcd.config import VcdModel
from hotloop.layers import paths
from hotloop.mcmc import hmc

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < paths.CARD_JAX
    or not any(getattr(device, "compute_capability", None) == paths.CARD for device in jax.devices()),
    reason="needs a card of NVIDIA's Hopper generation and jax 0.11.2",
)
STEP = 0.4
ONE, ALL = 3e-3, 1e-2
"""Of the largest value. A rounding to float16 is 5e-4; five leapfrogs of a few roundings each stay under the first for
one iteration; chains that follow each other for eight may part a little further."""
PARTED = 0.01
"""Of chains in an iteration: a chance within rounding of its uniform number may be decided otherwise, and parts two
chains for good. Rounding alone, with float32 products on a CPU, parts 0.5 % of 3,072 chains in one iteration, and 5.1 %
of 512, 5.2 % of 1,024 and 5.5 % of 3,072 in eight."""


def make_decoder(options):
    """Weights that float16 holds, and biases that keep hidden units on or off: at the kink of a ReLU, float16 and
    float64 would part for good, and a comparison would say nothing about the kernel."""
    rng = np.random.default_rng(4)

    def layer(m, n, scale, bias):
        weights = (rng.standard_normal((m, n)) * scale / np.sqrt(m)).astype(np.float16)
        return {
            "w": jnp.asarray(weights, jnp.float32),
            "b": jnp.asarray(bias * rng.choice([-1, 1], n), jnp.float32),
        }

    one, two = reversed(options.hidden)
    return layer(options.z_dim, one, 0.8, 5.0), layer(one, two, 0.4, 8.0), layer(two, 784, 1.6, 0.5)


@cache
def draw(batch, iterations):
    """Options whose step size adapts fast, so that it matters, and what chains are made of."""
    options = VcdModel(hmc_steps=iterations, adaptation_rate=0.05, sampler="hopper")
    decoder, noise = make_decoder(options), model.draw_noise(options, jax.random.key(2), batch)
    # Images that the decoder could have made near there: densities of a few hundred, as of a trained one.
    chance = jax.nn.sigmoid(networks.forward(decoder, noise.start + 0.1 * noise.momenta[0])[-1])
    return options, decoder, jax.random.bernoulli(jax.random.key(3), chance).astype(jnp.float32), noise


@cache
def case(batch, iterations):
    """The chains after these iterations, and what they are made of."""
    options, decoder, images, noise = draw(batch, iterations)
    with jax.default_matmul_precision("highest"):
        start = hmc.init(noise.start, networks.value_and_gradient(decoder, images))
        run = jax.jit(partial(model.sample, options, decoder, images))
        lowered = run.lower(start, noise, jnp.float32(STEP))
        assert "@mosaic_gpu" in lowered.as_text()
        return lowered.compile(), (start, noise, jnp.float32(STEP))


def chains(batch, iterations):
    run, given = case(batch, iterations)
    return jax.tree.map(np.asarray, run(*given))


def in_float64(batch, iterations):
    """The state of the same chains in numpy, the share of accepted moves, and the step size."""
    options, decoder, images, noise = draw(batch, iterations)
    target = oracle.Target(oracle.wide(decoder), np.float64(images))
    z, size, accepted, aim = np.float64(noise.start), STEP, [], options.target_acceptance
    for momentum, uniform in zip(*oracle.wide(noise[1:]), strict=True):
        z, taken, _ = oracle.hmc(target, z, momentum, uniform, size, options.leapfrog_steps)
        size *= 1 + options.adaptation_rate * (taken.mean() - aim) / aim
        accepted.append(taken.mean())
    return hmc.State(z, target.value(z), target.gradient(z)), np.mean(accepted), size


@pytest.mark.parametrize(
    ("batch", "iterations"), [(60, 1), (100, 1), (60, 8), (100, 8), (512, 8), (1024, 8), (3072, 1)]
)
def test_chains_are_those_of_float64(batch, iterations):
    ours, (end, acceptance, step_size) = chains(batch, iterations), in_float64(batch, iterations)
    same = np.abs(ours.end.position - end.position).max(1) < 0.1
    assert (~same).sum() <= 1 + PARTED * iterations * batch
    for mine, right in zip(ours.end, end, strict=True):
        bound = (ONE if iterations == 1 else ALL) * np.abs(right).max()
        assert np.abs(mine - right)[same].max() < bound
    assert abs(ours.acceptance - acceptance) < 0.03
    assert ours.step_size == pytest.approx(step_size, rel=5e-3)
    assert 0.5 < acceptance < 1  # both decisions are there


@pytest.mark.parametrize("batch", [100, 1024])
def test_the_same_numbers_give_the_same_bits(batch):
    for one, other in zip(*(jax.tree.leaves(chains(batch, 8)) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("batch", [100, 1024])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_chain_that_breaks_stays_where_it_was_and_leaves_its_neighbours_alone(batch, bad):
    """One iteration: from the next on its decision is in the step size of all."""
    run, (start, noise, size) = case(batch, 1)
    hurt = noise._replace(momenta=noise.momenta.at[:, 5, 2].set(bad))
    sane, broken = (jax.tree.map(np.asarray, run(start, numbers, size)) for numbers in (noise, hurt))
    others = np.arange(batch) != 5
    for one, other in zip(sane.end, broken.end, strict=True):
        np.testing.assert_array_equal(one[others], other[others])
    np.testing.assert_array_equal(broken.end.position[5], start.position[5])


def test_a_batch_of_all_iterations_and_one_of_single_ones_agree(monkeypatch):
    whole = chains(100, 8)
    monkeypatch.setattr(hopper, "can_wait", lambda chains: False)
    case.cache_clear()
    single = chains(100, 8)
    case.cache_clear()
    for one, other in zip(whole.end, single.end, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())
    assert whole.step_size == pytest.approx(float(single.step_size), rel=1e-6)
