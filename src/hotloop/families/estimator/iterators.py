"""Iterators that are given to more than one call: each call goes on with the next batch, and none is lost.

An iterator cannot be begun again, and batches are drawn ahead of their use. So those that were seen are known again,
with the batches that were drawn from them and not used.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any


class Continued(Iterator[Any]):
    """An iterator that takes back what was drawn and not used."""

    def __init__(self, iterator: Iterator[Any]):
        self.iterator = iterator
        self.trained = False
        """Has it been trained with? Then its next batch is the one to go on with."""
        self._back: deque[Any] = deque()

    def __next__(self) -> Any:
        return self._back.popleft() if self._back else next(self.iterator)

    def give_back(self, batches: Iterable[Any]) -> None:
        """The next ones to come, in this order."""
        self._back.extendleft(reversed(list(batches)))


_known: dict[int, Continued] = {}


def continued(value: Iterable[Any]) -> Continued:
    """The one of an iterator that was seen before, or a new one."""
    iterator = iter(value)
    if iterator is not value:
        return Continued(iterator)  # begun right now: nobody can give it again
    _forget_the_unreachable()
    # It is held, so that no other has its number meanwhile; few kinds of iterators take a weak reference.
    return _known.setdefault(id(iterator), Continued(iterator))


def _forget_the_unreachable() -> None:
    """Let go of iterators that nobody but this module has: they cannot be given again, and they hold data."""
    for number in [number for number, each in _known.items() if sys.getrefcount(each.iterator) == _OURS]:
        del _known[number]


_OURS = 2  # references to an iterator: of its Continued, and of the question itself
