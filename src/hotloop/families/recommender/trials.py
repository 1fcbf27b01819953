"""The trials of a sweep: what each is, what became of it, and how they stand while they run.

Figures are read back from a trial's run folder. Compiling, validating and saving are in no log's time, so they are in
no figure here. It knows the records of a run, not who ran it: `local_trials` and `ray_trials` do that.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.engine.progress import Progress
from hotloop.engine.records import read_events, read_json
from hotloop.errors import RunError

WARNING = "warning:"
WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Trial:
    """One training to run; numbers begin at 1."""

    number: int
    exponent: float
    folder: Path
    command: tuple[str, ...]


@dataclass(frozen=True)
class TrialFigures:
    """Figures of a run, as far as it came; None where nothing was logged."""

    learning_rate: float | None = None
    """The rate that the training began with."""
    last_learning_rate: float | None = None
    updates: int = 0
    users: int = 0
    """Users trained on, each as often as it was seen."""
    seconds: float = 0.0
    """Time of the updates alone."""
    maximum: float | None = None
    """Users a second of the fastest log."""
    loss: float | None = None
    """Mean over the updates of the last log, as is `rmse`."""
    rmse: float | None = None
    error: str | None = None
    """What ended the run, where it did not finish."""

    @property
    def average(self) -> float | None:
        """Users a second over all logs: users by time, not a mean of rates."""
        return self.users / self.seconds if self.seconds else None


@dataclass(frozen=True)
class TrialOutcome:
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
    figures: TrialFigures

    @property
    def status(self) -> str:
        """finished, diverged or failed."""
        if self.exit_status == 0 and self.answer is not None:
            return "finished"
        return "diverged" if (self.figures.error or "").startswith("Diverged") else "failed"

    @property
    def warnings(self) -> tuple[str, ...]:
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


Listener = Callable[[TrialOutcome], None]
Engine = Callable[[Sequence[Trial], Listener], tuple[list[TrialOutcome], int]]
"""Runs trials and tells of each as it ends; all outcomes in the order of the trials, and how many ran at a time."""


def _signal_name(status: int) -> str:
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def read_figures(folder: str | Path) -> TrialFigures:
    """The figures of the run in a folder; empty ones where none was begun, or others wrote in it."""
    folder = Path(folder)
    try:
        return _figures(read_json(folder / "config.json"), list(read_events(folder)))
    except (RunError, LookupError, TypeError, ArithmeticError):
        return TrialFigures()


def _figures(config: dict[str, Any], events: list[dict[str, Any]]) -> TrialFigures:
    batch = config["batch_size"]
    rate = 2.0 ** config["base_learning_rate"] * batch * config["learning_rate_decay"][0]
    end: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "end"), {})
    logs = [event for event in events if event["event"] == "log"]
    return TrialFigures(learning_rate=rate, error=end.get("error"), **_logged(logs, batch))


def _logged(logs: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    timed = [log for log in logs if log["throughput"]]
    if not timed:
        return {}
    before, seconds = 0, 0.0
    for log in timed:
        seconds += (log["update"] - before) * batch / log["throughput"]
        before = log["update"]
    last = timed[-1]
    return {
        "last_learning_rate": last["learning_rate"],
        "updates": last["update"],
        "users": last["update"] * batch,
        "seconds": seconds,
        "maximum": max(log["throughput"] for log in timed),
        "loss": last["loss"],
        "rmse": last["rmse"],
    }


@contextmanager
def watch_trials(trials: Sequence[Trial], bar: Progress) -> Iterator[None]:
    """While the block runs, the bar says how the trials stand."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            bar.update(describe_progress(trials))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe_progress(trials: Sequence[Trial]) -> str:
    """`sweep: trial 1 at epoch 3.25, trial 2 compiling 12 s`.

    A trial whose records are on another machine, or are not there yet, is not spoken of.
    """
    parts = ", ".join(filter(None, map(_describe_trial, trials)))
    return f"sweep: {parts}" if parts else "sweep"


def _describe_trial(trial: Trial) -> str | None:
    try:
        records = list(read_events(trial.folder))
        if not records or records[-1]["event"] == "end":
            return None
        if all(record["event"] != "compile" for record in records):
            return f"trial {trial.number} compiling {time.time() - records[0]['time']:.0f} s"
        return f"trial {trial.number} at epoch {records[-1]['epoch']:.2f}"
    except (RunError, LookupError, TypeError):  # none yet, or others wrote in it
        return None
