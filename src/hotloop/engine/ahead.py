"""Do the next piece of host work on a thread while the device is busy with the last one.

One piece is in the making and one in use, never more. It must not know what is made.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Calls `make(first, count)` on one background thread, one call ahead of who takes the results."""

    def __init__(self, make: Callable[[int, int], Made]):
        self._make = make
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hotloop-feed")
        self._next: tuple[tuple[int, int], Future[Made]] | None = None

    def take(self, first: int, count: int, following: int) -> Made:
        """What `make(first, count)` gives, and start on the `following` updates after it (0 for none).

        An exception of `make` is raised here, as it was raised there.
        """
        prepared, self._next = self._next, None
        if prepared is not None and prepared[0] == (first, count):
            future = prepared[1]
        else:
            if prepared is not None:
                prepared[1].cancel()
            future = self._pool.submit(self._make, first, count)
        made = future.result()
        if following:
            after = (first + count, following)
            self._next = (after, self._pool.submit(self._make, *after))
        return made

    def close(self) -> None:
        """Drop what is prepared and end the thread."""
        self._next = None
        self._pool.shutdown(wait=True, cancel_futures=True)
