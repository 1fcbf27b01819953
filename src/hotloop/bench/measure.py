"""One run of one variant: the program is started and watched, its numbers are read, and what came of it is judged.

What it gives are the parts of a record that only running can tell. It knows neither repeats nor other variants.
"""

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotloop.bench.capture import lines
from hotloop.bench.launch import Launch
from hotloop.bench.metrics import Found, by_fields, extract
from hotloop.bench.monitor import Monitor
from hotloop.bench.process import GRACE, KEEP_BYTES, Outcome, run_one
from hotloop.bench.record import metrics_of
from hotloop.bench.select import Selected


@dataclass(frozen=True)
class Limits:
    """What holds for every run."""

    timeout: float | None = None
    max_log_bytes: int = KEEP_BYTES
    grace: float = GRACE
    period: float = 1.0
    """Seconds between signs of life on a terminal."""
    monitor: bool = False


def measure(
    one: Selected, launch: Launch, folder: Path, limits: Limits, *, compile_only: bool = False
) -> dict[str, Any]:
    """Run it and say what came of it; the logs are in `folder`. A program that only compiles has no metrics."""
    both = [limit for limit in (limits.timeout, one.benchmark.timeout) if limit is not None]
    timeout = min(both, default=None)
    monitor = Monitor() if limits.monitor else None
    try:
        outcome = run_one(
            launch.argv,
            launch.folder,
            launch.env,
            timeout,
            folder / "stdout",
            folder / "stderr",
            limits.max_log_bytes,
            grace=limits.grace,
            started=monitor.watch if monitor else lambda pid: None,
            tick=lambda seconds: _sign_of_life(one.variant.name, seconds),
            period=limits.period,
        )
    finally:
        readings = monitor.stop() if monitor else {}
    result = _ended(outcome, timeout) or (
        {"status": "passed"} if compile_only else _judged(one, launch, folder)
    )
    log = {"stdout": "stdout", "stderr": "stderr"}
    return {**result, **_times(outcome), "monitor": readings, "log": log}


def _ended(outcome: Outcome, timeout: float | None) -> Mapping[str, Any] | None:
    """Why a program that did not end well does not count; its numbers are then not even looked at."""
    if outcome.timed_out:
        return {"status": "timeout", "reason": f"still running after {timeout:g} seconds"}
    if outcome.exitcode:
        return {"status": "failed", "reason": outcome.reason or _exit_words(outcome.exitcode)}
    return None


def _judged(one: Selected, launch: Launch, folder: Path) -> Mapping[str, Any]:
    """The metrics; one that is missing fails the run, and is named."""
    # What ran decides how many copies printed: a hotloop command is one process, whatever stood before the script.
    ran = replace(one.variant, cmd=launch.hotloop_command or launch.command)
    benchmark = by_fields(one.benchmark, launch.figures)
    found = extract(benchmark, lines(folder / "stdout"), lines(folder / "stderr"), ran)
    metrics = metrics_of(one.benchmark, one.variant, found)
    if not found.problems:
        return {"status": "passed", "metrics": metrics}
    return {"status": "failed", "reason": _problems(found), "metrics": metrics, "problems": found.problems}


def _problems(found: Found) -> str:
    return "; ".join(f"{name}: {why}" for name, why in found.problems.items())


def _times(outcome: Outcome) -> dict[str, Any]:
    if outcome.reason:
        return {"exitcode": outcome.exitcode}
    said = {"exitcode": outcome.exitcode, "seconds": outcome.seconds}
    left_out = {"left_out_bytes": outcome.left_out} if outcome.left_out else {}
    return {**said, "start": outcome.start, "end": outcome.end, **left_out}


def _exit_words(exitcode: int) -> str:
    if exitcode > 0:
        return f"ended with status {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


def _sign_of_life(name: str, seconds: float) -> None:
    """A line that is overwritten, and only where somebody watches."""
    if sys.stderr.isatty():
        clock = time.strftime("%H:%M:%S", time.gmtime(seconds))
        print(f"\r\033[K{name}  {clock}\r", end="", file=sys.stderr, flush=True)
