"""Load on a server, and what it made of it: sent and answered, latencies by percentile, and whether answers are right.

Closed loop: each connection sends when its last answer has come. Open loop (`rate`): requests are due at fixed times,
and a latency counts from when it was due, so that a slow server cannot hide by slowing its clients down.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.exportable import Arrays, Signature, Tensor
from hotloop.errors import HotloopError, OptionError
from hotloop.serve.artefact import find_disagreement
from hotloop.serve.client import AnyClient, Protocol, RemoteModel, Reply, ServerError
from hotloop.serve.refusal import QueueFull

WINDOW = 8  # requests of one thread that are under way at once, with `--use-async`
DISTINCT = 8  # batches that differ; they are sent in turn
RETRIES = 20  # after a 429, of one request
LONGEST_PAUSE = 5.0  # seconds, whatever Retry-After says
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
MOST_REASONS = 10  # of failures, the commonest, that are told
LOOK = 0.25  # seconds between two looks at how far it is


@dataclass(frozen=True)
class Load:
    """How much is sent, and how."""

    batch_size: int = 1
    threads: int = 1
    images: int = 100  # of each thread; the last batch is a whole one
    window: int = 1
    rate: float | None = None  # requests a second, of all threads together
    protocol: Protocol = "v2"

    @property
    def batches(self) -> int:
        """Of each thread."""
        return math.ceil(self.images / self.batch_size)

    @property
    def rows(self) -> int:
        """Of all threads."""
        return self.threads * self.batches * self.batch_size


@dataclass
class Outcome:
    """What came back; latencies are seconds, by phase, one for each answer."""

    sent: int = 0  # rows
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    silence: str | None = None
    """Why the load was ended before all was sent; None where it was not."""
    retries: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    latencies: dict[str, list[float]] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """Requests answered."""
        return len(self.latencies.get("total", ()))

    @property
    def throughput(self) -> float:
        """Rows answered a second; 0 where none was."""
        return self.answered / self.seconds if self.answered else 0.0

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Milliseconds by phase: total; late, in an open loop, until a client was free to send it; queue, compute; and
        the rest, which is the network's, the protocol's, and pauses after a 429."""
        return {
            phase: {name: 1000 * float(np.percentile(values, q)) for name, q in PERCENTILES.items()}
            for phase, values in self.latencies.items()
            if values
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            "answered": self.answered,
            "failures": len(self.failures),
            "reasons": dict(Counter(self.failures).most_common(MOST_REASONS)),
            "retries": self.retries,
            "wrong": len(self.wrong),
            "seconds": self.seconds,
            "throughput": self.throughput,
            "latency_ms": self.percentiles(),
        }


def make_batches(
    signature: Signature,
    size: int,
    examples: Arrays | None = None,
    images: NDArray[np.uint8] | None = None,
    *,
    seed: int = 0,
) -> list[Arrays]:
    """A few batches that differ: the images in turn, else bytes at random; other numbers from the examples' rows.

    OptionError where there are no examples, and a whole number could mean anything, and for images of another shape.
    """
    generator = np.random.default_rng(seed)

    def make(tensor: Tensor, number: int, picked: Any) -> Any:
        if tensor.datatype == "UINT8":
            if images is None:
                return generator.integers(0, 256, (size, *tensor.row), np.uint8)
            if images.shape[1:] != tensor.row:
                raise OptionError(
                    f"--dataset-path: its images are {images.shape[1:]}, and the model's {tensor.name} {tensor.row}"
                )
            return images[np.arange(number * size, (number + 1) * size) % len(images)]
        if examples is not None:
            return examples[tensor.name][picked]
        if tensor.dtype.kind in "fV":
            return generator.normal(size=(size, *tensor.row)).astype(tensor.dtype)
        raise OptionError(
            f"--folder is needed, or --check with --run: nobody knows which {tensor.name} ({tensor.datatype}) "
            "make sense"
        )

    found = []
    for number in range(DISTINCT):
        # The same rows for all inputs: items belong to their ratings.
        known = 1 if examples is None else len(next(iter(examples.values())))
        picked = generator.integers(0, known, size)
        found.append({tensor.name: make(tensor, number, picked) for tensor in signature.inputs})
    return found


