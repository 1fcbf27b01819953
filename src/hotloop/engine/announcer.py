"""Records of work that leaves no folder, such as validating a finished run: sinks see them, nothing is written."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from hotloop.engine import records
from hotloop.engine.sink_guard import GuardedSink
from hotloop.engine.sinks import Sink


class Recorder(Protocol):
    """Who is told what happens: a run with its folder, or an announcer."""

    def event(
        self, event: str, *, update: int | None = None, epoch: float | None = None, **figures: Any
    ) -> dict[str, Any]:
        """Take one record."""


class Announcer:
    """Hands each record to the sinks and forgets it; a sink that fails is named and left out."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks, self._began = [*map(GuardedSink, sinks)], time.monotonic()

    def event(
        self, event: str, *, update: int | None = None, epoch: float | None = None, **figures: Any
    ) -> dict[str, Any]:
        """As a run's `event`."""
        record = records.compose(event, update or 0, epoch or 0.0, time.monotonic() - self._began, figures)
        for sink in tuple(self._sinks):
            self._try(sink, partial(sink.write, record))
        return record

    def _try(self, sink: GuardedSink, work: Callable[[], None]) -> None:
        if sink not in self._sinks:  # it failed at the warning about another one
            return
        try:
            work()
        except Exception as error:
            sink.abandon()
            self._sinks.remove(sink)
            self.event("warning", message=f"{sink.name} failed and is off: {error}")

    def __enter__(self) -> "Announcer":
        return self

    def __exit__(self, *exception: object) -> None:
        for sink in tuple(self._sinks):
            self._try(sink, sink.close)
