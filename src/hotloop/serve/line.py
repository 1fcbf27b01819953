"""Requests that wait for a device, and which of their rows come next.

A request that fits in a batch waits in the order of arrival. A larger one must be cut anyway; such take turns among
themselves, so that none of them holds up the others. It knows neither batches nor clocks.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hotloop.engine.exportable import Arrays

Rows = Mapping[str, NDArray[Any]]
"""Tensors by name, all with the same number of rows."""


@dataclass(eq=False)
class Request:
    """Rows in line; `taken` of them are in batches that run or ran, `done` are the outputs so far, by first row."""

    inputs: Rows
    rows: int
    future: asyncio.Future[Any]
    entered: float
    taken: int = 0
    started: float = 0.0
    answered: int = 0
    done: dict[int, Arrays] = field(default_factory=dict)


class Part(NamedTuple):
    request: Request
    start: int
    stop: int


class Line:
    """Requests in order, and the sum of their rows that no batch has taken."""

    def __init__(self, *, in_turns: bool = False):
        """`in_turns`: the rest of a request that was cut goes to the end; else it stays in front."""
        self._requests: deque[Request] = deque()
        self._in_turns = in_turns
        self.rows = 0

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self.rows += request.rows

    def drop(self, request: Request) -> None:
        """No row of it is needed any more; any number of times, also where all have been taken."""
        self.rows -= request.rows - request.taken
        request.taken = request.rows
        request.inputs = {}  # which may be large, and would stay until the next batch

    def first_entered(self) -> float | None:
        """When the one that has waited longest came; None where nobody waits."""
        return min((each.entered for each in self._requests if each.taken < each.rows), default=None)

    def take(self, room: int) -> list[Part]:
        """At most `room` rows from the front; those whose answer is settled are passed over."""
        parts: list[Part] = []
        requests = self._requests
        while room and requests:
            first = requests[0]
            if first.future.done():
                self.drop(first)
            count = min(room, first.rows - first.taken)
            if count:
                parts.append(Part(first, first.taken, first.taken + count))
                first.taken += count
                room -= count
                self.rows -= count
            if first.taken == first.rows:
                requests.popleft()
            elif self._in_turns:
                requests.rotate(-1)
        return parts
