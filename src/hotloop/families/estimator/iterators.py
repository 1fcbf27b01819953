"""Iterators that are given to more than one call: each call goes on with the next batch, and none is lost.

An iterator cannot be begun again, and batches are drawn ahead of their use. So those that were seen are known again,
with the batches that were drawn from them and not used.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

REMEMBERED = 4
"""So many iterators are held, the last ones: they hold data, and few kinds of them take a weak reference."""


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


_known: OrderedDict[int, Continued] = OrderedDict()


def continued(value: Iterable[Any]) -> Continued:
    """The one of an iterator that was seen before, or a new one."""
    iterator = iter(value)
    if iterator is not value:
        return Continued(iterator)  # begun right now: nobody can give it again
    found = _known.pop(id(iterator), None) or Continued(iterator)
    _known[id(iterator)] = found  # it is held, so that no other has its number meanwhile
    while len(_known) > REMEMBERED:
        _known.popitem(last=False)
    return found
