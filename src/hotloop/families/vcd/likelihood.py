"""log p(x) by importance sampling, with the weights added up as they come.

For samples z_s of a Gaussian proposal r the mean of w_s = p(x, z_s) / r(z_s) has the expectation p(x), so its
logarithm is, in expectation, a lower bound of log p(x) that rises with the number of samples. Weights are
never kept: each image has a running maximum and, relative to it, the sums of w and w^2. The normal numbers of
an image depend on the key, the image's number and the sample's number alone, so neither the batch nor the
chunk in which it is computed changes the estimate. It knows no network and no sampler: the joint density is a
function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from hotloop.families.vcd.density import log_prior

BLOCK = 50
"""Samples that are drawn together, from one key: the smallest chunk."""

LogJoint = Callable[[Array], Array]
"""z [images, samples, latent] -> log p(x, z) [images, samples], each image with its own x."""


class Proposal(NamedTuple):
    """N(mean, spread^2) for each image, [images, latent]."""

    mean: Array
    spread: Array


class Sums(NamedTuple):
    """What is kept of an image's weights: `total` and `squares` are relative to the largest weight so far."""

    largest: Array
    """The largest log w."""
    total: Array
    """The sum of w / exp(largest)."""
    squares: Array
    """The sum of (w / exp(largest))^2."""
    logs: Array
    """The sum of log w: divided by the number of samples, the ELBO of the proposal."""


def no_samples(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Sums:
    """Sums over nothing."""
    zero = jnp.zeros(shape, dtype)
    return Sums(zero - jnp.inf, zero, zero, zero)


def added(sums: Sums, log_weights: Array, real: Array) -> Sums:
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


class Estimate(NamedTuple):
    """What the weights say of each image."""

    log_likelihood: Array
    effective: Array
    """(sum w)^2 / sum w^2: so many samples of equal weight would do as well."""
    variance: Array
    """Of `log_likelihood`, over other draws: (S sum w^2 / (sum w)^2 - 1) / S, by the delta method."""
    elbo: Array
    """The mean of log w."""


def estimate(sums: Sums, samples: Array | int) -> Estimate:
    """The estimates from the sums over so many samples."""
    effective = jnp.where(sums.total == 0, 0.0, jnp.square(sums.total) / sums.squares)
    return Estimate(
        sums.largest + jnp.log(sums.total) - jnp.log(jnp.asarray(samples, sums.total.dtype)),
        effective,
        jnp.maximum(1 / effective - 1 / samples, 0.0),
        sums.logs / samples,
    )


def normals(key: Array, images: Array, first: Array | int, blocks: int, latent: int, dtype: Any) -> Array:
    """N(0, 1) numbers [images, blocks * BLOCK, latent] from block `first` on, for images of these numbers."""

    def one(image: Array, block: Array) -> Array:
        place = jax.random.fold_in(jax.random.fold_in(key, image), block)
        return jax.random.normal(place, (BLOCK, latent), dtype)

    drawn = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(images, first + jnp.arange(blocks))
    return drawn.reshape(len(images), blocks * BLOCK, latent)


def chunk_added(
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
    eta = normals(key, images, first, blocks, mean.shape[-1], mean.dtype)
    log_proposal = log_prior(eta) - jnp.log(spread).sum(-1)[:, None]
    log_weights = log_joint(mean[:, None] + spread[:, None] * eta) - log_proposal
    real = first * BLOCK + jnp.arange(blocks * BLOCK) < samples
    return added(sums, log_weights, real)


def importance(
    log_joint: LogJoint, proposal: Proposal, key: Array, images: Array, samples: Array | int, blocks: int
) -> Estimate:
    """The estimates for images of these numbers, with so many blocks of samples at once."""

    def one(chunk: Array | int, sums: Sums) -> Sums:
        return chunk_added(sums, log_joint, proposal, key, images, samples, chunk, blocks)

    start = no_samples((len(images),), proposal.mean.dtype)
    return estimate(lax.fori_loop(0, chunks_of(samples, blocks), one, start), samples)


def blocks_of(samples: int, chunk: int) -> int:
    """Blocks a chunk, for chunks of about equal size with at most `chunk` samples (or one block)."""
    total = -(-samples // BLOCK)
    chunks = -(-total // max(1, chunk // BLOCK))
    return -(-total // chunks)


def chunks_of(samples: Any, blocks: int) -> Any:
    """Chunks that so many samples take; `samples` may be an array."""
    return -(-samples // (blocks * BLOCK))
