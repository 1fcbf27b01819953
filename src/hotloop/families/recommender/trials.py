"""The trials of a sweep: what each is, what became of it, and how they stand while they run.

It knows the records of a run, not who ran it: `local_trials` and `ray_trials` do that.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hotloop.engine.progress import Progress
from hotloop.engine.run import read_events, read_json
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
    """The rate that the training began with, or that its --lr-schedule is made of."""
    last_learning_rate: float | None = None
    updates: int = 0
    users: int = 0
    """Users trained on, each as often as it was seen."""
    seconds: float = 0.0
    """Time of the updates alone: compiling, validating and saving are in no log's time."""
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


def read_figures(folder: str | Path) -> TrialFigures:
    """The figures of the run in a folder; empty ones where none was begun, or others wrote in it."""
    folder = Path(folder)
    try:
        config, events = read_json(folder / "config.json"), list(read_events(folder))
        batch = config["batch_size"]
        drops = config.get("lr_schedule", "drops") == "drops"
        rate = (
            2.0 ** config["base_learning_rate"] * batch * (config["learning_rate_decay"][0] if drops else 1)
        )
        end: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "end"), {})
        logs = [event for event in events if event["event"] == "log" and event["throughput"]]
        if not logs:
            return TrialFigures(rate, error=end.get("error"))
        last, updates = logs[-1], [0, *(log["update"] for log in logs)]
        return TrialFigures(
            rate,
            last["learning_rate"],
            last["update"],
            users=last["update"] * batch,
            seconds=sum(
                (after - before) * batch / log["throughput"]
                for (before, after), log in zip(pairwise(updates), logs, strict=True)
            ),
            maximum=max(log["throughput"] for log in logs),
            loss=last["loss"],
            rmse=last["rmse"],
            error=end.get("error"),
        )
    except (RunError, LookupError, TypeError, ArithmeticError):
        return TrialFigures()


@dataclass(frozen=True)
class TrialOutcome:
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
        ended = f"exit status {self.exit_status}"
        if self.exit_status < 0:
            known = {each.value: each.name for each in signal.Signals}
            ended = f"killed by {known.get(-self.exit_status, f'signal {-self.exit_status}')}"
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return f"{ended}: {lines[-1][:300] if lines else 'it said nothing'}"


Listener = Callable[[TrialOutcome], None]
Engine = Callable[[Sequence[Trial], Listener], tuple[list[TrialOutcome], int]]
"""Runs trials and tells of each as it ends; all outcomes in the order of the trials, and how many ran at a time."""


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
    parts = []
    for trial in trials:
        with suppress(RunError, LookupError, TypeError):  # none yet, or others wrote in it
            records = list(read_events(trial.folder))
            if records[-1]["event"] == "end":
                continue
            if any(record["event"] == "compile" for record in records):
                parts.append(f"trial {trial.number} at epoch {records[-1]['epoch']:.2f}")
            else:
                parts.append(f"trial {trial.number} compiling {time.time() - records[0]['time']:.0f} s")
    return f"sweep: {', '.join(parts)}" if parts else "sweep"
