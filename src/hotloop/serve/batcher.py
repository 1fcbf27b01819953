"""Requests to batches and back: whatever has come while the device was busy is joined, up to the largest rung.

A request holds a place from the moment it is let in (`enter`) until it is answered or gives up. Its rows wait in line;
a batch takes rows from the front, cuts a request that does not fit, and is filled up to the next rung of the ladder.

What is promised, where R is the largest rung: a request of at most R rows that finds less than R rows of such requests
before it starts, at the latest, when what runs has ended and its delay is over, and sooner where R rows are there. So
it waits no longer than the delay plus one batch, and without a delay not at all where nothing runs. Where requests of
more than R rows wait as well, half of R stands for R: these have what the others leave, and half of a batch if the one
before left them less, so that neither kind stops the other. Whoever finds more rows waits for the batches that these
fill. Where as many rows wait as the batch has that runs, a second one runs beside it, and never a third.

One exception, by measured times: rows between two rungs are run as the lower one and then the rest where that takes no
longer than a batch that is filled up, so that nobody is answered later for it. One time in DOUBT they are filled up
nevertheless, since only that shows how long it takes by now.

It knows asyncio and numpy, neither HTTP nor jax; tests bring a clock of their own.
"""

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hotloop.engine.exportable import Arrays
from hotloop.serve.line import Line, Part, Request, Rows
from hotloop.serve.refusal import BadRequest, DeviceFailure, QueueFull, Refusal, Unready

PATIENCE = 1  # seconds that a refused client is told to wait at least
TICK = 1e-6  # seconds; less than that is no time to wait, and may be too little for a clock to show
DOUBT = 32  # every so many batches that would be cut is filled up, to see how long that takes by now
MEMORY = 0.9  # how much of the mean time of a batch is that of earlier ones


class Ran(NamedTuple):
    """What a device call gave, with a row for each row of the rung."""

    outputs: Arrays
    join_seconds: float
    compute_seconds: float


Run = Callable[[Sequence[Rows], int], Awaitable[Ran]]
"""(rows of several requests, in order; the rung to fill them up to) -> the outputs of all of them."""


class Answer(NamedTuple):
    """A request's own rows, and the seconds until its first row was taken and from there to its last."""

    outputs: Arrays
    queue_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class BatchRecord:
    """What a batch was, for those who count."""

    rows: int
    rung: int
    queue_seconds: tuple[float, ...]  # of each request whose first row is in it
    join_seconds: float
    compute_seconds: float
    requests: int = 1
    """Of which it has rows, whether their first or later ones."""


def join_rows(parts: Sequence[Rows], rung: int) -> Arrays:
    """The rows of all parts in order, and the last one again until there are `rung`; aligned, as devices want them."""
    joined: Arrays = {}
    for name, first in parts[0].items():
        if len(parts) == 1 and len(first) == rung:
            joined[name] = np.require(first, requirements=["C", "A"])
            continue
        whole = joined[name] = np.empty((rung, *first.shape[1:]), first.dtype)
        at = 0
        for part in parts:
            rows = part[name]
            whole[at : at + len(rows)] = rows
            at += len(rows)
        whole[at:] = whole[at - 1]
    return joined


class Ticket:
    """A place in the queue, held while the request is read, decoded and answered; leave it by `with`."""

    def __init__(self, batcher: "Batcher"):
        self._batcher = batcher
        self._request: Request | None = None
        self._waits = True

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_waiting()
        self._batcher._leave()

    def stop_waiting(self) -> None:
        """The request is in a batch, or gone: another may wait in its place."""
        if self._waits:
            self._waits = False
            self._batcher.waiting -= 1

    async def answer(self, inputs: Rows) -> Answer:
        """The outputs of these rows, at least one; a Refusal where they get none. Cancelling it gives up the rows."""
        request = self._request = self._batcher._line_up(inputs, self)
        try:
            answer: Answer = await request.future
            return answer
        finally:
            self._batcher._forget(request)
            # An error's traceback has this frame, and must not lead back to the error: arrays would outlive it.
            del request
            self._request = None

    def give_up(self) -> None:
        """Nobody waits for the answer any more: who awaits it is cancelled, and no row of it goes into a batch."""
        if self._request is not None:
            self._request.future.cancel()


@dataclass
class Batch:
    """What runs; `is_alone` until another runs beside it."""

    parts: list[Part]
    rows: int
    is_alone: bool


