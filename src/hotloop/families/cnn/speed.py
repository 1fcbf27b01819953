"""How fast a training is and what it takes: images a second, the share of the devices' peak, memory, compile time.

All figures are over all processes of a run.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from platform import node
from typing import Any

import jax

from hotloop.engine import processes
from hotloop.engine.device import peak_bytes, platform
from hotloop.engine.loop import Program
from hotloop.engine.measure import Ceilings
from hotloop.engine.plan import Event
from hotloop.families.cnn.job import Job
from hotloop.families.cnn.network import Network

FORWARD_AND_BACKWARD = 3  # each product of the forward pass has two gradients of the same cost


class Throughput:
    def __init__(self, job: Job, limits: Ceilings | None):
        self._limits, self._type = limits, str(job.policy.compute)
        self._devices = job.batch.replicas * job.stages
        self._flops = training_flops(job.network, job.frozen)
        self._seen: list[float] = []

    def on_log(self, event: Event, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The share of the measured peak of all devices of the run (MFU), and the memory in use at most."""
        self._seen.append(figures["throughput"])
        mfu = self._mfu(figures["throughput"], self._limits)
        found = {} if mfu is None else {"mfu": mfu}
        return {"memory_gib": peak_memory() / 2**30, **found}

    def _mfu(self, speed: float | None, limits: Ceilings | None) -> float | None:
        peak = limits.matmul_tflops.get(self._type) if limits else None
        return speed * self._flops / (1e12 * peak * self._devices) if speed and peak else None

    def _speed(self) -> float | None:
        return statistics.median(self._seen) if self._seen else None

    def share_of(self, limits: Ceilings) -> float | None:
        """The run's MFU by limits that were measured after it."""
        return self._mfu(self._speed(), limits)

    def result(self, program: Program) -> dict[str, Any]:
        """The run's figures: the median over its logs."""
        return {
            "images_per_second": self._speed(),
            "mfu": self._mfu(self._speed(), self._limits),
            "memory_bytes": peak_memory(),
            **compile_seconds(program),
        }


def training_flops(network: Network, frozen: frozenset[str] = frozenset()) -> int:
    """Of one image; nothing goes back into frozen layers, which are the first ones."""
    return sum(node.flops * (1 if node.name in frozen else FORWARD_AND_BACKWARD) for node in network.nodes)


def compile_seconds(program: Program) -> dict[str, Any]:
    return {"lower_seconds": program.lower_seconds, "compile_seconds": program.compile_seconds}


def peak_memory() -> int:
    """The most bytes in use so far: on the fullest device of all processes; where the CPU computes, of the processes of
    a machine together, on the fullest machine. All processes must ask."""
    devices = jax.local_devices(backend=platform())
    if devices[0].platform != "cpu":
        found = (int((each.memory_stats() or {}).get("peak_bytes_in_use", 0)) for each in devices)
        return max(map(int, processes.gathered(max(found))))
    return sum_of_fullest(processes.gathered([node(), peak_bytes()]))


def sum_of_fullest(bytes_of_processes: Iterable[tuple[str, int]]) -> int:
    """Of the bytes by machine and process the sum on the machine where it is largest."""
    machines: Counter[str] = Counter()
    for machine, size in bytes_of_processes:
        machines[machine] += size
    return max(machines.values())
