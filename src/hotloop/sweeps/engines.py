"""Where trials run: processes of this machine, one device each, as many at a time as there are devices.

Ctrl-C, SIGTERM and SIGHUP stop every child: it may save what it has, and is killed if it does not. A cluster is
`ray_engine`'s.
"""

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

from hotloop.engine.device_shares import VIRTUAL
from hotloop.engine.interrupt import before_leaving, raise_stops
from hotloop.engine.launched_process import OrphanGuard
from hotloop.sweeps.children import ChildProcesses
from hotloop.sweeps.trial import Trial, TrialOutcome, run_trial

VISIBLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHARED_MEMORY = 0.9  # of a device's memory, what processes that share it may take together

Handle = TypeVar("Handle")
Listener = Callable[[TrialOutcome], None]
Engine = Callable[[Iterable[Trial], int, Listener], tuple[list[TrialOutcome], int]]
"""Runs so many trials and tells of each as it ends; all outcomes in order, and how many ran at a time.

The next trial is asked for when there is a place for it, so that it may be chosen by what the others gave.
"""


@dataclass(frozen=True)
class DevicesFound:
    """The devices that processes can be given one by one, and what was said while looking."""

    platform: str
    count: int
    warnings: tuple[str, ...] = ()

    def of_a_trial(self, environment: Mapping[str, str]) -> int | None:
        """How many of them a trial has: one, or what XLA_FLAGS makes of a CPU; None for a TPU, which is not counted."""
        if self.platform == "tpu":
            return None
        virtual = VIRTUAL.search(environment.get("XLA_FLAGS", "")) if self.platform == "cpu" else None
        return int(virtual[1]) if virtual else 1


def find_devices(device: str, only_accelerator: bool) -> DevicesFound:
    """What `--device` finds here, asked by a child, as who asks an accelerator holds it; else a DeviceError."""
    if not only_accelerator and (device == "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu"):
        return DevicesFound("cpu", 1)
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, ignore) as pool:
        return pool.submit(_find_devices, device, only_accelerator).result()


def _find_devices(device: str, only_accelerator: bool) -> DevicesFound:
    from hotloop.engine.device import setup

    said: list[str] = []
    chosen = setup(device, only_accelerator=only_accelerator, warn=said.append)
    import jax

    # A process takes all TPU chips of a host, and a CPU is one device however it is cut.
    count = len(jax.devices("gpu")) if chosen.platform == "gpu" else 1
    return DevicesFound(chosen.platform, count, tuple(said))


def trial_environments(
    devices: DevicesFound, concurrent: int, given: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each of so many processes at a time: devices by turns, memory shared where they are."""
    if devices.platform != "gpu":
        return [dict(given) for _ in range(concurrent)]
    names = [name.strip() for name in given.get(VISIBLE, "").split(",") if name.strip()]
    names = names or [str(n) for n in range(devices.count)]
    memory = share_memory(math.ceil(concurrent / devices.count)) if MEMORY not in given else {}
    return [{**given, VISIBLE: names[slot % devices.count], **memory} for slot in range(concurrent)]


def share_memory(sharing: int) -> dict[str, str]:
    return {MEMORY: f"{SHARED_MEMORY / sharing:.3f}"} if sharing > 1 else {}


@dataclass(frozen=True)
class LocalEngine:
    concurrent: int | None
    devices: DevicesFound
    say: Callable[[str], None]

    def __call__(
        self, trials: Iterable[Trial], count: int, ended: Listener
    ) -> tuple[list[TrialOutcome], int]:
        self.say(self.describe(count))
        concurrent = min(self.concurrent or self.devices.count, count)
        return run_trials(trials, trial_environments(self.devices, concurrent, os.environ), ended), concurrent

    def describe(self, trials: int) -> str:
        count, platform = self.devices.count, self.devices.platform
        concurrent = min(self.concurrent or count, trials)
        kinds = f"trial{'s' * (trials != 1)} on {count} {platform} device{'s' * (count > 1)}"
        return f"{trials} {kinds}, {concurrent} at a time"


def run_trials(
    trials: Iterable[Trial], environments: Sequence[Mapping[str, str]], ended: Listener
) -> list[TrialOutcome]:
    """As many at a time as there are environments."""
    with OrphanGuard() as guard, ExitStack() as open_things:
        children = ChildProcesses(guard)
        kill = partial(children.stop, grace=0)
        open_things.enter_context(raise_stops())
        open_things.enter_context(before_leaving(kill))
        pool = open_things.enter_context(ThreadPoolExecutor(len(environments)))

        def submit(trial: Trial, slot: int) -> "Future[TrialOutcome]":
            return pool.submit(run_trial, trial, slot, environments[slot], children)

        outcomes = []
        try:
            for outcome in fill_places(trials, len(environments), submit, _wait_for_one):
                outcomes.append(outcome)
                ended(outcome)
        except BaseException:
            children.stop()  # and none of the trials that wait will start
            raise
    return sorted(outcomes, key=lambda outcome: outcome.trial.number)


def _wait_for_one(running: "Iterable[Future[TrialOutcome]]") -> "tuple[Future[TrialOutcome], TrialOutcome]":
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    first = done.pop()
    return first, first.result()


def fill_places(
    trials: Iterable[Trial],
    places: int,
    submit: Callable[[Trial, int], Handle],
    wait_for_one: Callable[[Iterable[Handle]], tuple[Handle, TrialOutcome]],
) -> Iterator[TrialOutcome]:
    """Each outcome as it comes; a trial is asked for and submitted once a place is free."""
    waiting, free = iter(trials), list(range(places))
    running: dict[Handle, int] = {}
    while True:
        while free and (trial := next(waiting, None)) is not None:
            slot = free.pop(0)
            running[submit(trial, slot)] = slot
        if not running:
            return
        done, outcome = wait_for_one(list(running))
        free.append(running.pop(done))
        yield outcome
