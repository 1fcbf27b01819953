"""The densities that the HMC benchmark samples, each with a float64 reference, and what is known of the toy.

It knows nothing of samplers beyond the leapfrog's linear map on a Gaussian.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.families.kernels import costs
from hotloop.families.kernels.config import Hmc


@dataclass(frozen=True)
class Target:
    """A log density over positions [chains, z]."""

    start: Array
    data: Any
    """Arrays that the density needs; an argument of the compiled call, which would else fold them in."""
    log_density: Callable[[Any, Array], Array]
    """(data, positions) -> [chains]."""
    reference: Callable[[Any, Any], tuple[Any, Any]]
    """(data, positions), both float64 -> (log density, gradient), written by hand."""
    cost: costs.Cost


def build(config: Hmc) -> Target:
    return {"toy": toy, "vcd": vcd}[config.target](config)


def toy(config: Hmc) -> Target:
    """log density -x - x^2: a Gaussian of mean -1/2 and variance 1/2. Every chain starts at 1."""
    chains = config.number_of_chains
    return Target(
        start=jnp.ones((chains, 1)),
        data=(),
        log_density=lambda _, x: (-x - x * x).sum(-1),
        reference=lambda _, x: ((-x - x**2).sum(-1), -1 - 2 * x),
        cost=costs.hmc_toy(config.leapfrog_steps, chains),
    )


def vcd(config: Hmc) -> Target:
    """log N(z; 0, I) + Bernoulli log likelihood of random images under a random 10-200-200-784 ReLU decoder."""
    generator, chains = np.random.default_rng(config.seed), config.number_of_chains
    weights = [
        (generator.normal(0, (2 / inputs) ** 0.5, (inputs, outputs)), np.zeros(outputs))
        for inputs, outputs in pairwise(costs.VCD_SIZES)
    ]
    images = generator.integers(0, 2, (chains, costs.VCD_SIZES[-1]))
    return Target(
        start=jnp.asarray(generator.normal(size=(chains, costs.VCD_SIZES[0])), jnp.float32),
        data=jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.float32), {"weights": weights, "images": images}
        ),
        log_density=_decoder_log_density,
        reference=_decoder_reference,
        cost=costs.hmc_vcd(config.leapfrog_steps, chains),
    )


def _decoder_log_density(data: Any, z: Array) -> Array:
    *inner, (kernel, bias) = data["weights"]
    hidden = z
    for inner_kernel, inner_bias in inner:
        hidden = jax.nn.relu(hidden @ inner_kernel + inner_bias)
    logits = hidden @ kernel + bias
    likelihood = (data["images"] * logits - jax.nn.softplus(logits)).sum(-1)
    return jnp.asarray(likelihood - 0.5 * jnp.square(z).sum(-1))


def _decoder_reference(data: Any, z: Any) -> tuple[Any, Any]:
    weights, images = data["weights"], data["images"]
    activations = [z]
    for kernel, bias in weights[:-1]:
        activations.append(np.maximum(activations[-1] @ kernel + bias, 0))
    logits = activations[-1] @ weights[-1][0] + weights[-1][1]
    value = (images * logits - np.logaddexp(0, logits)).sum(-1) - 0.5 * (z**2).sum(-1)
    back = images - 1 / (1 + np.exp(-logits))
    for (kernel, _), activation in zip(weights[:0:-1], activations[:0:-1], strict=True):
        back = (back @ kernel.T) * (activation > 0)
    return value, back @ weights[0][0].T - z


TOY_FREQUENCY = math.sqrt(2)
"""Of the dynamics under -x - x^2: the square root of its curvature."""


def toy_turn(step_size: float, leapfrog_steps: int) -> float:
    """The sine of the angle by which a trajectory turns; nan where the step (sqrt 2 and more) is unstable.

    On a Gaussian of frequency w one leapfrog of length e is, in suitable coordinates, a rotation by the angle
    whose cosine is 1 - (e w)^2 / 2.
    """
    cosine = 1 - (step_size * TOY_FREQUENCY) ** 2 / 2
    return math.sin(leapfrog_steps * math.acos(cosine)) if abs(cosine) < 1 else math.nan


def toy_acceptance(step_size: float, leapfrog_steps: int) -> float:
    """The exact acceptance on the toy, 1 - (2 / pi) atan(sqrt(m / 2)), with m the mean change of energy.

    The coordinates in which a leapfrog is a rotation stretch one axis by k = (1 - (e w)^2 / 4)^(-1/2), so
    that m = sin^2 (k - 1/k)^2 / 2. At e = 1 and odd L this is (4 / pi) atan(1 / sqrt 2) = 0.7837.
    """
    stretch = (1 - (step_size * TOY_FREQUENCY) ** 2 / 4) ** -0.5
    mean_change = 0.5 * (toy_turn(step_size, leapfrog_steps) * (stretch - 1 / stretch)) ** 2
    return 1 - 2 / math.pi * math.atan(math.sqrt(mean_change / 2))
