"""A limit on the time that patterns may take: one that backtracks without end is given up instead of waited for.

Python's matcher looks for signals while it works, so a timer of the process's own computing time can end it; a busy
machine brings no pattern nearer to its limit. Only the main thread can have the timer: elsewhere there is no limit.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TICK = 0.1
LONGEST_SEARCH, LONGEST_OF_ALL = 3.0, 120.0
"""Seconds for one line, and for all lines of a run."""


class TooSlow(Exception):
    """A search was given up."""


class Stopwatch:
    """The time of one pattern's searches, in ticks that fell into them."""

    def __init__(self) -> None:
        self.all = self.search = 0.0

    def tick(self) -> None:
        """Count one; TooSlow where that is one too many."""
        self.all += TICK
        self.search += TICK
        if self.search > LONGEST_SEARCH:
            raise TooSlow(f"more than {LONGEST_SEARCH:g} seconds for one line")
        if self.all > LONGEST_OF_ALL:
            raise TooSlow(f"more than {LONGEST_OF_ALL:g} seconds for all lines")


class SearchLimit:
    """Whose search is on, if any. Set and reset for every line, so it is a plain attribute and no context."""

    def __init__(self) -> None:
        self.running: Stopwatch | None = None

    def begin(self, stopwatch: Stopwatch) -> None:
        """A search begins."""
        stopwatch.search = 0.0
        self.running = stopwatch

    def end(self) -> None:
        """No search is on."""
        self.running = None

    def _tick(self, number: int, frame: FrameType | None) -> None:
        if self.running is not None:
            self.running.tick()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold searches to their limits while the block runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGVTALRM, self._tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, TICK, TICK)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
