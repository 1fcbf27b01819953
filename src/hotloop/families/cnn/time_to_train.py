"""Time to train: seconds from the start of training to the end of validation, over all processes that a run took.

Each process records when its clock starts. Those before it count up to their last record, so that work which was lost
and done again counts as well, and the time between two processes does not. It knows nothing of what is trained.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hotloop.engine.run import Run, read_events

STARTS = "training"
"""The record that a process's clock starts."""
TOOK = "time_to_train"
"""The record that the run is trained and validated, and how long that took."""


@dataclass(frozen=True)
class Clock:
    """A running clock: when it started here, and what earlier processes of the run had on theirs."""

    began: float
    before: float
    processes: int

    @classmethod
    def start(cls, record: Run) -> "Clock":
        """Start, and put it on record."""
        before = earlier(read_events(record.path))
        record.event(STARTS, process=len(before) + 1, seconds_before=sum(before))
        return cls(time.perf_counter(), sum(before), len(before) + 1)

    def stop(self, record: Run, update: int, epoch: float) -> dict[str, Any]:
        """Put the time to train on record."""
        seconds = self.before + time.perf_counter() - self.began
        record.event(TOOK, update=update, epoch=epoch, seconds=seconds, processes=self.processes)
        return {"time_to_train_seconds": seconds, "time_to_train_processes": self.processes}


def earlier(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """The seconds that each process had on its clock when it wrote its last record."""
    spent: list[float] = []
    began = None
    for event in events:
        if event["event"] == "start":
            began = None
        elif event["event"] == STARTS:
            began = event.get("elapsed", 0.0)
            spent.append(0.0)
        if began is not None:
            spent[-1] = event.get("elapsed", began) - began
    return spent


def in_words(figures: Mapping[str, Any]) -> str:
    """`time to train: h:mm:ss`, and in how many processes where it was not one."""
    whole, processes = round(figures["time_to_train_seconds"]), figures["time_to_train_processes"]
    clock = f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"time to train: {clock}" + (f", in {processes} processes" if processes > 1 else "")
