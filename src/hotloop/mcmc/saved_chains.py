"""A sampling that is kept in a folder as it goes, so that one that was stopped goes on and ends with the same bits.

It is a run's folder (engine/run.py): held by one process at a time, with config, environment and records; what is saved
of warm-up and of the draws are checkpoints, whole or not there, checked before they are believed. It knows neither
programs nor densities: what it saves is any pytree of arrays. What an earlier process has left saved_state.py finds.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.engine import processes
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.interrupt import Interrupted, StopRequest, note_stops, print_to_stderr
from hotloop.engine.run import Run, check_free
from hotloop.engine.sink_group import Sink
from hotloop.engine.sinks import console_line
from hotloop.errors import OptionError
from hotloop.mcmc.kernel import State
from hotloop.mcmc.saved_state import (
    MAY_DIFFER,
    PHASES,
    Found,
    describe_as_before,
    describe_sampling,
    find_saved,
    open_checkpoints,
)

SAVE_SECONDS = 30.0
"""Seconds after which what there is is saved again; a stop saves at once."""


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
    found: Found | None
    """Where it goes on; None where it begins."""
    saved_at: int = -1
    when: float = field(default_factory=time.monotonic)

    def announce_resume(self) -> None:
        """On record: where it goes on, and why not later."""
        if self.found is None:
            message = "nothing was saved before the stop, so the sampling starts over"
            self.record.event("warning", message=message, resumed=True)
            return
        self.record.event("resume", update=self.found.iteration, epoch=0.0)
        for line in self.found.skipped:
            self.record.event("warning", message=line, resumed=True)
        self.saved_at = self.found.iteration

    def after_piece(self, phase: str, done: int, state: Any) -> None:
        """Save what is due, or asked for by a stop, which then leaves."""
        number = self.request.number
        if number is not None or done == self.total or time.monotonic() - self.when >= SAVE_SECONDS:
            self._save(phase, done, state)
        if number is not None:
            self._wait()
            self._leave(done, number)

    def finish(self) -> None:
        """After the last piece all is saved: a stop that came since then leaves as one does that came before it."""
        self._wait()
        if self.request.number is not None:
            self._leave(self.total, self.request.number)

    def _wait(self) -> None:
        for checkpoints in self.checkpoints.values():
            checkpoints.wait()

    def _leave(self, done: int, number: int) -> None:
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
    folder: str | Path,
    config: Mapping[str, Any],
    start: State,
    *,
    total: int,
    resume: bool,
    forms: Mapping[str, Any],
    check: Callable[[Path, Any], None],
) -> Iterator[SavedChains]:
    """Hold a new folder, or with `resume` that of an earlier sampling with the same config, but for `devices`; see
    `find_saved` for `forms` and `check`."""
    path, found = Path(folder), None
    if resume:
        config = describe_as_before(path, config)
        found = find_saved(path, config, start, forms, check)
    record = Run(
        path,
        config,
        command=" ".join(sys.argv),
        resume=resume,
        may_differ=MAY_DIFFER,
        sinks=[_Warnings()],
    )
    record.how_to_resume = "call it again with resume=True"
    position = describe_sampling(config, start)
    with record, note_stops() as request, ExitStack() as opened:
        checkpoints = {
            phase: opened.enter_context(open_checkpoints(path, phase, position["config"])) for phase in PHASES
        }
        saved = SavedChains(record, checkpoints, position, request, total, found)
        if resume:
            saved.announce_resume()
        yield saved
        saved.finish()
