"""Batches of an input that may end: an iterable that is gone through pass after pass.

Update n takes batch n of the endless row of passes, so that a run that is resumed goes on where it stopped: the batches
before are drawn and dropped. A run that reaches the end of a pass is told so (`Ended`) and stops there; the next one
begins a new pass. It must not know what a batch holds.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from hotloop.engine.order import check_same
from hotloop.errors import DataError


class Ended(DataError):
    """There is no further batch; `left` of those asked for are still there."""

    def __init__(self, left: int):
        super().__init__("the input has ended")
        self.left = left


class Turns:
    """Batches in the order of an iterable; `begin` makes a new pass over it. For `feed.Streamed`."""

    samples = None

    def __init__(
        self, begin: Callable[[], Iterator[Any]], batch_size: int, first: int = 0, *, drop: int | None = None
    ):
        """Update `first` is the first to come; `drop` batches lie before it (none given: one for each update)."""
        self._begin, self._batch_size = begin, batch_size
        self._first = first
        self._kept: deque[Any] = deque()
        self._dropped = first if drop is None else drop
        self._iterator = self._after(self._dropped)

    def _after(self, batches: int) -> Iterator[Any]:
        """A pass that stands behind so many batches of all passes."""
        iterator, left = self._begin(), batches
        while left:
            passed = sum(1 for _ in islice(iterator, left))
            if not passed:
                raise _too_short(left) if left < batches else _empty()
            left -= passed
            iterator = self._begin() if left else iterator
        return iterator

    def example(self) -> Any:
        """The first batch to come; it stays."""
        if not self._draw(1):
            self._iterator = self._begin()  # the input ended right here: a new pass begins
            if not self._draw(1):
                raise _too_short(0) if self._dropped else _empty()
        return self._kept[0]

    def batches(self, first: int, count: int) -> Iterator[Any]:
        """The batches of updates first .. first + count - 1; earlier ones are dropped."""
        if first < self._first:
            raise DataError(f"an iterator cannot go back to batch {first}: it stands at batch {self._first}")
        while self._first < first and self._draw(1):
            self._kept.popleft()
            self._first += 1
        if self._first < first or not self._draw(count):
            raise Ended(len(self._kept))
        yield from islice(self._kept, count)

    def unused(self, update: int) -> list[Any]:
        """What is drawn already of the batches from `update` on."""
        return list(islice(self._kept, update - self._first, None))

    def _draw(self, wanted: int) -> bool:
        """Have so many batches at hand; says whether there are."""
        self._kept.extend(islice(self._iterator, max(0, wanted - len(self._kept))))
        return len(self._kept) >= wanted

    @property
    def drawn(self) -> int:
        """How many batches the input has given, those before the first update included."""
        return self._first + len(self._kept)

    def position(self, update: int) -> dict[str, Any]:
        """An iterable knows no samples and no seed."""
        return {"batch_size": self._batch_size, "update": update}

    def check_position(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that another batch size made."""
        check_same(self.position(0), saved)


def _too_short(left: int) -> DataError:
    return DataError(
        f"the input has ended {left} batches before the one to go on with: give what can be begun again"
    )


def _empty() -> DataError:
    return DataError("the input has no batches: give at least one")
