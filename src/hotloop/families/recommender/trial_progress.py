"""How the trials of a sweep stand, beside its bar: read from their runs' records while other processes train.

A trial whose records are on another machine, or are not there yet, is not spoken of. It starts and stops nothing.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hotloop.engine.progress import Progress
from hotloop.engine.records import read_events
from hotloop.errors import RunError
from hotloop.families.recommender.trials import Trial

EVERY = 1.0
"""Seconds between looks."""


@contextmanager
def watch(trials: Sequence[Trial], bar: Progress) -> Iterator[None]:
    """While the block runs, the bar says how the trials stand."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(EVERY):
            bar.update(describe(trials))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe(trials: Sequence[Trial]) -> str:
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
