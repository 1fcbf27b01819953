"""The leapfrog kernel, interpreted, in the place where an update uses it, against a float64 oracle."""

import dataclasses
from functools import cache, partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vcd_oracle as oracle

from hotloop.families.vcd import fused, model, networks
from hotloop.families.vcd.config import VcdModel
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


@cache
def refine(sampler, adaptation="ruiz"):
    """(positions, momenta) -> the chains that an update gets out of the kernel, or of the plain sampler."""
    options = dataclasses.replace(OPTIONS, adaptation=adaptation)

    def chain(position, momenta):
        images = jnp.asarray(IMAGES)
        start = hmc.init(position, networks.value_and_gradient(DECODER, images))
        noise, size = NOISE._replace(momenta=momenta), jnp.float32(OPTIONS.step_size)
        return model.sample(options, DECODER, images, start, noise, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "use_fused", lambda *_: sampler == "fused")
        kernel = Mock(side_effect=partial(fused.FusedSampler, interpret=True))
        patch.setattr(fused, "FusedSampler", kernel)
        lowered = jax.jit(chain).lower(POSITION, NOISE.momenta)
    assert kernel.called == (sampler == "fused")
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize(("sampler", "digits"), [("fused", 3e-3), ("plain", 1e-5)])
def test_an_update_samples_what_float64_samples(sampler, digits):
    """Three iterations of two leapfrogs, about a fifth of them rejected; a rounding to float16 is 5e-4 at most."""
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("what", ["position", "momentum"])
@pytest.mark.parametrize("sampler", ["fused", "plain"])
def test_a_chain_that_breaks_stays_where_it_was_and_leaves_the_others_their_bits(sampler, what, bad):
    """The step size is held: it is the one number that chains share."""
    chains = refine(sampler, "constant")
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
    assert model.use_fused(VcdModel(), 100)
    for options in ({"hidden": (200,)}, {"hidden": (300, 200)}, {"z_dim": 65}):
        assert not model.use_fused(VcdModel(**options), 100)
    assert not model.use_fused(VcdModel(), 3072)
    assert not model.use_fused(VcdModel(sampler="plain"), 100)
    monkeypatch.setattr(model, "platform", lambda: "cpu")
    assert not model.use_fused(VcdModel(), 100)
