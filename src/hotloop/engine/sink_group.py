"""What a run's records are handed to, and a group of such sinks of which none can hold a run up or end it."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Any

Record = Mapping[str, Any]
Work = tuple[Callable[[], None], "futures.Future[None]"]


class Sink:
    """What a run feeds: it is handed each record after it is written, and adds nothing of its own."""

    patience: float | None = None
    """Seconds after which a record counts as stuck; None: it may take any time, in the caller's own thread."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go."""


class SinkGroup:
    """Sinks that all see each record; one that fails, or takes longer than its patience, is left out with a warning.

    A full disk, a network that is gone or a library whose own thread has died must cost a run seconds, never its end.
    """

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[str], object]):
        self._sinks, self._warn = [*sinks], warn
        self._work: dict[int, queue.SimpleQueue[Work | None]] = {}

    def write(self, record: Record) -> None:
        for sink in tuple(self._sinks):
            if sink not in self._sinks:  # it failed at the warning about another one
                continue
            try:
                self._wait_for(sink, partial(sink.write, record))
            except Exception as error:  # a sink that fails must not cost the run
                if not isinstance(error, TimeoutError):
                    with suppress(Exception):  # for its files' sake; what more goes wrong is no news
                        self._wait_for(sink, sink.close)
                self._drop(sink, error)

    def close(self) -> None:
        for sink in tuple(self._sinks):
            try:
                self._wait_for(sink, sink.close)
                self._let_go(sink)
            except Exception as error:
                self._drop(sink, error)

    def _wait_for(self, sink: Sink, work: Callable[[], None]) -> None:
        if sink.patience is None:
            work()
            return
        if id(sink) not in self._work:
            jobs = self._work[id(sink)] = queue.SimpleQueue[Work | None]()
            # One thread for all its records: what a library opened in a thread may be bound to it. A daemon: the
            # interpreter waits for any other thread before it leaves, for a stuck one for ever.
            name = f"hotloop-{type(sink).__name__}"
            threading.Thread(target=_work_through, args=(jobs,), name=name, daemon=True).start()
        done: futures.Future[None] = futures.Future()
        self._work[id(sink)].put((work, done))
        if not futures.wait([done], sink.patience).done:
            raise TimeoutError(f"no answer in {sink.patience:g} seconds")
        done.result()

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        self._let_go(sink)
        self._warn(f"{type(sink).__name__} failed and is off: {error}")

    def _let_go(self, sink: Sink) -> None:
        """Its thread ends once it has answered, or with the process."""
        if jobs := self._work.pop(id(sink), None):
            jobs.put(None)


def _work_through(jobs: "queue.SimpleQueue[Work | None]") -> None:
    while (job := jobs.get()) is not None:
        work, done = job
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
