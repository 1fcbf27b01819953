"""What the HMC chains did, with standard errors, and for the toy whether it is what theory says exactly.

Errors come from the means of consecutive blocks of steps: blocks much longer than the chain's memory are nearly
independent, so the spread of their means tells the error of the whole mean, correlation included. It knows no sampler.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotloop.engine.progress import Console
from hotloop.families.kernels import targets
from hotloop.families.kernels.config import Hmc

FEWEST_BLOCKS = 20
NO_TURN = 1e-6
REASONS = {
    "unstable": "the step size is beyond the stability limit sqrt 2: proposals run away",
    "periodic": "a trajectory ends at its start or its mirror image: the chain cannot mix, its moments say nothing",
    "unknown": "too few blocks for standard errors; use more --steps or --hmc-steps",
    "agrees": "all within four standard errors of the exact values",
}


class Blocks(NamedTuple):
    """Means over all chains and over the steps of each block."""

    acceptance: Any
    accepted: Any
    first: Any
    """Of the position."""
    second: Any
    """Of its square."""


@dataclass(frozen=True)
class MeanWithError:
    """A mean and its standard error (nan where there are too few blocks to tell)."""

    value: float
    error: float

    def distance(self, exact: float) -> float:
        """How many standard errors the value lies above the exact one."""
        return (self.value - exact) / self.error if self.error else float("inf")

    def __str__(self) -> str:
        return f"{self.value:.5f} +- {self.error:.5f}"


def mean_of_blocks(blocks: Any) -> MeanWithError:
    values = np.asarray(blocks, np.float64)
    error = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size >= FEWEST_BLOCKS else float("nan")
    return MeanWithError(float(values.mean()), error)


def variance_of_blocks(firsts: Any, seconds: Any) -> MeanWithError:
    """The variance E[x^2] - m^2 from block means of x and x^2; its error is that of the mean of x^2 - 2 m x."""
    firsts, seconds = np.asarray(firsts, np.float64), np.asarray(seconds, np.float64)
    centre = float(firsts.mean())
    return MeanWithError(
        float(seconds.mean()) - centre**2, mean_of_blocks(seconds - 2 * centre * firsts).error
    )


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
    values = {name: {"value": each.value, "error": each.error} for name, each in found.items()}
    return result | {"statistics": values, "verdict": judge(config, found, console)}


def judge(config: Hmc, found: Mapping[str, MeanWithError], console: Console) -> str:
    """Say each figure beside its exact value, then the verdict: a key of REASONS, or `disagrees`."""
    trajectory = config.leapfrog_step_size, config.leapfrog_steps
    turn = targets.toy_turn(*trajectory)
    if math.isnan(turn) or abs(turn) < NO_TURN:
        for name, each in found.items():
            console.say(f"{name} {each.value:.5f}")
        verdict = "unstable" if math.isnan(turn) else "periodic"
    else:
        exact = {"acceptance": targets.toy_acceptance(*trajectory), "mean": -0.5, "variance": 0.5}
        away = {name: each.distance(exact[name]) for name, each in found.items()}
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
