"""A trial of a sweep: what it is, what became of it, and how it stands while it runs.

It is a command in a process of its own. One that fails is an outcome like any other, and the rest go on.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from hotloop.engine.progress import Progress
from hotloop.engine.run import read_events
from hotloop.errors import RunError
from hotloop.options.files import parse_json
from hotloop.sweeps.children import ChildProcesses

WARNING = "warning:"
WATCH_SECONDS = 1.0
TAIL_BYTES = 64 * 1024  # of each stream of a child, what is looked at
# Python waits for ever in one system call, but with a limit it looks about: Ray's cancelling is no signal.
FOREVER = 1e9


@dataclass(frozen=True)
class Figures:
    """What is read from a trial's run when it has ended; a family has more of its own."""

    error: str | None = None  # what ended the run, where it did not finish


def read_no_figures(folder: Path) -> Figures:
    return Figures()


@dataclass(frozen=True)
class Trial:
    """One training to run; numbers begin at 1."""

    number: int
    values: Mapping[str, Any]  # what it tries, by name
    folder: Path
    command: tuple[str, ...]
    read_figures: Callable[[Path], Figures] = read_no_figures
    """Of its run's folder, where the trial ran: on another machine the folder may be another one."""


@dataclass(frozen=True)
class TrialOutcome:
    trial: Trial
    slot: int  # trials of one slot ran one after the other; those of different slots at the same time
    exit_status: int  # as the shell counts it, but below zero for the signal that killed it
    seconds: float  # from its start to its end, imports and compiling included
    answer: Mapping[str, Any] | None  # the JSON object on the last line of its standard output
    said: str  # the end of its standard error
    figures: Any  # what the trial's `read_figures` found

    @property
    def status(self) -> str:
        if self.exit_status == 0 and self.answer is not None:
            return "finished"
        return "diverged" if (self.figures.error or "").startswith("Diverged") else "failed"

    @property
    def reason(self) -> str | None:
        """Why it did not finish, in one line: exit status and what it said last."""
        if self.status == "finished":
            return None
        ended = f"exit status {self.exit_status}"
        if self.exit_status < 0:
            known = {each.value: each.name for each in signal.Signals}
            ended = f"killed by {known.get(-self.exit_status, f'signal {-self.exit_status}')}"
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return f"{ended}: {lines[-1][:300] if lines else 'it said nothing'}"

    @property
    def warnings(self) -> list[str]:
        """What it warned of, without the word."""
        lines = [line for line in self.said.splitlines() if line.startswith(WARNING)]
        return [line[len(WARNING) :].strip() for line in lines]


def run_trial(
    trial: Trial, slot: int, environment: Mapping[str, str], children: ChildProcesses
) -> TrialOutcome:
    began = time.monotonic()
    # Into files: a child never waits for us, nor we for a grandchild that holds its streams open.
    with TemporaryFile() as out, TemporaryFile() as err:
        child = children.start(trial.command, environment, out, err)
        status = child.wait(FOREVER)
        children.forget(child)
        seconds = time.monotonic() - began
        answer, said = parse_answer(_read_tail(out)), _read_tail(err)
    return TrialOutcome(trial, slot, status, seconds, answer, said, trial.read_figures(trial.folder))


def _read_tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode(errors="replace")


def parse_answer(text: str) -> Mapping[str, Any] | None:
    try:
        found = parse_json(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


@contextlib.contextmanager
def watch_trials(trials: Sequence[Trial], bar: Progress) -> Iterator[None]:
    """Let the bar say how each of the trials stands, also of those that are added to the list meanwhile."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            bar.update(describe_progress(tuple(trials)))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe_progress(trials: Sequence[Trial]) -> str:
    """`sweep: trial 1 at epoch 3.25, trial 2 compiling 12 s`, of those whose records are here by now."""
    parts = []
    for trial in trials:
        with contextlib.suppress(RunError, LookupError, TypeError):  # none yet, or others wrote in it
            records = list(read_events(trial.folder))
            if records[-1]["event"] == "end":
                continue
            if any(record["event"] == "compile" for record in records):
                parts.append(f"trial {trial.number} at epoch {records[-1]['epoch']:.2f}")
            else:
                parts.append(f"trial {trial.number} compiling {time.time() - records[0]['time']:.0f} s")
    return f"sweep: {', '.join(parts)}" if parts else "sweep"
