"""The densities that the HMC benchmark samples, each with a float64 reference, and what chains on the toy must do.

Errors come from the means of consecutive blocks of steps: blocks much longer than the chain's memory are nearly
independent, so the spread of their means tells the error of the whole mean, correlation included.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine.progress import Console
from hotloop.families.kernels.config import Hmc
from hotloop.families.kernels.costs import Cost

VCD_SIZES = (10, 200, 200, 784)
FEWEST_BLOCKS = 20
NO_TURN = 1e-6
REASONS = {
    "unstable": "the step size is beyond the stability limit sqrt 2: proposals run away",
    "periodic": "a trajectory ends at its start or its mirror image: the chain cannot mix, its moments say nothing",
    "unknown": "too few blocks for standard errors; use more --steps or --hmc-steps",
    "agrees": "all within four standard errors of the exact values",
}


@dataclass(frozen=True)
class Target:
    """A log density over positions [chains, z]."""

    start: Array
    data: Any
    """Arrays that the density needs; an argument of the compiled call, which would else fold them in."""
    log_density: Callable[[Any, Array], Array]  # (data, positions) -> [chains]
    reference: Callable[[Any, Any], tuple[Any, Any]]
    """(data, positions), both float64 -> (log density, gradient), written by hand."""
    cost: Cost


def build(config: Hmc) -> Target:
    return {"toy": toy, "vcd": vcd}[config.target](config)


def toy(config: Hmc) -> Target:
    """log density -x - x^2: a Gaussian of mean -1/2 and variance 1/2. Every chain starts at 1."""
    chains, leapfrogs = config.number_of_chains, config.leapfrog_steps
    return Target(
        start=jnp.ones((chains, 1)),
        data=(),
        log_density=lambda _, x: (-x - x * x).sum(-1),
        reference=lambda _, x: ((-x - x**2).sum(-1), -1 - 2 * x),
        # About so many operations, and no memory at all: a chain of dependent instructions.
        cost=Cost((6 * leapfrogs + 20) * chains, 0, 0, 0, leapfrogs),
    )


def vcd(config: Hmc) -> Target:
    """log N(z; 0, I) + Bernoulli log likelihood of random images under a random 10-200-200-784 ReLU decoder."""
    generator, chains = np.random.default_rng(config.seed), config.number_of_chains
    weights = [
        (generator.normal(0, (2 / inputs) ** 0.5, (inputs, outputs)), np.zeros(outputs))
        for inputs, outputs in pairwise(VCD_SIZES)
    ]
    images = generator.integers(0, 2, (chains, VCD_SIZES[-1]))
    start = generator.normal(size=(chains, VCD_SIZES[0]))

    def log_density(data: Any, z: Array) -> Array:
        *inner, (kernel, bias) = data["weights"]
        hidden = z
        for inner_kernel, inner_bias in inner:
            hidden = jax.nn.relu(hidden @ inner_kernel + inner_bias)
        logits = hidden @ kernel + bias
        likelihood = (data["images"] * logits - jax.nn.softplus(logits)).sum(-1)
        return jnp.asarray(likelihood - 0.5 * jnp.square(z).sum(-1))

    def reference(data: Any, z: Any) -> tuple[Any, Any]:
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

    # Decoder forward and back to its input, once a leapfrog: the gradient at the start is kept.
    products, leapfrogs = sum(a * b for a, b in pairwise(VCD_SIZES)), config.leapfrog_steps
    size = products + sum(VCD_SIZES[1:])
    moved = 4 * (chains * (VCD_SIZES[-1] + 2 * VCD_SIZES[0]) + size)
    serial = leapfrogs * 2 * (len(VCD_SIZES) - 1)
    cost = Cost(4 * products * leapfrogs * chains, moved, leapfrogs * moved, 4 * size, serial)
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), {"weights": weights, "images": images})
    return Target(jnp.asarray(start, jnp.float32), arrays, log_density, reference, cost)


TOY_FREQUENCY = math.sqrt(2)  # of the dynamics under -x - x^2: the square root of its curvature


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


class Blocks(NamedTuple):
    """Means over all chains and over the steps of each block."""

    acceptance: Any
    accepted: Any
    first: Any  # of the position
    second: Any  # of its square


class MeanWithError(NamedTuple):
    value: float
    error: float  # standard; nan where there are too few blocks to tell

    def __str__(self) -> str:
        return f"{self.value:.5f} +- {self.error:.5f}"


def mean_of_blocks(blocks: Any) -> MeanWithError:
    values = np.asarray(blocks, np.float64)
    error = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size >= FEWEST_BLOCKS else math.nan
    return MeanWithError(float(values.mean()), error)


def variance_of_blocks(firsts: Any, seconds: Any) -> MeanWithError:
    """The variance E[x^2] - m^2 from block means of x and x^2; its error is that of the mean of x^2 - 2 m x."""
    firsts, seconds = np.asarray(firsts, np.float64), np.asarray(seconds, np.float64)
    centre = float(firsts.mean())
    error = mean_of_blocks(seconds - 2 * centre * firsts).error
    return MeanWithError(float(seconds.mean()) - centre**2, error)


def report_statistics(config: Hmc, blocks: Blocks, console: Console) -> dict[str, Any]:
    """Say and return acceptance, and for the toy its moments and the verdict."""
    acceptance = mean_of_blocks(blocks.acceptance)
    result = {
        "acceptance": acceptance.value,
        "acceptance_error": acceptance.error,
        "accepted": mean_of_blocks(blocks.accepted).value,
    }
    if config.target != "toy":
        console.say(f"acceptance {acceptance}")
        return result
    found = {
        "acceptance": acceptance,
        "mean": mean_of_blocks(blocks.first),
        "variance": variance_of_blocks(blocks.first, blocks.second),
    }
    statistics = {name: each._asdict() for name, each in found.items()}
    return result | {"statistics": statistics, "verdict": judge(config, found, console)}


def judge(config: Hmc, found: Mapping[str, MeanWithError], console: Console) -> str:
    """Say each figure beside its exact value, then the verdict: a key of REASONS, or `disagrees`."""
    trajectory = config.leapfrog_step_size, config.leapfrog_steps
    turn = toy_turn(*trajectory)
    if math.isnan(turn) or abs(turn) < NO_TURN:
        for name, each in found.items():
            console.say(f"{name} {each.value:.5f}")
        verdict = "unstable" if math.isnan(turn) else "periodic"
    else:
        exact = {"acceptance": toy_acceptance(*trajectory), "mean": -0.5, "variance": 0.5}
        away = {
            name: (each.value - exact[name]) / each.error if each.error else math.inf
            for name, each in found.items()
        }
        for name, each in found.items():
            console.say(f"{name} {each}, exactly {exact[name]:.5f}: {away[name]:+.1f} standard errors")
        verdict = "agrees" if all(abs(errors) <= 4 for errors in away.values()) else "disagrees"
        if any(math.isnan(each.error) for each in found.values()):
            verdict = "unknown"
    if verdict in REASONS:
        console.say(REASONS[verdict])
    else:
        console.warn("acceptance or moments are more than four standard errors from the exact values")
    return verdict
