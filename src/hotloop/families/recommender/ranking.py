"""The objective `ranking`: which items a user likes, by the multinomial likelihood (Liang et al., arXiv 1802.05814).

What a user has rated high enough is a row of ones. The network sees it divided by its length, with some of the ones
hidden (Mult-DAE), and its outputs are the logits of one distribution over all items: the loss of a user is minus the
sum of the log-probabilities of all that it likes, hidden or not. With a random code (Mult-VAE) a second last layer of
the encoder gives the log-variance of the code, and a share of its KL divergence from a standard normal is added.

It knows parameters and rows, no options and no keys; a value is for one user, so that any split of a batch adds up.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.precision import random_bits
from hotloop.layers.dense import product, with_bias
from hotloop.layers.tied import selu

Params = Any


def keep_relevant(matrix: RatingMatrix, least: float) -> RatingMatrix:
    """Ones at the places of ratings of `least` or more, on the same rows and columns."""
    there = matrix.codes >= least if matrix.levels is None else (matrix.levels >= least)[matrix.codes]
    before = np.append(0, np.cumsum(there, dtype=np.int64))
    return RatingMatrix(
        before[matrix.starts],
        matrix.items[there],
        np.zeros(int(before[-1]), np.uint8),
        np.ones(1, np.float32),
        matrix.user_ids,
        matrix.item_ids,
    )


def is_relevant(ratings: Array, least: float) -> Array:
    return (ratings > 0) & (ratings >= least)


def normalise(liked: Array) -> Array:
    """Rows divided by their lengths, in float32; a row without any item stays zero."""
    wide = liked.astype(jnp.promote_types(liked.dtype, jnp.float32))
    return wide * lax.rsqrt(jnp.maximum(jnp.square(wide).sum(-1, keepdims=True), 1))


def hide_items(rows: Array, keys: Array, share: float) -> Array:
    """Each entry is 0 with probability `share`, else divided by what is left of 1; a row draws by its own key."""
    if not share:
        return rows
    # Bits of a hash: threefry's took longer than the products of a small network.
    bits = jax.vmap(lambda key: random_bits(rows.shape[1:], key))(keys)
    return jnp.where(bits >= np.uint32(round(share * 2**32)), rows / np.float32(1 - share), 0)


def run_ranker(
    params: Params, x: Array, keep: Array | float = 1.0, noise: Array | None = None, *, linear: bool = False
) -> tuple[Array, Array]:
    """Logits [B, items] in float32, and each user's KL divergence: 0 where the code is not random.

    `noise` are standard normal numbers for the code; without them it is its mean. Neither a random code nor the
    logits have an activation.
    """
    activation: Callable[[Array], Array] = (lambda x: x) if linear else selu
    encoder, decoder = params["encoder"], params["decoder"]

    def layer(x: Array, w: Array, b: Array) -> Array:
        return with_bias(product(jnp.asarray(x, w.dtype), w), b)

    for down in encoder[:-1]:
        x = activation(layer(x, down["w"], down["b"]))
    code, divergence = layer(x, encoder[-1]["w"], encoder[-1]["b"]), jnp.zeros(x.shape[:1], jnp.float32)
    if "spread" in params:
        log_variance = layer(x, params["spread"]["w"], params["spread"]["b"])
        divergence = (jnp.square(code) + jnp.exp(log_variance) - log_variance - 1).sum(-1) / 2
        code = code if noise is None else code + noise * jnp.exp(log_variance / 2)
    else:
        code = activation(code)
    x = code * keep
    for place, (up, mirrored) in enumerate(zip(decoder, reversed(encoder), strict=True), 1):
        x = layer(x, up.get("w", mirrored["w"].T), up["b"])
        x = x if place == len(decoder) else activation(x)
    return x, divergence


def neg_log_likelihood(logits: Array, liked: Array) -> Array:
    """Of each user: minus the log-probabilities of all items that it likes, added up."""
    liked = liked.astype(logits.dtype)
    return liked.sum(-1) * jax.nn.logsumexp(logits, axis=-1) - (liked * logits).sum(-1)


def log_probabilities(params: Params, ratings: Array, least: float, *, linear: bool = False) -> Array:
    """Of every item, for users with these dense ratings."""
    logits, _ = run_ranker(params, normalise(is_relevant(ratings, least)), linear=linear)
    return jax.nn.log_softmax(logits)
