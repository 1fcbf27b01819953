"""Trials as processes: each in a process group of its own, so many at a time, none left behind.

A trial that fails is an outcome like any other and the rest go on. Ctrl-C, SIGTERM and SIGHUP stop every child:
it may save what it has, and is killed if it does not. What a trial computes is not known here.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hotloop.engine.interrupt import before_leaving, raise_stops
from hotloop.families.recommender.children import Children, Tail
from hotloop.families.recommender.trial_figures import Figures, read_figures
from hotloop.options.files import parse_json

WARNING = "warning:"
FOREVER = 1e9
"""Seconds. Python waits for ever in one system call, but with a limit it looks about: Ray's cancelling is no signal."""


@dataclass(frozen=True)
class Trial:
    """One training to run; numbers begin at 1."""

    number: int
    exponent: float
    folder: Path
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    trial: Trial
    slot: int
    """Trials of one slot ran one after the other; those of different slots at the same time."""
    exit_status: int
    """As the shell counts it, but below zero for the signal that killed it."""
    seconds: float
    """From its start to its end, imports and compiling included."""
    answer: Mapping[str, Any] | None
    """The JSON object on the last line of its standard output."""
    said: str
    """The end of its standard error."""
    figures: Figures

    @property
    def status(self) -> str:
        """finished, diverged or failed."""
        if self.exit_status == 0 and self.answer is not None:
            return "finished"
        return "diverged" if (self.figures.error or "").startswith("Diverged") else "failed"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What it warned of."""
        lines = self.said.splitlines()
        return tuple(line[len(WARNING) :].strip() for line in lines if line.startswith(WARNING))

    @property
    def reason(self) -> str | None:
        """Why it did not finish, in one line: exit status and what it said last."""
        if self.status == "finished":
            return None
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        ended = f"exit status {self.exit_status}" if self.exit_status >= 0 else _signal_name(self.exit_status)
        return f"{ended}: {lines[-1][:300] if lines else 'it said nothing'}"


def _signal_name(status: int) -> str:
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def run_one(trial: Trial, slot: int, environment: Mapping[str, str], children: Children) -> Outcome:
    """Run a trial to its end."""
    began = time.monotonic()
    child = children.start(trial.command, environment)
    assert child.stdout is not None and child.stderr is not None
    out, err = Tail(child.stdout), Tail(child.stderr)
    status = child.wait(FOREVER)
    children.ended(child)
    seconds = time.monotonic() - began
    return Outcome(trial, slot, status, seconds, _answer(out.text()), err.text(), read_figures(trial.folder))


def _answer(text: str) -> Mapping[str, Any] | None:
    try:
        found = parse_json(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def run_all(
    trials: Sequence[Trial], environments: Sequence[Mapping[str, str]], ended: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run every trial, as many at a time as there are environments; `ended` hears of each as it comes."""
    children = Children()
    free: SimpleQueue[int] = SimpleQueue()
    for slot in range(len(environments)):
        free.put(slot)

    def one(trial: Trial) -> Outcome:
        slot = free.get()
        try:
            return run_one(trial, slot, environments[slot], children)
        finally:
            free.put(slot)

    outcomes = []
    with raise_stops(), before_leaving(children.kill), ThreadPoolExecutor(len(environments)) as pool:
        try:
            for future in as_completed([pool.submit(one, trial) for trial in trials]):
                outcomes.append(future.result())
                ended(outcomes[-1])
        except BaseException:
            children.stop()  # and none of the trials that wait will start
            raise
    return sorted(outcomes, key=lambda outcome: outcome.trial.number)
