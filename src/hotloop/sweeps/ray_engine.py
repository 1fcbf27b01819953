"""Trials as tasks of a Ray cluster, or of one that is started here for the sweep. Ray is imported when asked for."""

import math
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hotloop.engine.interrupt import raise_stops
from hotloop.errors import DeviceError, MissingExtra, RunError, first_line
from hotloop.sweeps.children import GRACE_SECONDS, ChildProcesses
from hotloop.sweeps.engines import Listener, fill_places, share_memory
from hotloop.sweeps.trial import Trial, TrialOutcome, run_trial

CONNECT_SECONDS = 5.0


def run_in_worker(trial: Trial, slot: int, memory: dict[str, str]) -> TrialOutcome:
    """A trial in a worker of the cluster; a cancelled task stops its child."""
    children = ChildProcesses()
    try:
        return run_trial(trial, slot, {**memory, **os.environ}, children)
    finally:
        children.stop()


@dataclass(frozen=True)
class RayEngine:
    """A cluster by its address, or one that is started here for the sweep."""

    address: str | None
    concurrent: int | None
    device: str
    say: Callable[[str], None]

    def __call__(
        self, trials: Iterable[Trial], count: int, ended: Listener
    ) -> tuple[list[TrialOutcome], int]:
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
                f"--ray-address {self.address or 'local'}: no cluster there ({first_line(error)})"
            ) from None
        try:
            with raise_stops():
                return self._run(ray, trials, count, ended)
        finally:
            ray.shutdown()

    def _run(
        self, ray: Any, trials: Iterable[Trial], count: int, ended: Listener
    ) -> tuple[list[TrialOutcome], int]:
        gpus = 0 if self.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        if self.device == "gpu" and not gpus:
            raise DeviceError("--device gpu: the Ray cluster has no GPU; use --device auto")
        devices = gpus or sum(node["Alive"] for node in ray.nodes())
        concurrent = min(self.concurrent or devices, count)
        sharing = math.ceil(concurrent / devices)
        kind = f"GPU{'s' * (gpus > 1)}" if gpus else f"node{'s' * (devices > 1)}"
        self.say(f"{count} trials on {devices} {kind} of a Ray cluster, {concurrent} at a time")
        memory = share_memory(sharing) if gpus else {}
        task = ray.remote(run_in_worker).options(
            num_gpus=1 / sharing if gpus else 0, num_cpus=1, max_retries=0, scheduling_strategy="SPREAD"
        )
        running: set[Any] = set()

        def submit(trial: Trial, slot: int) -> Any:
            handle = task.remote(trial, slot, memory)
            running.add(handle)
            return handle

        def wait_for_one(handles: Iterable[Any]) -> tuple[Any, TrialOutcome]:
            (done,), _ = ray.wait(list(handles), num_returns=1)
            running.discard(done)
            return done, ray.get(done)

        outcomes = []
        try:
            for outcome in fill_places(trials, concurrent, submit, wait_for_one):
                outcomes.append(outcome)
                ended(outcome)
        except ray.exceptions.RayError as error:
            raise RunError(f"--engine ray: a worker of the cluster was lost ({first_line(error)})") from None
        finally:
            for each in running:  # none, unless it was stopped
                ray.cancel(each)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=GRACE_SECONDS + 2)
        return sorted(outcomes, key=lambda outcome: outcome.trial.number), concurrent
