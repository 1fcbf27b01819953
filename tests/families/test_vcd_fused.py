"""The kernels, interpreted, in the place where an update uses them, against a float64 oracle.

Pallas' interpreter of kernels for Hopper knows neither clusters nor products of rows in registers: one block has all
pixels here, and a product is jax's own. The rest is tested on a card (test_vcd_hopper_card.py)."""

import dataclasses
from functools import cache, partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vcd_oracle as oracle

from hotloop.families.vcd import fused, hopper, hopper_decoder, model, networks
from hotloop.families.vcd.config import VcdModel
from hotloop.layers import paths
from hotloop.mcmc import hmc

CHAINS, LATENT = 21, 10
OPTIONS = VcdModel(
    hidden=(23, 37), z_dim=LATENT, hmc_steps=3, leapfrog_steps=2, step_size=0.18, adaptation_rate=0.1
)
"""Neither chains nor latents nor hidden units fill a block: 21 of 32, 10 of 16, 23 and 37 of 64, 784 of 832."""
RNG = np.random.default_rng(4)


def layer(m, n, bias):
    """Weights that float16 holds exactly, so that only what is multiplied by them is rounded."""
    weights = (RNG.standard_normal((m, n)) * 1.2 / np.sqrt(m)).astype(np.float16)
    return {
        "w": jnp.asarray(weights, jnp.float32),
        "b": jnp.asarray(bias * RNG.choice([-1, 1], n), jnp.float32),
    }


DECODER = layer(LATENT, 37, 4.0), layer(37, 23, 6.0), layer(23, 784, 0.5)
"""The biases keep hidden units on or off: at the kink of a ReLU, float16 and float64 would part for good."""
IMAGES = RNG.integers(0, 2, (CHAINS, 784)).astype(np.float32)
POSITION = RNG.standard_normal((CHAINS, LATENT)).astype(np.float32)
NOISE = model.Noise(
    jnp.zeros((CHAINS, LATENT)),
    jnp.asarray(RNG.standard_normal((3, CHAINS, LATENT)), jnp.float32),
    jnp.asarray(RNG.uniform(size=(3, CHAINS)), jnp.float32),
)


HOPPER = {"hopper": True, "hopper, a kernel an iteration": False}  # whether tiles wait for each other
ON_HOPPER = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            jax.__version_info__ < paths.CARD_JAX,
            reason="kernels for Hopper are built with jax 0.11.2 or later",
        ),
    )
    for name in HOPPER
]


def multiply(pairs):
    """`hopper_decoder.multiply` for the interpreter."""
    wide = jnp.float32
    return sum(
        jnp.dot(rows.astype(wide), weights[...].astype(wide), precision="highest") for rows, weights in pairs
    )


def interpret_hopper(patch, is_whole):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    patch.setattr(hopper_decoder, "multiply", multiply)
    patch.setattr(hopper, "can_wait", lambda chains: is_whole)
    alone = partial(hopper.Sampler, cut=hopper.Cut(blocks=1), interpret=InterpretGPUParams())
    patch.setattr(hopper, "Sampler", used := Mock(side_effect=alone))
    return used


@cache
def refine(sampler, **others):
    """(positions, momenta) -> the chains that an update gets out of the kernel, or of the plain sampler."""
    options = dataclasses.replace(OPTIONS, **others)

    def chain(position, momenta):
        images = jnp.asarray(IMAGES)
        start = hmc.init(position, networks.value_and_gradient(DECODER, images))
        noise, size = NOISE._replace(momenta=momenta), jnp.float32(OPTIONS.step_size)
        return model.sample(options, DECODER, images, start, noise, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "choose_sampler", lambda *_: sampler.split(",")[0])
        kernel = Mock(side_effect=partial(fused.FusedSampler, interpret=True))
        patch.setattr(fused, "FusedSampler", kernel)
        if sampler in HOPPER:
            kernel = interpret_hopper(patch, HOPPER[sampler])
        lowered = jax.jit(chain).lower(POSITION, NOISE.momenta)
    assert kernel.called == (sampler != "plain")
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("sampler", ["plain", "fused", *ON_HOPPER])
def test_an_update_samples_what_float64_samples(sampler):
    """Three iterations of two leapfrogs, about a fifth of them rejected; a rounding to float16 is 5e-4 at most."""
    digits = 1e-5 if sampler == "plain" else 3e-3
    chain = refine(sampler)(POSITION, NOISE.momenta)
    target = oracle.Target(oracle.wide(DECODER), np.float64(IMAGES))
    z, size, accepted = np.float64(POSITION), OPTIONS.step_size, []
    for momentum, uniform in zip(*oracle.wide(NOISE[1:]), strict=True):
        z, taken, margin = oracle.hmc(target, z, momentum, uniform, size, OPTIONS.leapfrog_steps)
        assert margin > 0.5  # no decision so close that float16 may decide otherwise
        size *= 1 + OPTIONS.adaptation_rate * (taken.mean() - 0.9) / 0.9
        accepted.append(taken.mean())
    for ours, exact in zip(chain.end, (z, target.value(z), target.gradient(z)), strict=True):
        assert np.abs(ours - exact).max() < digits * np.abs(exact).max()
    assert 0.5 < np.mean(accepted) < 0.9
    assert (
        target.value(z).mean() > target.value(np.float64(POSITION)).mean() + 20
    )  # the starts are bad guesses
    assert float(chain.acceptance) == pytest.approx(np.mean(accepted), rel=1e-6)
    assert float(chain.step_size) == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("sampler", ON_HOPPER[:1])
def test_the_step_size_follows_a_single_iteration_too(sampler):
    """Which would be the whole of a kernel that adapts between iterations."""
    single = NOISE._replace(momenta=NOISE.momenta[:1], uniforms=NOISE.uniforms[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "NOISE", single)
        chain = refine(sampler, hmc_steps=1)(POSITION, single.momenta)
    expected = OPTIONS.step_size * (1 + OPTIONS.adaptation_rate * (float(chain.acceptance) - 0.9) / 0.9)
    assert float(chain.step_size) == pytest.approx(expected, rel=1e-6)
    assert chain.acceptance != 0.9


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("what", ["position", "momentum"])
@pytest.mark.parametrize("sampler", ["fused", "plain", *ON_HOPPER[:1]])
def test_a_chain_that_breaks_stays_where_it_was_and_leaves_the_others_their_bits(sampler, what, bad):
    """The step size is held: it is the one number that chains share."""
    chains = refine(sampler, adaptation="constant")
    broken = {"position": POSITION.copy(), "momentum": np.array(NOISE.momenta)}
    broken[what][..., 5, 2] = bad
    sane, hurt = chains(POSITION, NOISE.momenta), chains(broken["position"], broken["momentum"])
    others = np.arange(CHAINS) != 5
    for one, other in zip(sane.end, hurt.end, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[others], np.asarray(other)[others])
    np.testing.assert_array_equal(hurt.end.position[5], broken["position"][5])
    assert hurt.acceptance <= sane.acceptance


def test_the_kernel_is_chosen_for_networks_and_batches_that_it_fits(monkeypatch):
    monkeypatch.setattr(model, "platform", lambda: "gpu")
    assert model.choose_sampler(VcdModel(), 100) == "fused"
    for options in ({"hidden": (200,)}, {"hidden": (300, 200)}, {"z_dim": 65}, {"sampler": "plain"}):
        assert model.choose_sampler(VcdModel(**options), 100) == "plain"
    assert model.choose_sampler(VcdModel(), 3072) != "fused"
    monkeypatch.setattr(model, "platform", lambda: "cpu")
    assert model.choose_sampler(VcdModel(), 100) == "plain"
