"""The two threads of a model that call the device: every rung is compiled before the model counts as ready.

The event loop never waits for a device. Two calls of one model may be under way, which on two cores is a quarter
faster than one after the other: a program's short steps leave a core idle. Programs that are compiled after that are
counted, since each is a pause for whoever is behind it: there should be none.
"""

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from hotloop.engine.exportable import Arrays
from hotloop.errors import ModelError, one_line
from hotloop.serve.artefact import Artefact, find_disagreement
from hotloop.serve.batcher import Ran, join_rows
from hotloop.serve.line import Rows
from hotloop.serve.refusal import DeviceFailure

COMPILED = "/jax/core/compile/backend_compile_duration"  # also where the cache had the program
TIMING = 0.5  # seconds that may have been spent when a rung is timed; others are known when they have run
TIMED_CALLS = 3
CALLS = 2  # of one model under way at once: what one leaves idle of cores, or of a GPU while it copies, another takes
FOUND = "/jax/compilation_cache/cache_hits"


P = ParamSpec("P")
T = TypeVar("T")
Calls = SimpleQueue["Callable[[], None] | None"]


class DaemonThreads(Executor):
    """Calls begin in order, in a few threads. A ThreadPoolExecutor would keep the process for as long as a call
    hangs."""

    def __init__(self, name: str, count: int = 1):
        self._calls: Calls = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work_off, args=(self._calls,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._calls.put, None)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the calls that are in line."""
        self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def has_ended(self, seconds: float) -> bool:
        """Whether all threads have, within so many seconds."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _work_off(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # with its arrays, before the next one is waited for
    calls.put(None)  # for the others


class Load(NamedTuple):
    """How long it took until every rung had answered rightly, and how many programs the compiler made for it."""

    seconds: float
    compiled: int
    by_rung: Mapping[int, float] = {}
    """Seconds of a call, of the rungs that were called again."""


class CompilationCount(threading.local):
    """Events of jax in this thread since it was made."""

    compiled = 0
    found = 0

    @property
    def by_compiler(self) -> int:
        """Programs that no cache had; without a cache, all of them."""
        return self.compiled - self.found


_counts = CompilationCount()
_listening = threading.Lock()
_is_listening = False


def listen_to_compiler() -> None:
    """Count what jax compiles, from the first call on; jax knows no way to end it."""
    global _is_listening
    from jax import monitoring

    def count_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
        _counts.compiled += event == COMPILED

    def count_event(event: str, **kwargs: str | int) -> None:
        _counts.found += event == FOUND

    with _listening:
        if not _is_listening:
            _is_listening = True
            monitoring.register_event_duration_secs_listener(count_duration)
            monitoring.register_event_listener(count_event)


def repeat_rows(rows: Mapping[str, Any], count: int) -> Arrays:
    """So many rows: the given ones, again and again."""
    return {name: np.resize(value, (count, *value.shape[1:])) for name, value in rows.items()}


def _time_call(call: Callable[[Mapping[str, Any]], Arrays], rows: Arrays) -> float:
    """Seconds of the quickest of a few calls, as other work may slow one down; of one alone where that is long."""
    quickest = math.inf
    for _ in range(TIMED_CALLS):
        began = time.perf_counter()
        call(rows)
        quickest = min(quickest, time.perf_counter() - began)
        if quickest > TIMING / 100:
            break
    return quickest


class DeviceThread:
    """A model's calls, at most `CALLS` at a time, in threads of their own."""

    def __init__(
        self,
        artefact: Artefact,
        on_late_compile: Callable[[int], None] = lambda rung: None,
        on_failure: Callable[[str], None] = lambda sentence: None,
    ):
        """`on_late_compile` is called, in the thread, with the rung whose call compiled after `load`, and
        `on_failure` with a sentence on a call that raised."""
        self._artefact, self._on_late_compile, self._on_failure = artefact, on_late_compile, on_failure
        self._threads = DaemonThreads(f"hotloop-device-{artefact.name}-{artefact.version}", CALLS)
        self._call: Callable[[Mapping[str, Any]], Arrays] | None = None
        self._is_closed = False

    async def load(self) -> Load:
        """Load and compile every rung; ModelError where one does not answer the examples rightly."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._load)

    def _load(self) -> Load:
        listen_to_compiler()
        started, before = time.perf_counter(), _counts.by_compiler
        artefact = self._artefact
        call = artefact.load()
        inputs, answers = artefact.examples()
        by_rung: dict[int, float] = {}
        for rung in artefact.ladder:
            if self._is_closed:  # the process that ends waits for this thread, and need not for all rungs
                raise ModelError(f"{artefact.folder}: loading was given up")
            rows = repeat_rows(inputs, rung)
            self._check_rung(call, rows, repeat_rows(answers, rung), rung)
            if not self._is_closed and sum(by_rung.values()) < TIMING:
                by_rung[rung] = _time_call(call, rows)
        self._call = call
        return Load(time.perf_counter() - started, _counts.by_compiler - before, by_rung)

    def _check_rung(
        self, call: Callable[[Mapping[str, Any]], Arrays], inputs: Arrays, answers: Arrays, rung: int
    ) -> None:
        folder = self._artefact.folder
        try:
            found = call(inputs)
        except Exception as error:
            # What an older or newer jax made is read here, and not before.
            said = one_line(str(error))[:300]
            raise ModelError(
                f"{folder}: a batch of {rung} fails: {said}; {self._artefact.renewal}"
            ) from error
        if reason := find_disagreement(answers, found, self._artefact.tolerance):
            raise ModelError(f"{folder}: a batch of {rung} answers its examples wrongly: {reason}")

    async def __call__(self, parts: Sequence[Rows], rung: int) -> Ran:
        """Join the rows and call the device; DeviceFailure, in one line, where that raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, parts, rung)

    def _run(self, parts: Sequence[Rows], rung: int) -> Ran:
        assert self._call is not None
        started, before = time.perf_counter(), _counts.compiled
        rows = join_rows(parts, rung)
        joined = time.perf_counter()
        try:
            outputs = self._call(rows)
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0][:300]
            sentence = f"the device call failed: {type(error).__name__}: {said}"
            self._on_failure(sentence)
            raise DeviceFailure(sentence) from error
        if _counts.compiled > before:
            self._on_late_compile(rung)
        return Ran(outputs, joined - started, time.perf_counter() - joined)

    def close(self) -> None:
        """End the thread after what runs; the weights go with it. A load ends after the rung that it is at."""
        self._is_closed = True
        self._threads.shutdown(wait=False)
        self._call = None

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether its last call has returned, within so many seconds, after `close`."""
        return self._threads.has_ended(seconds)
