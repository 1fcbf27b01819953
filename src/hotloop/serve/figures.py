"""What a server counts: requests, rows, padding and seconds, for Prometheus, for `stats`, and for the page.

Names that dashboards know from other servers (`nv_inference_...`) stand beside our own. Labels are names of models that
are here, never what a client sent.
"""

import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hotloop.serve.batcher import BatchRecord

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ROWS = tuple(float(2**power) for power in range(13))
OWN = ("model", "version")
OK = 400  # the first status that is a failure


@dataclass
class ModelFigures:
    """Of one version of one model, since the server started; times are nanoseconds, as `stats` gives them."""

    name: str
    version: int
    answered: int = 0
    failed: int = 0
    answered_ns: int = 0
    failed_ns: int = 0
    rows: int = 0
    padded_rows: int = 0
    batches: int = 0
    started: int = 0  # requests of which a row has been in a batch
    queue_ns: int = 0
    join_ns: int = 0  # as often as a batch had requests, as other servers count it: what a request spent
    compute_ns: int = 0  # the same
    last_ms: int = 0  # when it answered last, since 1970
    late_compilations: int = 0
    sizes: Tally[int] = field(default_factory=Tally)  # batches by rung
    sizes_join_ns: Tally[int] = field(default_factory=Tally)  # once a batch
    sizes_ns: Tally[int] = field(default_factory=Tally)

    def as_stats(self) -> dict[str, Any]:
        """As the statistics extension of the Open Inference Protocol has it."""

        def spent(count: int, ns: int) -> dict[str, int]:
            return {"count": count, "ns": ns}

        return {
            "name": self.name,
            "version": str(self.version),
            "last_inference": self.last_ms,
            "inference_count": self.rows,
            "execution_count": self.batches,
            "inference_stats": {
                "success": spent(self.answered, self.answered_ns),
                "fail": spent(self.failed, self.failed_ns),
                "queue": spent(self.started, self.queue_ns),
                "compute_input": spent(self.started, self.join_ns),
                "compute_infer": spent(self.started, self.compute_ns),
                "compute_output": spent(self.started, 0),
            },
            "batch_stats": [
                {
                    "batch_size": rung,
                    "compute_input": spent(count, self.sizes_join_ns[rung]),
                    "compute_infer": spent(count, self.sizes_ns[rung]),
                    "compute_output": spent(count, 0),
                }
                for rung, count in sorted(self.sizes.items())
            ],
            "padded_rows": self.padded_rows,
            "compilations_after_ready": self.late_compilations,
        }


