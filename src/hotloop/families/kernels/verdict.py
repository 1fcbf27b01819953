"""What the HMC chains did, with standard errors, and for the toy whether it is what theory says exactly."""

import math
from collections.abc import Mapping
from typing import Any

from hotloop.engine.progress import Console
from hotloop.families.kernels import moments, targets
from hotloop.families.kernels.config import Hmc
from hotloop.families.kernels.sampling import Blocks

NO_TURN = 1e-6
REASONS = {
    "unstable": "the step size is beyond the stability limit sqrt 2: proposals run away",
    "periodic": "a trajectory ends at its start or its mirror image: the chain cannot mix, its moments say nothing",
    "unknown": "too few blocks for standard errors; use more --steps or --hmc-steps",
    "agrees": "all within four standard errors of the exact values",
}


def statistics(config: Hmc, blocks: Blocks, console: Console) -> dict[str, Any]:
    """Say and return acceptance, and for the toy its moments and the verdict."""
    acceptance = moments.mean(blocks.acceptance)
    result = {
        "acceptance": acceptance.value,
        "acceptance_error": acceptance.error,
        "accepted": moments.mean(blocks.accepted).value,
    }
    if config.target != "toy":
        console.say(f"acceptance {acceptance}")
        return result
    found = {
        "acceptance": acceptance,
        "mean": moments.mean(blocks.first),
        "variance": moments.variance(blocks.first, blocks.second),
    }
    values = {name: {"value": each.value, "error": each.error} for name, each in found.items()}
    return result | {"statistics": values, "verdict": judge(config, found, console)}


def judge(config: Hmc, found: Mapping[str, moments.Estimate], console: Console) -> str:
    """Say each figure beside its exact value, then the verdict: a key of REASONS, or `disagrees`."""
    turn = targets.toy_turn(config.leapfrog_step_size, config.leapfrog_steps)
    if math.isnan(turn) or abs(turn) < NO_TURN:
        for name, each in found.items():
            console.say(f"{name} {each.value:.5f}")
        verdict = "unstable" if math.isnan(turn) else "periodic"
    else:
        verdict = compare(config, found, console)
    if verdict in REASONS:
        console.say(REASONS[verdict])
    else:
        console.warn("acceptance or moments are more than four standard errors from the exact values")
    return verdict


def compare(config: Hmc, found: Mapping[str, moments.Estimate], console: Console) -> str:
    """Each figure against its exact value."""
    acceptance = targets.toy_acceptance(config.leapfrog_step_size, config.leapfrog_steps)
    exact = {"acceptance": acceptance, "mean": -0.5, "variance": 0.5}
    for name, each in found.items():
        console.say(
            f"{name} {each}, exactly {exact[name]:.5f}: {each.distance(exact[name]):+.1f} standard errors"
        )
    if any(math.isnan(each.error) for each in found.values()):
        return "unknown"
    return (
        "agrees" if all(abs(each.distance(exact[name])) <= 4 for name, each in found.items()) else "disagrees"
    )
