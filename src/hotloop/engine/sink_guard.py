"""A sink that cannot harm its run: what fails is raised, and what hangs is left behind in a thread of its own.

A full disk, a network that is gone or a library whose own thread has died must cost a run seconds, never its end.
It knows nothing of records or of what becomes of a sink that failed.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from hotloop.engine.lines import Record
from hotloop.engine.sinks import Sink

Job = tuple[Callable[[], None], "queue.SimpleQueue[BaseException | None]"]


class GuardedSink:
    """Hands everything to a sink and waits for it as long as the sink's `patience`, then raises TimeoutError."""

    def __init__(self, sink: Sink):
        self.sink = sink
        self.name = type(sink).__name__
        self._jobs: queue.SimpleQueue[Job | None] | None = None

    def write(self, record: Record) -> None:
        """Let the sink take one record."""
        self._wait_for(partial(self.sink.write, record))

    def close(self) -> None:
        """Let the sink go."""
        try:
            self._wait_for(self.sink.close)
        finally:
            self.abandon()

    def release(self) -> None:
        """Close it after it failed, for its files' sake; what more goes wrong is no news."""
        with suppress(Exception):
            self.close()

    def abandon(self) -> None:
        """Wait for it no more; its thread ends once it answers, or with the process."""
        if self._jobs is not None:
            self._jobs.put(None)

    def _wait_for(self, work: Callable[[], None]) -> None:
        if self.sink.patience is None:
            work()
            return
        answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._started().put((work, answer))
        try:
            error = answer.get(timeout=self.sink.patience)
        except queue.Empty:
            raise TimeoutError(f"no answer in {self.sink.patience:g} seconds") from None
        if error is not None:
            raise error

    def _started(self) -> "queue.SimpleQueue[Job | None]":
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon: the interpreter waits for any other thread before it leaves, for a stuck one for ever.
            threading.Thread(
                target=_work_off, args=(self._jobs,), name=f"hotloop-{self.name}", daemon=True
            ).start()
        return self._jobs


def _work_off(jobs: "queue.SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        work, answer = job
        try:
            work()
        except BaseException as error:
            answer.put(error)
        else:
            answer.put(None)
