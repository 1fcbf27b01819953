"""What one trial came to, read back from its run's folder: rates, errors, and users a second.

Compiling, validating and saving are in no log's time, so they are in no figure here. It knows the records of a
run, not who ran it.

Trials as processes: each in a process group of its own, so many at a time, none left behind.
How the trials of a sweep stand, beside its bar: read from their runs' records while other processes train.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hotloop.engine.interrupt import before_leaving, raise_stops
from hotloop.engine.progress import Progress
from hotloop.engine.records import read_events, read_json
from hotloop.errors import RunError
from hotloop.families.recommender.local_trials import ChildProcesses, StreamTail
from hotloop.options.files import parse_json


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


def run_trial(
    trial: Trial, slot: int, environment: Mapping[str, str], children: ChildProcesses
) -> TrialOutcome:
    """Run a trial to its end."""
    began = time.monotonic()
    child = children.start(trial.command, environment)
    assert child.stdout is not None and child.stderr is not None
    out, err = StreamTail(child.stdout), StreamTail(child.stderr)
    status = child.wait(FOREVER)
    children.ended(child)
    seconds = time.monotonic() - began
    return TrialOutcome(
        trial, slot, status, seconds, _answer(out.text()), err.text(), read_figures(trial.folder)
    )


def _answer(text: str) -> Mapping[str, Any] | None:
    try:
        found = parse_json(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def run_all(
    trials: Sequence[Trial], environments: Sequence[Mapping[str, str]], ended: Callable[[TrialOutcome], None]
) -> list[TrialOutcome]:
    """Run every trial, as many at a time as there are environments; `ended` hears of each as it comes."""
    children = ChildProcesses()
    free: SimpleQueue[int] = SimpleQueue()
    for slot in range(len(environments)):
        free.put(slot)

    def one(trial: Trial) -> TrialOutcome:
        slot = free.get()
        try:
            return run_trial(trial, slot, environments[slot], children)
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


WATCH_SECONDS = 1.0
"""Seconds between looks."""


@contextmanager
def watch_trials(trials: Sequence[Trial], bar: Progress) -> Iterator[None]:
    """While the block runs, the bar says how the trials stand."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(WATCH_SECONDS):
            bar.update(describe_progress(trials))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe_progress(trials: Sequence[Trial]) -> str:
    """`sweep: trial 1 at epoch 3.25, trial 2 compiling 12 s`."""
    standing = ", ".join(filter(None, map(_standing, trials)))
    return f"sweep: {standing}" if standing else "sweep"


def _standing(trial: Trial) -> str | None:
    try:
        return _in_words(trial.number, list(read_events(trial.folder)))
    except (RunError, LookupError, TypeError):  # none yet, or others wrote in it
        return None


def _in_words(number: int, records: list[dict[str, Any]]) -> str | None:
    if not records or records[-1]["event"] == "end":
        return None
    if all(record["event"] != "compile" for record in records):
        return f"trial {number} compiling {time.time() - records[0]['time']:.0f} s"
    return f"trial {number} at epoch {records[-1]['epoch']:.2f}"
