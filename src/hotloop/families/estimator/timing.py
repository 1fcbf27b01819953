"""The clock of a training: how fast its logs say it was, and which events are due by seconds."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotloop.engine.plan import Event, Kind


@dataclass
class Pace:
    """What the logs said about speed."""

    batch_size: int
    seconds: float = 0.0
    updates: int = 0
    _last: int = 0

    def start(self, step: int) -> None:
        """Where this process begins."""
        self._last = step

    def __call__(self, event: Event, figures: Mapping[str, Any]) -> None:
        """Take a log in."""
        updates, self._last = event.update - self._last, event.update
        if speed := figures.get("throughput"):
            self.seconds += updates * self.batch_size / speed
            self.updates += updates

    def figures(self) -> dict[str, Any]:
        """Updates and seconds of all logs, and samples a second."""
        speed = self.batch_size * self.updates / self.seconds if self.seconds else None
        return {"updates": self.updates, "training_seconds": self.seconds, "images_per_second": speed}


@dataclass
class Clock:
    """Which events are due by the clock."""

    log: float | None
    checkpoint: float | None
    validates: bool
    _since: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since = {"log": time.monotonic(), "checkpoint": time.monotonic()}

    def __call__(self, update: int) -> list[Kind]:
        """Asked after each call."""
        now, due = time.monotonic(), list[Kind]()
        if self.log is not None and now - self._since["log"] >= self.log:
            self._since["log"] = now
            due.append("log")
        if self.checkpoint is not None and now - self._since["checkpoint"] >= self.checkpoint:
            self._since["checkpoint"] = now
            due += ["validate", "checkpoint"] if self.validates else ["checkpoint"]
        return due
