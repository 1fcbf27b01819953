"""Trials as tasks of a Ray cluster: the same processes, started by Ray's workers, wherever there is room.

Ray says which GPU a task may see; how many run at a time is decided here, so that the figures of a slot mean what
they mean on one machine. The runs' folders lie where the worker ran.
"""

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hotloop.engine.interrupt import raise_stops
from hotloop.errors import DeviceError, MissingExtra, RunError
from hotloop.families.recommender.trials import (
    GRACE_SECONDS,
    ChildProcesses,
    Listener,
    Trial,
    TrialOutcome,
    run_trial,
    share_memory,
)

CONNECT_SECONDS = 5.0


def run_in_worker(trial: Trial, slot: int, memory: dict[str, str]) -> TrialOutcome:
    """A trial in a worker of the cluster; a cancelled task stops its child."""
    children = ChildProcesses()
    try:
        return run_trial(trial, slot, {**memory, **os.environ}, children)
    finally:
        children.stop()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@dataclass(frozen=True)
class RayEngine:
    """A cluster by its address, or one that is started here for the sweep."""

    address: str | None
    concurrent: int | None
    device: str
    say: Callable[[str], None]

    def __call__(self, trials: Sequence[Trial], ended: Listener) -> tuple[list[TrialOutcome], int]:
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
            os.environ.setdefault(name, "0")
        try:
            ray = import_module("ray")
        except ImportError:
            raise MissingExtra("ray", "ray", "--engine ray") from None
        try:
            host, _, port = (self.address or "").removeprefix("ray://").rpartition(":")
            if host and port.isdigit():  # where nobody answers, Ray itself would go on trying for minutes
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            here = {} if self.address else {"include_dashboard": False}  # a cluster has its own, or none
            ray.init(self.address or "local", log_to_driver=False, logging_level="ERROR", **here)
        except Exception as error:  # ray raises a different kind for each way an address can be wrong
            raise RunError(
                f"--ray-address {self.address or 'local'}: no cluster there ({_first_line(error)})"
            ) from None
        try:
            with raise_stops():
                return self._run(ray, trials, ended)
        finally:
            ray.shutdown()

    def _run(self, ray: Any, trials: Sequence[Trial], ended: Listener) -> tuple[list[TrialOutcome], int]:
        gpus = 0 if self.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        if self.device == "gpu" and not gpus:
            raise DeviceError("--device gpu: the Ray cluster has no GPU; use --device auto")
        devices = gpus or sum(node["Alive"] for node in ray.nodes())
        concurrent = min(self.concurrent or devices, len(trials))
        sharing = math.ceil(concurrent / devices)
        kind = f"GPU{'s' * (gpus > 1)}" if gpus else f"node{'s' * (devices > 1)}"
        self.say(f"{len(trials)} trials on {devices} {kind} of a Ray cluster, {concurrent} at a time")
        memory = share_memory(sharing) if gpus else {}
        task = ray.remote(run_in_worker).options(
            num_gpus=1 / sharing if gpus else 0, num_cpus=1, max_retries=0, scheduling_strategy="SPREAD"
        )
        waiting, outcomes = list(trials), []
        free = list(range(concurrent))
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and free:
                    slot = free.pop(0)
                    running[task.remote(waiting.pop(0), slot, memory)] = slot
                (done,), _ = ray.wait(list(running), num_returns=1)
                free.append(running.pop(done))
                outcomes.append(ray.get(done))
                ended(outcomes[-1])
        except ray.exceptions.RayError as error:
            raise RunError(f"--engine ray: a worker of the cluster was lost ({_first_line(error)})") from None
        finally:
            for each in running:  # none, unless it was stopped
                ray.cancel(each)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=GRACE_SECONDS + 2)
        return sorted(outcomes, key=lambda outcome: outcome.trial.number), concurrent