class Sender:
    """All threads of one load."""

    def __init__(
        self,
        connect: Callable[[], AnyClient],
        model: RemoteModel,
        load: Load,
        batches: Sequence[Arrays],
        expected: Sequence[Arrays] | None = None,
        tolerance: float = 1e-5,
    ):
        """`expected` are the right answers to the batches; None: they are not compared."""
        self._connect, self._model, self.load = connect, model, load
        self._batches, self._expected, self._tolerance = batches, expected, tolerance
        self._lock = threading.Lock()
        self._began = 0.0
        self._is_over = False
        self._is_gone = threading.Event()
        self._last_answer = 0.0
        self.outcome = Outcome()

    def run(self, advance: Callable[[float], None] = lambda rows: None) -> Outcome:
        """Warm up each connection, start all at once, and wait for the last; ServerError where a first one fails.

        `advance` is told now and then of rows that have come. Where the wait is broken off, `outcome` has what came
        until then.
        """
        load = self.load
        with ExitStack() as stack:
            clients = [stack.enter_context(self._connect()) for _ in range(load.threads * load.window)]
            for client in clients:
                client.infer(self._model, self._batches[0], load.protocol)
            shares = [
                iter(range(thread, load.threads * load.batches, load.threads))
                for thread in range(load.threads)
            ]
            threads = [
                threading.Thread(target=self._work, args=(client, shares[number % load.threads]), daemon=True)
                for number, client in enumerate(clients)
            ]
            self._began = time.perf_counter()
            try:
                for thread in threads:
                    thread.start()
                self._wait_for(threads, advance)
            finally:  # answers that come later are nobody's
                with self._lock:
                    self._is_over = True
                    self.outcome.seconds = time.perf_counter() - self._began
        return self.outcome

    def _wait_for(self, threads: Sequence[threading.Thread], advance: Callable[[float], None]) -> None:
        told = 0
        for thread in threads:
            is_alive = True
            while is_alive:
                thread.join(LOOK)
                is_alive, answered = thread.is_alive(), self.outcome.answered
                advance(answered - told)
                told = answered

    def _work(self, client: AnyClient, numbers: Iterator[int]) -> None:
        while True:
            with self._lock:
                number = None if self._is_over else next(numbers, None)
            if number is None:
                return
            late = self._wait_until_due(number)
            with self._lock:
                if self._is_gone.is_set():
                    return
                self.outcome.sent += self.load.batch_size
            started = time.perf_counter()
            try:
                reply = self._send(client, self._batches[number % len(self._batches)])
                self._note(number, reply, late)
            except Exception as error:  # a thread that ends would take its share of the load with it
                known = isinstance(error, HotloopError)
                with self._lock:
                    if not self._is_over:
                        said = str(error) if known else f"{type(error).__name__}: {error}"
                        self.outcome.failures.append(said)
                    self._look_for_silence(error, started)

    def _look_for_silence(self, error: Exception, started: float) -> None:
        """End the load where nobody was answered in the later half of this wait: the rest would wait as long."""
        now = time.perf_counter()
        if not isinstance(error, ServerError) or self._is_gone.is_set():
            return
        if error.status:
            self._last_answer = now
        elif error.is_silent and self._last_answer <= (started + now) / 2:
            self.outcome.silence = str(error)
            self._is_gone.set()

    def _wait_until_due(self, number: int) -> float:
        """Seconds by which the request is late already, in an open loop."""
        if self.load.rate is None:
            return 0.0
        left = self._began + number / self.load.rate - time.perf_counter()
        self._is_gone.wait(max(0.0, left))
        return max(0.0, -left)

    def _send(self, client: AnyClient, batch: Arrays) -> Reply:
        started = time.perf_counter()
        for _ in range(RETRIES):
            try:
                reply = client.infer(self._model, batch, self.load.protocol)
            except ServerError as error:
                if error.status != QueueFull.status:
                    raise
                with self._lock:
                    self.outcome.retries += 1
                time.sleep(min(LONGEST_PAUSE, error.retry_after or 1.0))
                continue
            return Reply(reply.outputs, time.perf_counter() - started, reply.phases)
        raise ServerError(f"refused {RETRIES} times, since too many wait", QueueFull.status)

    def _note(self, number: int, reply: Reply, late: float) -> None:
        reason = None
        if self._expected is not None:
            wanted = self._expected[number % len(self._expected)]
            reason = find_disagreement(wanted, reply.outputs, self._tolerance)
        total = reply.seconds + late
        with self._lock:
            if self._is_over:
                return
            outcome = self.outcome
            self._last_answer = time.perf_counter()
            outcome.answered += self.load.batch_size
            if reason is not None:
                outcome.wrong.append(reason)
            outcome.latencies.setdefault("total", []).append(total)
            if {"queue", "compute"} <= set(reply.phases):
                spent = {name: reply.phases[name] for name in ("queue", "compute")}
                if self.load.rate is not None:
                    spent = {"late": late, **spent}
                for name, seconds in {**spent, "rest": max(0.0, total - sum(spent.values()))}.items():
                    outcome.latencies.setdefault(name, []).append(seconds)
