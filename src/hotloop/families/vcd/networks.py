"""The three networks (encoder mean, encoder spread, decoder; nothing shared), how they begin, and log p(x, z).

Weights may be kept in 16 bits; sums are float32 all the same. The prior is N(0, I), a pixel a Bernoulli of its logit.
"""

import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine.precision import cast
from hotloop.families.vcd.config import PIXELS
from hotloop.layers import native_bernoulli
from hotloop.layers.initial import Spec, draw
from hotloop.layers.paths import Operation
from hotloop.mcmc.hmc import ValueAndGradient

SMALLEST_SPREAD = 1e-4
LOG_TWO_PI = math.log(2 * math.pi)
Network = tuple[dict[str, Array], ...]


def init(key: Array, latent: int, hidden: tuple[int, ...]) -> dict[str, Network]:
    """Random weights and biases: hidden layers N(0, 1 / width), output layers N(0, 1), biases included."""
    encoder = (PIXELS, *hidden, latent)
    decoder = (latent, *reversed(hidden), PIXELS)
    specs = {"mean": _specs(encoder), "spread": _specs(encoder), "decoder": _specs(decoder)}
    networks: dict[str, Network] = draw(key, specs)
    return networks


def _specs(sizes: tuple[int, ...]) -> tuple[dict[str, Spec], ...]:
    *inner, last = pairwise(sizes)
    scales = [(pair, pair[1] ** -0.5) for pair in inner] + [(last, 1.0)]
    return tuple(
        {"w": Spec(pair, "normal", scale), "b": Spec(pair[1:], "normal", scale)} for pair, scale in scales
    )


def product(x: Array, w: Array) -> Array:
    """x w in the weights' type with float32 sums (float64 where both are)."""
    return jnp.matmul(x.astype(w.dtype), w, preferred_element_type=jnp.promote_types(x.dtype, w.dtype))


def forward(network: Network, x: Array) -> list[Array]:
    """The activations of each hidden layer (ReLU) and, last, the linear output."""
    activations = []
    for layer in network[:-1]:
        x = jax.nn.relu(product(x, layer["w"]) + layer["b"])
        activations.append(x)
    last = network[-1]
    return [*activations, product(x, last["w"]) + last["b"]]


def encode(networks: Any, images: Array) -> tuple[Array, Array]:
    mean = forward(networks["mean"], images)[-1]
    return mean, spread(forward(networks["spread"], images)[-1])


def spread(raw: Array) -> Array:
    """log(exp(a) + exp(1e-4)), positive for every finite a, as 1e-4 + softplus(a - 1e-4), which overflows nowhere."""
    return SMALLEST_SPREAD + jax.nn.softplus(raw - SMALLEST_SPREAD)


def widen(networks: Any) -> Any:
    return cast(networks, jnp.dtype(jnp.float32))


@jax.custom_jvp
def _short_softplus(x: Array) -> Array:
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


# By its parts the slope at 0 would be 0.
_short_softplus.defjvps(lambda tangent, value, x: tangent * jax.nn.sigmoid(x))


# On a CPU 0.08 ms for [100, 784] where `jax.nn.softplus`, the same without its care for two infinities, takes 0.14.
softplus = Operation(jax.nn.softplus, cpu=("short", _short_softplus))


def log_likelihood(logits: Array, images: Array) -> Array:
    """log p(x | z) of each row: the sum over pixels of x l - log(1 + exp l), finite for every finite l."""
    values: Array = (images * logits - softplus(logits)).sum(-1)
    return values


def log_prior(z: Array) -> Array:
    return -0.5 * (jnp.square(z).sum(-1) + z.shape[-1] * LOG_TWO_PI)


def log_normal(z: Array, mean: Array, spread: Array) -> Array:
    return log_prior((z - mean) / spread) - jnp.log(spread).sum(-1)


def log_joint(decoder: Network, images: Array, z: Array) -> Array:
    return log_likelihood(forward(decoder, z)[-1], images) + log_prior(z)


def value_and_gradient(decoder: Network, images: Array) -> ValueAndGradient:
    """z -> (log p(x, z), its gradient in z), each row for its own image: what the sampler evaluates 41 times an
    update."""
    # Transposed here, outside the sampler's loop; a path that has no use for it costs nothing.
    layers = [array for layer in decoder for array in (layer["w"], layer["b"], layer["w"].T)]

    def at(z: Array) -> tuple[Array, Array]:
        # Rows that belong together may be taken by another kernel; what broadcasts, or is one row, is plain.
        are_rows = images.ndim == z.ndim == 2 and len(images) == len(z)
        evaluate = likelihood_and_gradient if are_rows else _likelihood_and_gradient
        value, gradient = evaluate(images, z, *layers)
        return value + log_prior(z), gradient - z

    return at


def _likelihood_and_gradient(images: Array, z: Array, *layers: Array) -> tuple[Array, Array]:
    """log p(x | z) and its gradient in z, from the weights, the bias and the transposed weights of each layer.

    Written out: automatic differentiation gives the same numbers and, on the devices measured, was slower.
    """
    decoder = tuple({"w": w, "b": b} for w, b in zip(layers[::3], layers[1::3], strict=True))
    *hidden, logits = forward(decoder, z)
    back: Any = images - jax.nn.sigmoid(logits)
    for layer, activation in zip(decoder[:0:-1], reversed(hidden), strict=True):
        back = jnp.where(activation > 0, product(back, layer["w"].T), 0)
    return log_likelihood(logits, images), product(back, decoder[0]["w"].T)


likelihood_and_gradient = Operation(_likelihood_and_gradient, native_bernoulli.GRADIENT)
