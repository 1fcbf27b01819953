"""A planned run as data: compiled calls of weight updates, and the host events that follow each call.

`Plan` only lists; `plan.py` decides what goes into it. A call ends wherever an event is due, so calls may
differ in length and no event is ever lost. No jax, no numpy.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from hotloop.engine.batch import Batch
from hotloop.engine.periods import readable

Kind = Literal["log", "validate", "checkpoint"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Every kind of host event, in the order in which those after the same update happen."""


class Event(NamedTuple):
    """Something the host does after `update` updates, which are `epoch` epochs and `call` calls."""

    kind: Kind
    update: int
    epoch: float
    call: int


class Span(NamedTuple):
    """One compiled call, the `call`-th: `count` updates after `first` earlier ones, and its events."""

    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    call: int
    events: tuple[Event, ...]


class Mark(NamedTuple):
    """A kind of event and, as a range, the numbers of updates after which it happens."""

    kind: Kind
    updates: range


@dataclass(frozen=True)
class Plan:
    """A whole run, immutable and hashable; a million calls take a few numbers until they are listed."""

    total_updates: int
    updates_per_epoch: int | Fraction
    batch: Batch
    marks: tuple[Mark, ...]
    samples: int | None = None
    warnings: tuple[str, ...] = ()
    longest_call: int = 0
    """A call also ends after every so many updates of the run; 0: only where an event is due."""

    @property
    def epochs(self) -> Fraction:
        """Length of the run in epochs."""
        return Fraction(self.total_updates, self.updates_per_epoch)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The number of updates done at the end of each call."""
        cuts = range(self.longest_call, self.total_updates, self.longest_call) if self.longest_call else ()
        return tuple(sorted({self.total_updates}.union(cuts, *(mark.updates for mark in self.marks))))

    @property
    def calls(self) -> int:
        """Number of compiled calls."""
        return len(self.ends)

    @cached_property
    def updates_per_call(self) -> int:
        """Updates in the longest call."""
        return max(end - start for start, end in pairwise((0, *self.ends)))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every host event of the run, in order."""
        return tuple(event for span in self.spans() for event in span.events)

    def spans(self, start: int = 0) -> Iterator[Span]:
        """The calls still to make after `start` updates; the first is cut where `start` lies inside it."""
        first = start
        for index in range(bisect_right(self.ends, start), self.calls):
            end = self.ends[index]
            yield Span(first, end - first, index + 1, self._events_after(end, index + 1))
            first = end

    def _events_after(self, update: int, call: int) -> tuple[Event, ...]:
        epoch = float(update / self.updates_per_epoch)
        return tuple(Event(mark.kind, update, epoch, call) for mark in self.marks if update in mark.updates)

    def updates(self, kind: Kind) -> tuple[int, ...]:
        """The updates after which one kind of event happens."""
        return tuple(sorted({update for mark in self.marks if mark.kind == kind for update in mark.updates}))

    def describe(self) -> str:
        """The plan for people, one thing a line: batch, data, calls, events."""
        events = [self._describe_events(kind) for kind in KINDS]
        return "\n".join([self.batch.describe(), *self._describe_data(), self._describe_calls(), *events])

    def _describe_data(self) -> list[str]:
        if self.samples is None:
            return []
        left = self.samples - self.updates_per_epoch * self.batch.global_
        rest = f", {left:,} samples of each begin the next" if left > 0 else ""
        return [f"{self.samples:,} samples: {readable(self.updates_per_epoch)} weight updates an epoch{rest}"]

    def _describe_calls(self) -> str:
        equal = self.calls * self.updates_per_call == self.total_updates
        each = f"{'' if equal else 'at most '}{self.updates_per_call:,}"
        run = f"epochs: {readable(self.epochs)} = {self.total_updates:,} weight updates"
        return f"{run}; calls: {self.calls:,} of {each} updates"

    def _describe_events(self, kind: Kind) -> str:
        updates = [str(update) for update in self.updates(kind)]  # commas stand between them, so none within
        shown = updates if len(updates) <= 8 else [*updates[:5], "...", updates[-1]]
        return f"{kind}: {len(updates):,}" + (f", after update {', '.join(shown)}" if updates else "")

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        return {
            "samples": self.samples,
            "batch": self.batch.as_dict(),
            "epochs": float(self.epochs),
            "updates_per_epoch": self.updates_per_epoch
            if isinstance(self.updates_per_epoch, int)
            else float(self.updates_per_epoch),
            "total_updates": self.total_updates,
            "updates_per_call": self.updates_per_call,
            "calls": self.calls,
            "events": [
                {"event": event.kind, "update": event.update, "epoch": event.epoch, "call": event.call}
                for event in self.events
            ],
            "warnings": list(self.warnings),
        }
