"""Runs examples/digits.py as people do, in a process of its own, and reads what it left."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.run import current_records, read_events

PROGRAM = Path(__file__).parents[2] / "examples" / "digits.py"
SMALL = ("--samples=600", "--batch-size=30", "--hidden=8", "--epochs=20")
UPDATES, CHECKPOINT_EVERY = 400, 20


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """A small run of 400 updates with a checkpoint every twenty."""
    words = [sys.executable, str(PROGRAM), "--run", str(folder), *SMALL, *options]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a run that should succeed."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    """Until something is true of a run that is still going."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"the run ended too early: {process.communicate()}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def reached(folder: Path) -> int:
    """The newest checkpoint so far; cheap, so that a run cannot end between two looks."""
    return max((int(step.name) for step in (folder / "checkpoints").glob("[0-9]*")), default=0)


def final(folder: Path, like: Any) -> Any:
    """The state after the last update."""
    restored = Checkpoints(folder / "checkpoints").restore(like)
    assert restored.step == UPDATES and not restored.skipped
    return restored.state


def logged(folder: Path) -> list[tuple[int, float]]:
    """Update and loss of every log of the run as it stands."""
    records = current_records(read_events(folder))
    return [(record["update"], record["loss"]) for record in records if record["event"] == "log"]
