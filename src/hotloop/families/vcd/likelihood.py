"""log p(x) by importance sampling, with the weights added up as they come, and the three proposals for it.

For samples z_s of a Gaussian proposal r the mean of w_s = p(x, z_s) / r(z_s) has the expectation p(x), so its
logarithm is, in expectation, a lower bound of log p(x) that rises with the number of samples. Weights are
never kept: each image has a running maximum and, relative to it, the sums of w and w^2. The normal numbers of
an image depend on the key, the image's number and the sample's number alone, so neither the batch nor the
chunk in which it is computed changes the estimate.

Two of the proposals are learnt from HMC over all images as one ensemble. Chains start at the encoder's mean and share
one step size, which follows the share of all chains that moved (and so depends on no batch size) until the burn-in
ends; then it rests, and each chain's mean and variance are gathered one sample at a time. Where the two reference
programs differ this follows the paper's authors: the trained step size to begin with, a deviation with n - 1, a floor
that is applied last. It knows no network and no sampler but HMC: joint density and target are functions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from hotloop.engine.keys import sample_keys
from hotloop.families.vcd.networks import log_prior
from hotloop.mcmc import hmc

BLOCK = 50  # samples that are drawn together, from one key: the smallest chunk
WIDER = 1.2
"""Proposals are wider than what they are made of: a tail that is too thin ruins an importance sampler."""
SMALLEST = 1e-4
TARGET_ACCEPTANCE, ADAPTATION_RATE = 0.9, 0.01
HEADLINE = "hmc_mean_std"  # the proposal whose estimate is the result, chosen in advance

LogJoint = Callable[[Array], Array]
"""z [images, samples, latent] -> log p(x, z) [images, samples], each image with its own x."""
Target = Callable[[Any], hmc.ValueAndGradient]
"""The data of some chains -> their log density and its gradient."""


class Proposal(NamedTuple):
    """N(mean, spread^2) for each image, [images, latent]."""

    mean: Array
    spread: Array


class Sums(NamedTuple):
    """What is kept of an image's weights: `total` and `squares` are relative to the largest weight so far."""

    largest: Array  # the largest log w
    total: Array  # the sum of w / exp(largest)
    squares: Array  # the sum of (w / exp(largest))^2
    logs: Array  # the sum of log w: divided by the number of samples, the ELBO of the proposal


