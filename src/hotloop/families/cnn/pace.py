"""How fast a run goes: images a second, the share of the device's peak that this is, memory, and compile time.

Of an update's arithmetic the network's own is counted, once forward and twice backward. It measures nothing: times
come from the engine's logs.
"""

import statistics
from collections.abc import Mapping
from typing import Any

import jax

from hotloop.engine import measure
from hotloop.engine.device import peak_bytes, platform
from hotloop.engine.loop import Program
from hotloop.engine.plan import Event
from hotloop.families.cnn.describe import flops_per_image
from hotloop.families.cnn.model import Job

FORWARD_AND_BACKWARD = 3


class Pace:
    """Gathers the throughput of every log."""

    def __init__(self, job: Job, replicas: int):
        device = jax.devices(platform())[0]
        limits = measure.known_ceilings(device)
        peak = limits.matmul_tflops.get(str(job.policy.compute)) if limits else None
        self._peak = peak and peak * replicas
        self._flops = FORWARD_AND_BACKWARD * flops_per_image(job.network)
        self._device, self._seen = device, list[float]()

    def on_log(self, event: Event, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The share of the measured peak (MFU), and the memory in use at most."""
        speed = figures["throughput"]
        self._seen.append(speed)
        found: dict[str, Any] = {"memory_gib": peak_memory(self._device) / 2**30}
        if self._peak:
            found["mfu"] = speed * self._flops / (1e12 * self._peak)
        return found

    def compiled(self, program: Program) -> dict[str, Any]:
        """Seconds of the compiler."""
        return {"lower_seconds": program.lower_seconds, "compile_seconds": program.compile_seconds}

    def result(self, program: Program) -> dict[str, Any]:
        """The run's figures: the median over its logs."""
        speed = statistics.median(self._seen) if self._seen else None
        mfu = speed * self._flops / (1e12 * self._peak) if speed and self._peak else None
        return {
            "images_per_second": speed,
            "mfu": mfu,
            "memory_bytes": peak_memory(self._device),
            **self.compiled(program),
        }


def peak_memory(device: jax.Device) -> int:
    """The most bytes in use so far: on the device, or of this process where the CPU computes."""
    if device.platform != "cpu":
        return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))
    return peak_bytes()
