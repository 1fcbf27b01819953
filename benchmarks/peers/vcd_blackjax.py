"""Our vcd update with BlackJAX's HMC in place of ours: the sampler is replaced and nothing else.

`blackjax.hmc`'s kernel (velocity Verlet, identity mass) is mapped over the chains, which share the step size as an
argument and decide each for itself. BlackJAX draws its own momenta and uniforms from a key for each chain and
iteration; `its_draws` says which, so that our transition can be given the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import blackjax
import jax
import jax.numpy as jnp
from blackjax.mcmc.hmc import HMCState
from jax import Array, lax

from hotloop.engine.device import platform
from hotloop.families.vcd import model as vcd
from hotloop.families.vcd import networks
from hotloop.families.vcd.config import VcdModel
from hotloop.mcmc import hmc


def draws(model: VcdModel, key: Array, rows: int, first: int = 0) -> vcd.Noise:
    """Normals for the encoder's samples, and a key for each iteration and chain in place of momenta."""
    start, chains = jax.random.split(key)
    keys = jax.random.split(chains, (model.hmc_steps, rows))
    return vcd.Noise(jax.random.normal(start, (rows, model.z_dim)), keys, jnp.zeros((model.hmc_steps, 0)))


def its_draws(keys: Array, latent: int) -> tuple[Array, Array]:
    """The momenta and uniforms that BlackJAX's kernel draws from so many keys."""

    def one(key: Array) -> tuple[Array, Array]:
        momentum, decision = jax.random.split(key)
        return jax.random.normal(momentum, (latent,)), jax.random.uniform(decision)

    return jax.vmap(one)(keys)


def transition(model: VcdModel, decoder: Any, images: Array) -> Any:
    """One iteration of all chains: (keys, state, step size) -> (state, decisions)."""
    kernel = blackjax.hmc.build_kernel()
    unit = jnp.ones(model.z_dim)

    def chain(key: Array, state: Any, image: Array, step_size: Array) -> Any:
        target = lambda z: networks.log_joint(decoder, image, z)  # noqa: E731
        return kernel(key, state, target, step_size, unit, model.leapfrog_steps)

    def step(keys: Array, state: Any, step_size: Array) -> tuple[Any, Array]:
        state, info = jax.vmap(chain, (0, 0, 0, None))(keys, state, images, step_size)
        return state, info.is_accepted

    return step


def sample(
    model: VcdModel,
    decoder: Any,
    images: Array,
    start: hmc.State,
    noise: vcd.Noise,
    step_size: Array,
    axis: None = None,
) -> vcd.Chain:
    """`model.sample` by BlackJAX, on one device."""
    move = transition(model, decoder, images)

    def step(carry: Any, keys: Array) -> Any:
        state, size = carry
        state, accepted = move(keys, state, size)
        size = hmc.adaptation(size, accepted, model.target_acceptance, model.adaptation_rate)
        return (state, size), accepted.mean(dtype=jnp.float32)

    first = HMCState(*start)
    unroll = 1 if platform() == "cpu" else model.hmc_steps  # as ours
    (end, size), accepted = lax.scan(step, (first, step_size), noise.momenta, unroll=unroll)
    return vcd.Chain(hmc.State(*end), size, accepted.mean())


@contextmanager
def replaced() -> Iterator[None]:
    """Whatever is traced in here samples with BlackJAX."""
    with mock.patch.object(vcd, "draw_noise", draws), mock.patch.object(vcd, "sample", sample):
        yield
