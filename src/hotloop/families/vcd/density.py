"""log p(x, z) of a decoder, and its gradient in z written out: what the sampler evaluates 41 times an update.

Prior N(0, I), one Bernoulli a pixel given its logit. `value_and_gradient` is three products forward and three
back; automatic differentiation gives the same numbers and, on the devices measured, was slower (docs/vcd.md).
It knows no encoder and no sampler.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.families.vcd.networks import Network, forward, product
from hotloop.mcmc.hmc import ValueAndGradient

LOG_TWO_PI = math.log(2 * math.pi)


def log_likelihood(logits: Array, images: Array) -> Array:
    """log p(x | z) of each row: the sum over pixels of x l - log(1 + exp l), finite for every finite l."""
    return (images * logits - jax.nn.softplus(logits)).sum(-1)


def log_prior(z: Array) -> Array:
    """log N(z; 0, I) of each row."""
    return -0.5 * (jnp.square(z).sum(-1) + z.shape[-1] * LOG_TWO_PI)


def log_normal(z: Array, mean: Array, spread: Array) -> Array:
    """log N(z; mean, spread^2) of each row."""
    return log_prior((z - mean) / spread) - jnp.log(spread).sum(-1)


def log_joint(decoder: Network, images: Array, z: Array) -> Array:
    """log p(x, z) of each row."""
    return log_likelihood(forward(decoder, z)[-1], images) + log_prior(z)


def value_and_gradient(decoder: Network, images: Array) -> ValueAndGradient:
    """z -> (log p(x, z), its gradient in z), each row for its own image."""

    def at(z: Array) -> tuple[Array, Array]:
        *hidden, logits = forward(decoder, z)
        value = log_likelihood(logits, images) + log_prior(z)
        back: Any = images - jax.nn.sigmoid(logits)
        for layer, activation in zip(decoder[:0:-1], reversed(hidden), strict=True):
            back = jnp.where(activation > 0, product(back, layer["w"].T), 0)
        return value, product(back, decoder[0]["w"].T) - z

    return at
