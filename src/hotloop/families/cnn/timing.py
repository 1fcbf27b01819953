"""What a run says about time: images a second, the share of the device's peak that this is, and time to train.

Of an update's arithmetic the network's own is counted, once forward and twice backward; times come from the engine's
logs. Time to train goes from the start of training to the end of validation, over all processes that a run took: each
process records when its clock starts, and those before it count up to their last record, so that work which was lost
and done again counts as well, and the time between two processes does not.
"""

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from hotloop.engine import measure
from hotloop.engine.device import peak_bytes, platform
from hotloop.engine.loop import Program
from hotloop.engine.plan import Event
from hotloop.engine.run import Run, read_events
from hotloop.families.cnn.job import Job

FORWARD_AND_BACKWARD = 3  # each product of the forward pass has two gradients of the same cost
STARTS = "training"
"""The record that a process's clock starts."""
TOOK = "time_to_train"
"""The record that the run is trained and validated, and how long that took."""


class Throughput:
    """Gathers the throughput of every log."""

    def __init__(self, job: Job):
        self._device = jax.devices(platform())[0]
        limits = measure.known_ceilings(self._device)
        peak = limits.matmul_tflops.get(str(job.policy.compute)) if limits else None
        self._peak = peak and peak * job.batch.replicas
        self._flops = FORWARD_AND_BACKWARD * job.network.flops
        self._seen: list[float] = []

    def on_log(self, event: Event, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The share of the measured peak (MFU), and the memory in use at most."""
        speed = figures["throughput"]
        self._seen.append(speed)
        found: dict[str, Any] = {"memory_gib": peak_memory(self._device) / 2**30}
        if self._peak:
            found["mfu"] = self._mfu(speed)
        return found

    def _mfu(self, speed: float | None) -> float | None:
        return speed * self._flops / (1e12 * self._peak) if speed and self._peak else None

    def result(self, program: Program) -> dict[str, Any]:
        """The run's figures: the median over its logs."""
        speed = statistics.median(self._seen) if self._seen else None
        return {
            "images_per_second": speed,
            "mfu": self._mfu(speed),
            "memory_bytes": peak_memory(self._device),
            **compile_seconds(program),
        }


def compile_seconds(program: Program) -> dict[str, Any]:
    return {"lower_seconds": program.lower_seconds, "compile_seconds": program.compile_seconds}


def peak_memory(device: jax.Device) -> int:
    """The most bytes in use so far: on the device, or of this process where the CPU computes."""
    if device.platform != "cpu":
        return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))
    return peak_bytes()


@dataclass(frozen=True)
class TrainingClock:
    """A running clock: when it started here, and what earlier processes of the run had on theirs."""

    began: float
    before: float
    processes: int

    @classmethod
    def start(cls, record: Run) -> "TrainingClock":
        """Start, and put it on record."""
        before = seconds_of_processes(read_events(record.path))
        record.event(STARTS, process=len(before) + 1, seconds_before=sum(before))
        return cls(time.perf_counter(), sum(before), len(before) + 1)

    def stop(self, record: Run, update: int, epoch: float) -> dict[str, Any]:
        """Put the time to train on record."""
        seconds = self.before + time.perf_counter() - self.began
        record.event(TOOK, update=update, epoch=epoch, seconds=seconds, processes=self.processes)
        return {"time_to_train_seconds": seconds, "time_to_train_processes": self.processes}


def seconds_of_processes(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """The seconds that each process had on its clock when it wrote its last record."""
    spent: list[float] = []
    began = None
    for event in events:
        if event["event"] == "start":
            began = None
        elif event["event"] == STARTS:
            began = event.get("elapsed", 0.0)
            spent.append(0.0)
        if began is not None:
            spent[-1] = event.get("elapsed", began) - began
    return spent


def time_in_words(figures: Mapping[str, Any]) -> str:
    """`time to train: h:mm:ss`, and in how many processes where it was not one."""
    whole, processes = round(figures["time_to_train_seconds"]), figures["time_to_train_processes"]
    clock = f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"time to train: {clock}" + (f", in {processes} processes" if processes > 1 else "")
