"""What an earlier process has saved of a sampling: found, and compared with the sampling that is to go on from it.

All of it happens before the folder is written in, so that a refusal leaves a run as it was. It knows neither programs
nor densities: who asks brings the forms of what may be there, and a check of his own.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepLast
from hotloop.engine.interrupt import note_stops
from hotloop.engine.run import check_options, read_json, take_folder
from hotloop.errors import RunError
from hotloop.mcmc.kernel import State

ALIKE = 1e-3
"""What a density may differ by where the chains start, and where they were saved, to be the same on another machine."""
PHASES = "warmup", "draws"
MAY_DIFFER = ("devices",)
"""Settings with which a sampling may go on elsewhere."""


def describe_key(key: Array) -> dict[str, Any]:
    """Which key it is, for a config."""
    return {"key": np.asarray(jax.random.key_data(key)).tolist(), "generator": str(jax.random.key_impl(key))}


def describe_as_before(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as this folder has it: an older one has leaves by their names, of two that read alike the last."""
    by_name = dict(config["position"])
    is_older = read_json(folder / "config.json").get("position") == by_name
    return {**config, "position": by_name} if is_older else dict(config)


def describe_sampling(config: Mapping[str, Any], start: State) -> dict[str, Any]:
    """Goes with all that is saved: by what one tells whose it is, and whether its chains began at the same place."""
    return {
        "config": {name: value for name, value in config.items() if name not in MAY_DIFFER},
        "start": {
            "initial": float(np.abs(np.asarray(start.position, np.float64)).mean()),
            "log_density": float(np.asarray(start.log_density, np.float64).mean()),
        },
    }


def describe_density(chains: State, step: Array) -> dict[str, float]:
    """By what one tells whether a density is the same where the chains are.

    Times the step a gradient is about 1, in whatever units the density is. At a mode there is only the rounding of its
    sums, which other devices round otherwise: in the density's own units that may be any number, in these it is small.
    """
    moves = np.asarray(step, np.float64) * np.asarray(chains.gradient, np.float64)
    return {
        "log_density": float(np.asarray(chains.log_density, np.float64).mean()),
        "its gradient times the step": float(np.abs(moves).mean()),
    }


def check_density(folder: Path, saved: State, here: State, step: Array) -> None:
    """RunError where the log density `here` is another than the one that the saved chains come from."""
    _compare(folder, "log density", describe_density(here, step), describe_density(saved, step))


def _compare(folder: Path, what: str, here: Mapping[str, float], there: Mapping[str, float]) -> None:
    for name, value in here.items():
        was = there.get(name, float("nan"))
        if not isclose(value, was, rel_tol=ALIKE, abs_tol=ALIKE):
            raise RunError(
                f"{folder} cannot resume with another {what}: {name} is {value:.6g} there on "
                f"average, and was {was:.6g}; use the old log density and initial, or choose another folder"
            )


@dataclass(frozen=True)
class Found:
    """The newest whole state."""

    phase: str
    state: Any
    iteration: int
    """Before which it stands, counted from warm-up's first."""
    skipped: Sequence[str]
    """A line for each newer state that is damaged."""


def find_saved(
    folder: Path,
    config: Mapping[str, Any],
    start: State,
    forms: Mapping[str, Any],
    check: Callable[[Path, Any], None],
) -> Found | None:
    """What to go on from, None where nothing was ever saved; RunError where it is of another sampling.

    A state has one of the `forms`, by its phase, and `check` raises where it cannot be gone on from.
    """
    with ExitStack() as held, note_stops():
        held.callback(os.close, take_folder(folder, resume=True))
        check_options(folder, config, MAY_DIFFER)
        found = _find_newest(folder, describe_sampling(config, start), forms)
        if found is not None:
            check(folder, found.state)
    return found


def _find_newest(folder: Path, sampling: Mapping[str, Any], forms: Mapping[str, Any]) -> Found | None:
    for phase in reversed(PHASES):
        with open_checkpoints(folder, phase, sampling["config"]) as checkpoints:
            if not checkpoints.begun():
                continue
            found = checkpoints.restore(forms[phase])
        if found.position.get("config") != sampling["config"]:
            place = checkpoints.folder
            raise RunError(f"{place}: step {found.step} is of another sampling; choose another folder")
        _compare(folder, "start", sampling["start"], found.position.get("start", {}))
        return Found(phase, found.state, found.step, found.skipped)
    return None


def open_checkpoints(folder: Path, phase: str, config: Mapping[str, Any]) -> Checkpoints:
    return Checkpoints(folder / "checkpoints" / phase, KeepLast(2), family="hmc", config=config)
