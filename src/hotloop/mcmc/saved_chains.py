"""A sampling that is kept in a folder as it goes, so that one that was stopped goes on and ends with the same bits.

It is a run's folder (engine/run.py): held by one process at a time, with config, environment and records; what is saved
of warm-up and of the draws are checkpoints, whole or not there, checked before they are believed. It knows neither
programs nor densities: what it saves is any pytree of arrays.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from hotloop.engine import processes
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepLast
from hotloop.engine.interrupt import Interrupted, StopRequest, note_stops, print_to_stderr
from hotloop.engine.run import Run, check_free
from hotloop.engine.sink_group import Sink
from hotloop.engine.sinks import console_line
from hotloop.errors import OptionError, RunError
from hotloop.mcmc.kernel import State

SAVE_SECONDS = 30.0
"""Seconds after which what there is is saved again; a stop saves at once."""
ALIKE = 1e-3
"""What a density may differ by where the chains start, and where they were saved, to be the same on another machine."""
PHASES = "warmup", "draws"


def check_folder(folder: Any, resume: bool) -> None:
    """RunError or OptionError for a folder that cannot be begun or gone on in, before anything is compiled."""
    if folder is None:
        if resume:
            raise OptionError("resume is True without a folder: give the folder of the run that was stopped")
    elif not isinstance(folder, str | Path) or folder == "":
        raise OptionError(f"folder is {folder!r}: a path is needed, or None to keep nothing")
    elif processes.count() > 1:
        raise OptionError(f"folder={folder}: HMC keeps no folder for several processes; leave it out")
    else:
        check_free(Path(folder), resume)


def describe_key(key: Array) -> dict[str, Any]:
    """Which key it is, for a config."""
    return {"key": np.asarray(jax.random.key_data(key)).tolist(), "generator": str(jax.random.key_impl(key))}


def describe_start(start: State) -> dict[str, float]:
    """By what one tells whether chains begin at the same place of the same density."""
    return {
        "initial": float(np.abs(np.asarray(start.position, np.float64)).mean()),
        "log_density": float(np.asarray(start.log_density, np.float64).mean()),
        "its gradient": float(np.abs(np.asarray(start.gradient, np.float64)).mean()),
    }


class _Warnings(Sink):
    """Warnings go to standard error; a sampling prints no other lines."""

    def write(self, record: Mapping[str, Any]) -> None:
        if record["event"] == "warning":
            print_to_stderr(console_line(record))

    def close(self) -> None:
        pass


@dataclass
class SavedChains:
    """The folder of one sampling while it is held: what was saved, and how and when to save."""

    record: Run
    checkpoints: Mapping[str, Checkpoints]
    position: Mapping[str, Any]
    """Goes with all that is saved: whose it is."""
    request: StopRequest
    total: int
    """Iterations of warm-up and draws together."""
    saved_at: int = -1
    when: float = field(default_factory=time.monotonic)

    def phase(self) -> str | None:
        """What was going on when it was last saved; None where nothing ever was."""
        found = next((phase for phase in reversed(PHASES) if self.checkpoints[phase].begun()), None)
        if self.record.resumed and found is None:
            message = "nothing was saved before the stop, so the sampling starts over"
            self.record.event("warning", message=message, resumed=True)
        return found

    def restore(self, phase: str, like: Any) -> tuple[Any, int]:
        """The newest whole state of a phase, and the iteration that it stands before, counted from warm-up's first."""
        found = self.checkpoints[phase].restore(like)
        self.record.event("resume", update=found.step, epoch=0.0)
        for line in found.skipped:
            self.record.event("warning", message=line, resumed=True)
        place, theirs = self.checkpoints[phase].folder, dict(found.position.get("start", {}))
        if found.position.get("config") != self.position["config"]:
            raise RunError(f"{place}: step {found.step} is of another sampling; choose another folder")
        self._compare("start", self.position["start"], theirs)
        self.saved_at = found.step
        return found.state, found.step

    def check_density(self, saved: State, here: State) -> None:
        """RunError where the log density `here` is another than the one that the saved chains come from."""
        self._compare("log density", describe_start(here), describe_start(saved))

    def _compare(self, what: str, here: Mapping[str, float], there: Mapping[str, float]) -> None:
        for name, value in here.items():
            was = there.get(name, float("nan"))
            if not isclose(value, was, rel_tol=ALIKE, abs_tol=ALIKE):
                raise RunError(
                    f"{self.record.path} cannot resume with another {what}: {name} is {value:.6g} there on "
                    f"average, and was {was:.6g}; use the old log density and initial, or choose another folder"
                )

    def after_piece(self, phase: str, done: int, state: Any) -> None:
        """Save what is due, or asked for by a stop, which then leaves."""
        number = self.request.number
        if number is not None or done == self.total or time.monotonic() - self.when >= SAVE_SECONDS:
            self._save(phase, done, state)
        if number is not None:
            self.checkpoints[phase].wait()
            place = f"interrupted after iteration {done:,} of {self.total:,}, saved in {self.record.path}"
            raise Interrupted(f"{place}; to resume: {self.record.how_to_resume}", done, number)

    def _save(self, phase: str, done: int, state: Any) -> None:
        if done == self.saved_at:
            return
        began = time.monotonic()
        self.checkpoints[phase].save(done, state, position=self.position)
        self.saved_at, self.when = done, time.monotonic()
        self.record.event("checkpoint", update=done, epoch=0.0, seconds=self.when - began)


@contextmanager
def open_saved_chains(
    folder: str | Path, config: Mapping[str, Any], start: State, *, total: int, resume: bool
) -> Iterator[SavedChains]:
    """Hold a new folder, or with `resume` that of an earlier sampling with the same config, but for `devices`."""
    record = Run(
        folder,
        config,
        command=" ".join(sys.argv),
        resume=resume,
        may_differ=("devices",),
        sinks=[_Warnings()],
    )
    record.how_to_resume = "call it again with resume=True"
    whose = {name: value for name, value in config.items() if name != "devices"}
    places = [record.checkpoints / phase for phase in PHASES]
    with record, note_stops() as request:
        opened = [Checkpoints(place, KeepLast(2), family="hmc", config=whose) for place in places]
        with opened[0], opened[1]:
            position = {"config": whose, "start": describe_start(start)}
            yield SavedChains(record, dict(zip(PHASES, opened, strict=True)), position, request, total)
