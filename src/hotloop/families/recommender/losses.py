"""What training minimises: the masked squared error over rated places, and the re-feeding error over all.

A zero is "no rating". The masked error is a mean over ratings, not over users or items; an empty batch has the
error 0. All of it is float32 whatever the network computes in. It knows no network.
"""

import jax.numpy as jnp
from jax import Array


def masked(predictions: Array, ratings: Array) -> Array:
    """The mean squared error over the places that hold a rating."""
    there = ratings > 0
    errors = jnp.where(there, predictions - ratings, 0)
    return jnp.square(errors).sum() / jnp.maximum(there.sum(), 1)


def dense(predictions: Array, targets: Array) -> Array:
    """The mean squared error over all places."""
    return jnp.square(predictions - targets).mean()


def error_sums(predictions: Array, truth: Array) -> dict[str, Array]:
    """Of each user: squared and absolute error over its ratings, and their number."""
    there = truth > 0
    error = jnp.where(there, predictions - truth, 0)
    return {
        "squared_error": jnp.square(error).sum(-1),
        "absolute_error": jnp.abs(error).sum(-1),
        "ratings": there.sum(-1),
    }