class Batcher:
    """The queue of one version of one model."""

    def __init__(
        self,
        run: Run,
        ladder: Sequence[int],
        *,
        delay: float = 0.0,
        queue: int = 256,
        calls: int = 1,
        seconds: Mapping[int, float] = {},
        on_batch: Callable[[BatchRecord], None] = lambda record: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`delay` seconds are waited for company after the first request, `queue` requests wait at most.

        `calls` batches run at once at most: programs that leave cores idle now and then take less time together.
        `seconds` are those of a batch by rung, as far as they are known; what runs alone makes them better known.
        `clock` is not the event loop's own: uvloop's shows whole milliseconds.
        """
        self._run, self._ladder, self._delay, self._limit = run, tuple(ladder), delay, queue
        self._calls = calls
        self._under_way: dict[asyncio.Task[None], Batch] = {}
        self._turn = asyncio.Event()
        self._on_batch, self._clock = on_batch, clock
        self._top = self._ladder[-1]
        self._fitting, self._larger = Line(), Line(in_turns=True)
        self._is_owed = False
        """Whether the last batch had less than half of its rows from requests that do not fit in one, which wait."""
        self._tickets: dict[Request, Ticket] = {}
        self._arrival, self._is_full_rung = asyncio.Event(), asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._worker: asyncio.Task[None] | None = None
        self._mean_seconds: float | None = None
        self._seconds = dict(seconds)
        self._cuts = 0
        self._is_closed = False
        self.waiting = 0
        """Requests that hold a place and of which no row is in a batch yet."""
        self.held = 0
        """All requests that hold a place."""

    def enter(self) -> Ticket:
        """A place, or QueueFull, or Unready after `drain` was called."""
        if self._is_closed:
            raise Unready("this version of the model is ending")
        if self.is_full:
            raise QueueFull(f"{self.waiting} requests wait already; try again later", self.retry_after())
        self.waiting += 1
        self.held += 1
        self._empty.clear()
        return Ticket(self)

    @property
    def is_full(self) -> bool:
        return self.waiting >= self._limit

    def retry_after(self) -> int:
        """Whole seconds in which the rows that wait now should be through."""
        batches = math.ceil(self._rows_in_line / self._top / self._calls)  # one after the other
        return max(PATIENCE, math.ceil(batches * (self._mean_seconds or 0.0)))

    async def drain(self) -> None:
        """Let nobody in any more, and return when the last one has left."""
        self._is_closed = True
        await self._empty.wait()
        for task in (self._worker, *self._under_way):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def _leave(self) -> None:
        self.held -= 1
        if not self.held:
            self._empty.set()

    def _line_up(self, inputs: Rows, ticket: Ticket) -> Request:
        loop = asyncio.get_running_loop()
        rows = len(next(iter(inputs.values())))
        request = Request(inputs, rows, loop.create_future(), self._clock())
        self._line_of(request).add(request)
        self._tickets[request] = ticket
        self._arrival.set()
        if self._rows_in_line >= self._top:
            self._is_full_rung.set()
        if self._is_turn():
            self._turn.set()
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        return request

    def _forget(self, request: Request) -> None:
        """It is answered, or nobody waits for it."""
        self._tickets.pop(request, None)
        self._line_of(request).drop(request)

    def _line_of(self, request: Request) -> Line:
        return self._fitting if request.rows <= self._top else self._larger

    @property
    def _rows_in_line(self) -> int:
        return self._fitting.rows + self._larger.rows

    async def _work(self) -> None:
        while True:
            await self._arrival.wait()
            while not self._is_turn():
                self._turn.clear()
                await self._turn.wait()
            if self._delay:
                await self._wait_for_company()
            # By no name of this frame, which would keep the answers until the next batch.
            self._start(self._take())
            if not self._rows_in_line:
                self._arrival.clear()

    def _is_turn(self) -> bool:
        """Whether a batch may start: nothing runs, or as many rows wait as run and there is room for another call."""
        running = [batch.rows for batch in self._under_way.values()]
        return not running or (len(running) < self._calls and self._rows_in_line >= min(running))

    def _start(self, parts: list[Part]) -> None:
        """Run a batch, where there is one, beside what runs."""
        if not parts:
            return
        batch = Batch(parts, _count_rows(parts), is_alone=not self._under_way)
        for other in self._under_way.values():
            other.is_alone = False
        task = asyncio.get_running_loop().create_task(self._run_batch(batch))
        self._under_way[task] = batch
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        self._turn.set()

    async def _wait_for_company(self) -> None:
        """Until `delay` seconds after the first request came, or the largest rung is full."""
        while self._rows_in_line < self._top:
            entered = [line.first_entered() for line in (self._fitting, self._larger)]
            first = min((each for each in entered if each is not None), default=None)
            if first is None or (left := first + self._delay - self._clock()) < TICK:
                return
            self._is_full_rung.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_full_rung.wait(), left)

    def _take(self) -> list[Part]:
        """The rows of the next batch: those of requests that fit in one, then of larger ones, as promised above."""
        half = (self._top + 1) // 2
        owed = min(half, self._larger.rows) if self._is_owed else 0
        room = self._find_room()
        fitting = self._fitting.take(room - owed)
        larger = self._larger.take(room - _count_rows(fitting))
        self._is_owed = self._larger.rows > 0 and _count_rows(larger) < half
        now = self._clock()
        parts = fitting + larger
        for request, start, _ in parts:
            if not start:
                request.started = now
                self._tickets[request].stop_waiting()
        return parts

    def _find_room(self) -> int:
        """How many rows the next batch has room for: the largest rung, or one below those that wait.

        The latter where it and a batch of the rest take no longer than one batch that is filled up: those in it are
        answered sooner, the others no later, and clients who wait for answers come in whole rungs from then on.
        """
        rows, known = self._rows_in_line, self._seconds
        above = bisect_left(self._ladder, rows)
        if not 0 < above < len(self._ladder) or self._ladder[above] == rows or self._larger.rows:
            return self._top
        low, high = self._ladder[above - 1], self._ladder[above]
        rest = self._ladder[bisect_left(self._ladder, rows - low)]
        if {low, high, rest} <= known.keys() and known[low] + known[rest] <= known[high]:
            self._cuts += 1
            if self._cuts % DOUBT:
                return low
        return self._top

    async def _run_batch(self, batch: Batch) -> None:
        parts, rung = batch.parts, next(each for each in self._ladder if each >= batch.rows)
        inputs = [
            {name: array[part.start : part.stop] for name, array in part.request.inputs.items()}
            for part in parts
        ]
        try:
            ran = await self._run(inputs, rung)
            self._record(batch, rung, ran)
            self._deliver_all(parts, ran.outputs)
        except Exception as error:  # whatever it is, it is this batch's alone
            _fail_all(parts, error)

    def _record(self, batch: Batch, rung: int, ran: Ran) -> None:
        seconds = ran.join_seconds + ran.compute_seconds
        before = seconds if self._mean_seconds is None else self._mean_seconds
        self._mean_seconds = MEMORY * before + (1 - MEMORY) * seconds
        if batch.is_alone:
            self._seconds[rung] = MEMORY * self._seconds.get(rung, seconds) + (1 - MEMORY) * seconds
        queued = tuple(each.started - each.entered for each, start, _ in batch.parts if not start)
        count = len(batch.parts)
        self._on_batch(BatchRecord(batch.rows, rung, queued, ran.join_seconds, ran.compute_seconds, count))

    def _deliver_all(self, parts: Sequence[Part], outputs: Arrays) -> None:
        """To each part its rows; one with a row that is not finite is refused by itself."""
        # One look at the whole costs less than one a request, and is nearly always enough.
        are_finite = describe_not_finite(outputs) is None
        at = 0
        for part in parts:
            count = part.stop - part.start
            own = {name: array[at : at + count] for name, array in outputs.items()}
            at += count
            if part.request.future.done():
                continue
            sentence = None if are_finite else describe_not_finite(own, part.start)
            if sentence is not None:
                part.request.future.set_exception(BadRequest(sentence))
            else:
                self._deliver(part, own)

    def _deliver(self, part: Part, outputs: Arrays) -> None:
        """Keep a part's outputs, and answer the request with its last one."""
        request = part.request
        request.done[part.start] = outputs
        request.answered += part.stop - part.start
        if request.answered < request.rows:
            return
        whole = outputs
        if len(request.done) > 1:
            in_order = [request.done[start] for start in sorted(request.done)]
            whole = {name: np.concatenate([each[name] for each in in_order]) for name in outputs}
        now = self._clock()
        request.future.set_result(Answer(whole, request.started - request.entered, now - request.started))


def _count_rows(parts: Sequence[Part]) -> int:
    return sum(stop - start for _, start, stop in parts)


def _fail_all(parts: Sequence[Part], error: Exception) -> None:
    refusal = error if isinstance(error, Refusal) else DeviceFailure(f"the model failed: {error}")
    refusal = refusal.with_traceback(None)  # whose frames hold the batch's requests, and so the error itself
    for request, *_ in parts:
        if not request.future.done():
            request.future.set_exception(refusal)


def describe_not_finite(arrays: Rows, first: int = 0) -> str | None:
    """A sentence on the first row with NaN or infinity in it; None where every number is finite.

    `first` is the number of the first row.
    """
    for name, array in arrays.items():
        if array.dtype.kind not in "fV":  # V: bfloat16, which numpy knows as an extension
            continue
        finite = np.isfinite(array)
        if not finite.all():
            row = first + int(np.argmin(finite.reshape(len(array), -1).all(axis=1)))
            return f"{name}: row {row} is not finite"
    return None