class Figures(Collector):
    """All figures of a server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._of: dict[tuple[str, int], ModelFigures] = {}
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self.pending: dict[tuple[str, int], Any] = {}
        """Something with `waiting`, the number of requests, by model and version."""

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, text, OWN, buckets=buckets, registry=self._registry)

        self._requests = Counter(
            "hotloop_requests", "Requests by status.", (*OWN, "status"), registry=self._registry
        )
        self._loads = Counter(
            "hotloop_loads", "Versions loaded or refused.", (*OWN, "result"), registry=self._registry
        )
        self._queue = histogram(
            "hotloop_queue_seconds", "From a request's arrival in the queue to its batch."
        )
        self._join = histogram("hotloop_batch_seconds", "Joining and filling up the rows of a batch.")
        self._compute = histogram("hotloop_compute_seconds", "Device call of a batch.")
        self._decode = histogram("hotloop_decode_seconds", "Reading and decoding a request's inputs.")
        self._sizes = histogram("hotloop_batch_rows", "Rows of a batch without its padding.", ROWS)
        self._registry.register(self)

    def of(self, name: str, version: int) -> ModelFigures:
        """The figures of a version, which a version that is loaded again continues."""
        return self._of.setdefault((name, version), ModelFigures(name, version))

    def all(self) -> list[ModelFigures]:
        return [self._of[key] for key in sorted(self._of)]

    def count_batch(self, name: str, version: int, record: BatchRecord) -> None:
        own = self.of(name, version)
        own.rows += record.rows
        own.padded_rows += record.rung - record.rows
        own.batches += 1
        own.started += len(record.queue_seconds)
        own.queue_ns += int(1e9 * sum(record.queue_seconds))
        own.join_ns += int(1e9 * record.join_seconds) * record.requests
        own.compute_ns += int(1e9 * record.compute_seconds) * record.requests
        own.sizes[record.rung] += 1
        own.sizes_join_ns[record.rung] += int(1e9 * record.join_seconds)
        own.sizes_ns[record.rung] += int(1e9 * record.compute_seconds)
        labels = (name, str(version))
        queue = self._child(self._queue, *labels)
        for seconds in record.queue_seconds:
            queue.observe(seconds)
        self._child(self._join, *labels).observe(record.join_seconds)
        self._child(self._compute, *labels).observe(record.compute_seconds)
        self._child(self._sizes, *labels).observe(record.rows)

    def _child(self, metric: Any, *labels: str) -> Any:
        """`metric.labels(*labels)`, which takes a lock and longer than what is done with it."""
        key = (metric, labels)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = metric.labels(*labels)
        return found

    def count_request(self, name: str, version: int | None, status: int, seconds: float) -> None:
        """A request that has been answered; a name that is no model's, and version None, are not kept."""
        self._child(self._requests, name, "" if version is None else str(version), str(status)).inc()
        if version is None:
            return
        own = self.of(name, version)
        if status < OK:
            own.answered += 1
            own.answered_ns += int(1e9 * seconds)
            own.last_ms = int(1000 * time.time())
        else:
            own.failed += 1
            own.failed_ns += int(1e9 * seconds)

    def count_decode(self, name: str, version: int, seconds: float) -> None:
        self._child(self._decode, name, str(version)).observe(seconds)

    def count_load(self, name: str, version: int, *, is_loaded: bool) -> None:
        self._loads.labels(name, str(version), "loaded" if is_loaded else "refused").inc()

    def forget(self, name: str, version: int) -> None:
        """Drop everything that was counted of a version that has gone: a server that runs for years sees many."""
        self._of.pop((name, version), None)
        own = (name, str(version))
        self._children = {key: child for key, child in self._children.items() if key[1][:2] != own}
        for histogram in (self._queue, self._join, self._compute, self._decode, self._sizes):
            with suppress(KeyError):  # older versions of the library raise it where nothing was counted
                histogram.remove(*own)
        for counter, last in ((self._requests, "status"), (self._loads, "result")):
            samples = [each.labels for family in counter.collect() for each in family.samples]
            for value in {each[last] for each in samples if (each["model"], each["version"]) == own}:
                counter.remove(*own, value)

    def collect(self) -> Iterator[Metric]:
        """Sums under names that other servers' dashboards know: without `_total`, which the library's Counters add."""
        sums = {
            "nv_inference_request_success": ("Requests answered.", "answered", 1),
            "nv_inference_request_failure": ("Requests refused or failed.", "failed", 1),
            "nv_inference_count": ("Rows computed, without padding.", "rows", 1),
            "nv_inference_exec_count": ("Batches computed.", "batches", 1),
            "nv_inference_request_duration_us": ("Microseconds of requests answered.", "answered_ns", 1000),
            "nv_inference_queue_duration_us": ("Microseconds in queues.", "queue_ns", 1000),
            "nv_inference_compute_infer_duration_us": (
                "Microseconds that requests spent in device calls.",
                "compute_ns",
                1000,
            ),
            "hotloop_padded_rows": ("Rows computed for nobody.", "padded_rows", 1),
            "hotloop_compilations_after_ready": ("Programs compiled too late.", "late_compilations", 1),
        }
        for name, (text, attribute, unit) in sums.items():
            metric = Metric(name, text, "unknown")
            for each in self.all():
                labels = {"model": each.name, "version": str(each.version)}
                metric.add_sample(name, labels, getattr(each, attribute) // unit)
            yield metric
        waiting = Metric("nv_inference_pending_request_count", "Requests that wait.", "gauge")
        for (model, version), queue in sorted(self.pending.items()):
            waiting.add_sample(waiting.name, {"model": model, "version": str(version)}, queue.waiting)
        yield waiting

    def as_text(self) -> bytes:
        """In Prometheus's format."""
        return generate_latest(self._registry)
