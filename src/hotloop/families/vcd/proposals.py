"""The three proposals of the likelihood estimate, two of them learnt from HMC over all images as one ensemble.

Chains start at the encoder's mean. All of them share one step size, which follows the share of all chains
that moved (and so depends on no batch size) until the burn-in ends; then it rests, and each chain's mean and
variance are gathered one sample at a time. Where the two reference programs differ this follows the paper's
authors: the trained step size to begin with, a deviation with n - 1, a floor that is applied last. It knows
no network: the target is a function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from hotloop.engine.keys import sample_keys
from hotloop.families.vcd.likelihood import Proposal
from hotloop.mcmc import hmc

WIDER = 1.2
"""Proposals are wider than what they are made of: a tail that is too thin ruins an importance sampler."""
SMALLEST = 1e-4
TARGET_ACCEPTANCE, ADAPTATION_RATE = 0.9, 0.01
HEADLINE = "hmc_mean_std"
"""The proposal whose estimate is the result, chosen in advance."""

Target = Callable[[Any], hmc.ValueAndGradient]
"""The data of some chains -> their log density and its gradient."""


class Ensemble(NamedTuple):
    """All chains, in groups that are computed one after the other: arrays are [groups, chains, ...]."""

    chains: hmc.State
    step_size: Array
    mean: Array
    """Of the samples kept so far."""
    squares: Array
    """Their squared distances from the mean, added up."""
    acceptance: Array
    """Share of the proposals accepted, over the iterations kept so far."""


def begin(target: Target, data: Array, start: Array, step_size: Array) -> Ensemble:
    """Chains at `start`, nothing kept."""
    chains = lax.map(lambda group: hmc.init(group[1], target(group[0])), (data, start))
    nothing = jnp.zeros_like(start)
    return Ensemble(chains, step_size, nothing, nothing, jnp.zeros((), step_size.dtype))


def iteration(
    target: Target,
    leapfrogs: int,
    count: int,
    key: Array,
    data: Array,
    burn_in: Array | int,
    number: Array | int,
    ensemble: Ensemble,
) -> Ensemble:
    """HMC iteration `number` of all chains; those after the first `count` fill up a group and do not vote.

    A chain's momentum and uniform number depend on the key, the iteration and the chain's number.
    """
    position = ensemble.chains.position
    momenta, uniforms = _draws(jax.random.fold_in(key, number), position)

    def group(part: tuple[Any, hmc.State, Array, Array]) -> tuple[hmc.State, hmc.Info]:
        rows, chains, momentum, uniform = part
        return hmc.transition(target(rows), leapfrogs)(chains, momentum, uniform, ensemble.step_size)

    chains, info = lax.map(group, (data, ensemble.chains, momenta, uniforms))
    accepted = info.accepted.reshape(-1)[:count]
    moved = hmc.adaptation(ensemble.step_size, accepted, TARGET_ACCEPTANCE, ADAPTATION_RATE)
    step_size = jnp.where(number < burn_in, moved, ensemble.step_size)
    return _kept(ensemble._replace(chains=chains, step_size=step_size), accepted, number - burn_in + 1)


def _draws(key: Array, like: Array) -> tuple[Array, Array]:
    groups, rows, latent = like.shape

    def one(key: Array) -> tuple[Array, Array]:
        normal, uniform = jax.random.split(key)
        return jax.random.normal(normal, (latent,), like.dtype), jax.random.uniform(uniform, (), like.dtype)

    momenta, uniforms = jax.vmap(one)(sample_keys(key, 0, groups * rows))
    return momenta.reshape(like.shape), uniforms.reshape(groups, rows)


def _kept(ensemble: Ensemble, accepted: Array, kept: Array | int) -> Ensemble:
    """Welford's update with the `kept`-th sample; before the first, nothing changes."""
    dtype = ensemble.mean.dtype
    share = jnp.where(kept > 0, 1 / jnp.maximum(kept, 1).astype(dtype), 0)
    position = ensemble.chains.position
    away = position - ensemble.mean
    mean = ensemble.mean + share * away
    return ensemble._replace(
        mean=mean,
        squares=ensemble.squares + jnp.where(kept > 0, away * (position - mean), 0),
        acceptance=ensemble.acceptance + share * (accepted.mean(dtype=dtype) - ensemble.acceptance),
    )


def proposals(encoder: Proposal, mean: Array, squares: Array, kept: int) -> dict[str, Proposal]:
    """By name: the encoder's, its spread round the chains' mean, and the chains' own mean and deviation."""
    deviation = jnp.sqrt(squares / max(1, kept - 1))
    return {
        "encoder": Proposal(encoder.mean, WIDER * encoder.spread),
        "hmc_mean": Proposal(mean, WIDER * encoder.spread),
        HEADLINE: Proposal(mean, jnp.maximum(WIDER * deviation, SMALLEST)),
    }
