"""Long JSON, read and written in a process of its own: Python does it in one go, and everybody else would wait.

The process is started by the first that needs it, has less of the processor than those who answer, and goes with its
parent. What is handed over are arrays and bytes of our own; nothing that a client sent is unpickled.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, TypeVar

from hotloop.serve.refusal import QueueFull, Unready

LONG = 1 << 14  # bytes of JSON from which it is read elsewhere: those before take a few milliseconds at most
NICE = 10
T = TypeVar("T")


class LongJson:
    """The process, and who waits for it to read; called in the event loop."""

    def __init__(self, most_bytes: int, most_requests: int):
        """So many requests may wait to be read, and so many bytes of them unless it is the only one."""
        self._most_bytes, self._most_requests = most_bytes, most_requests
        self._bytes = self._requests = 0
        self._pool: ProcessPoolExecutor | None = None
        self._life: connection.Connection | None = None
        """Closed, it ends the process in the middle of its work, for which the pool would wait."""

    async def read(self, function: Callable[[bytes], T], body: bytes) -> T:
        """What a function that can be pickled makes of a body.

        QueueFull where too many wait already, Unready where the process has ended.
        """
        self.check_room(len(body))
        self._bytes += len(body)
        self._requests += 1
        try:
            return await self._call(function, body)
        finally:
            self._bytes -= len(body)
            self._requests -= 1

    @property
    def is_full(self) -> bool:
        """Whether the next one may be refused: most are not, and need not be looked at."""
        return self._requests >= self._most_requests or 2 * self._bytes > self._most_bytes

    def check_room(self, size: int) -> None:
        """QueueFull where so many bytes of JSON more would be too many; the rest of such a body is not read."""
        is_over = self._requests and self._bytes + size > self._most_bytes
        if size > LONG and (is_over or self._requests >= self._most_requests):
            raise QueueFull(
                f"{self._requests} requests of long JSON wait already; try again later, or send tensors as bytes",
                1,
                is_last=True,
            )

    async def write(self, function: Callable[[Any], T], outputs: Any) -> T:
        """The same for outputs; nobody who has been let in is refused here."""
        return await self._call(function, outputs)

    async def _call(self, function: Callable[[Any], T], argument: Any) -> T:
        pool = self._pool
        if pool is None:
            context = multiprocessing.get_context("spawn")  # a fork would have this one's threads' locks
            other_end, self._life = context.Pipe(duplex=False)
            pool = self._pool = ProcessPoolExecutor(1, context, _begin, (other_end,))
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, argument)
        except BrokenProcessPool:
            if self._pool is pool:
                self._pool = None
            raise Unready("the process that reads long JSON has ended; try again") from None

    def close(self) -> None:
        """End the process; nobody waits for it any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._life is not None:
            self._life.close()


def _begin(life: connection.Connection) -> None:
    """In the process: signals are the parent's to hear, and who answers comes first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    threading.Thread(target=_leave_with_parent, args=(life,), daemon=True).start()


def _leave_with_parent(life: connection.Connection) -> None:
    """Or before it, when the parent closes its end of `life`."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel, life])
        os._exit(0)