def empty_sums(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Sums:
    zero = jnp.zeros(shape, dtype)
    return Sums(zero - jnp.inf, zero, zero, zero)


def add_weights(sums: Sums, log_weights: Array, real: Array) -> Sums:
    """The sums with more log weights [..., samples] in them, those that are `real`.

    A weight of zero (a logarithm of -inf) adds nothing; a NaN makes its image's sums NaN, and only those.
    """
    kept = jnp.where(real, log_weights, -jnp.inf)
    largest = jnp.maximum(sums.largest, kept.max(-1))
    pivot = jnp.where(largest == -jnp.inf, 0.0, largest)
    scale = jnp.exp(sums.largest - pivot)
    weights = jnp.exp(kept - pivot[..., None])
    return Sums(
        largest,
        sums.total * scale + weights.sum(-1),
        sums.squares * scale * scale + jnp.square(weights).sum(-1),
        sums.logs + jnp.where(real, log_weights, 0.0).sum(-1),
    )


class LikelihoodEstimate(NamedTuple):
    """What the weights say of each image."""

    log_likelihood: Array
    effective: Array  # (sum w)^2 / sum w^2: so many samples of equal weight would do as well
    variance: Array
    """Of `log_likelihood`, over other draws: (S sum w^2 / (sum w)^2 - 1) / S, by the delta method."""
    elbo: Array  # the mean of log w


def estimate(sums: Sums, samples: Array | int) -> LikelihoodEstimate:
    effective = jnp.where(sums.total == 0, 0.0, jnp.square(sums.total) / sums.squares)
    return LikelihoodEstimate(
        sums.largest + jnp.log(sums.total) - jnp.log(jnp.asarray(samples, sums.total.dtype)),
        effective,
        jnp.maximum(1 / effective - 1 / samples, 0.0),
        sums.logs / samples,
    )


def draw_normals(
    key: Array, images: Array, first: Array | int, blocks: int, latent: int, dtype: Any
) -> Array:
    """N(0, 1) numbers [images, blocks * BLOCK, latent] from block `first` on, for images of these numbers."""

    def one(image: Array, block: Array) -> Array:
        place = jax.random.fold_in(jax.random.fold_in(key, image), block)
        return jax.random.normal(place, (BLOCK, latent), dtype)

    drawn = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(images, first + jnp.arange(blocks))
    return drawn.reshape(len(images), blocks * BLOCK, latent)


def add_chunk(
    sums: Sums,
    log_joint: LogJoint,
    proposal: Proposal,
    key: Array,
    images: Array,
    samples: Array | int,
    chunk: Array | int,
    blocks: int,
) -> Sums:
    """The sums with the `chunk`-th so many blocks of samples in them; samples from number `samples` on do not count."""
    mean, spread = proposal
    first = chunk * blocks
    eta = draw_normals(key, images, first, blocks, mean.shape[-1], mean.dtype)
    log_proposal = log_prior(eta) - jnp.log(spread).sum(-1)[:, None]
    log_weights = log_joint(mean[:, None] + spread[:, None] * eta) - log_proposal
    real = first * BLOCK + jnp.arange(blocks * BLOCK) < samples
    return add_weights(sums, log_weights, real)


def blocks_of(samples: int, chunk: int) -> int:
    """Blocks a chunk, for chunks of about equal size with at most `chunk` samples (or one block)."""
    total = -(-samples // BLOCK)
    chunks = -(-total // max(1, chunk // BLOCK))
    return -(-total // chunks)


def chunks_of(samples: Any, blocks: int) -> Any:
    """Chunks that so many samples take; `samples` may be an array."""
    return -(-samples // (blocks * BLOCK))


class Ensemble(NamedTuple):
    """All chains, in groups that are computed one after the other: arrays are [groups, chains, ...]."""

    chains: hmc.State
    step_size: Array
    mean: Array  # of the samples kept so far
    squares: Array  # their squared distances from the mean, added up
    acceptance: Array  # share of the proposals accepted, over the iterations kept so far


def begin_chains(target: Target, data: Array, start: Array, step_size: Array) -> Ensemble:
    chains = lax.map(lambda group: hmc.init(group[1], target(group[0])), (data, start))
    nothing = jnp.zeros_like(start)
    return Ensemble(chains, step_size, nothing, nothing, jnp.zeros((), step_size.dtype))


def iterate_chains(
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
    return _keep(ensemble._replace(chains=chains, step_size=step_size), accepted, number - burn_in + 1)


def _draws(key: Array, like: Array) -> tuple[Array, Array]:
    groups, rows, latent = like.shape

    def one(key: Array) -> tuple[Array, Array]:
        normal, uniform = jax.random.split(key)
        return jax.random.normal(normal, (latent,), like.dtype), jax.random.uniform(uniform, (), like.dtype)

    momenta, uniforms = jax.vmap(one)(sample_keys(key, 0, groups * rows))
    return momenta.reshape(like.shape), uniforms.reshape(groups, rows)


def _keep(ensemble: Ensemble, accepted: Array, kept: Array | int) -> Ensemble:
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


def make_proposals(encoder: Proposal, mean: Array, squares: Array, kept: int) -> dict[str, Proposal]:
    """By name: the encoder's, its spread round the chains' mean, and the chains' own mean and deviation."""
    deviation = jnp.sqrt(squares / max(1, kept - 1))
    return {
        "encoder": Proposal(encoder.mean, WIDER * encoder.spread),
        "hmc_mean": Proposal(mean, WIDER * encoder.spread),
        HEADLINE: Proposal(mean, jnp.maximum(WIDER * deviation, SMALLEST)),
    }
