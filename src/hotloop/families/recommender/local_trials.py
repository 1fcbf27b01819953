"""Trials as processes of this machine: each in a process group of its own, so many at a time, none left behind.

A trial that fails is an outcome like any other and the rest go on. Ctrl-C, SIGTERM and SIGHUP stop every child:
it may save what it has, and is killed if it does not. Devices are counted in a process of its own, because whoever
asks an accelerator holds it. What a trial computes is not known here.
"""

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from queue import SimpleQueue
from typing import IO, Any

from hotloop.engine.interrupt import before_leaving, raise_stops
from hotloop.families.recommender.trials import Listener, Trial, TrialOutcome, read_figures
from hotloop.options.files import parse_json

TAIL_BYTES = 64 * 1024
"""Of each stream of a child, what is kept."""
GRACE_SECONDS = 10.0
"""In which a child that is told to stop may save."""
FOREVER = 1e9
"""Seconds. Python waits for ever in one system call, but with a limit it looks about: Ray's cancelling is no signal."""
VISIBLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHARED_MEMORY = 0.9
"""Of a device's memory, what processes that share it may take together."""


@dataclass(frozen=True)
class DevicesFound:
    """The devices that processes can be given one by one, and what was said while looking."""

    platform: str
    count: int
    warnings: tuple[str, ...] = ()


def find_devices(device: str, only_accelerator: bool) -> DevicesFound:
    """What `--device` finds here; DeviceError where it finds nothing."""
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
    sharing = math.ceil(concurrent / devices.count)
    memory = share_memory(sharing) if MEMORY not in given else {}
    return [{**given, VISIBLE: names[slot % devices.count], **memory} for slot in range(concurrent)]


def share_memory(sharing: int) -> dict[str, str]:
    return {MEMORY: f"{SHARED_MEMORY / sharing:.3f}"} if sharing > 1 else {}


@dataclass(frozen=True)
class LocalEngine:
    concurrent: int | None
    devices: DevicesFound
    say: Callable[[str], None]

    def __call__(self, trials: Sequence[Trial], ended: Listener) -> tuple[list[TrialOutcome], int]:
        self.say(self.describe(len(trials)))
        concurrent = self.at_a_time(len(trials))
        return run_trials(trials, trial_environments(self.devices, concurrent, os.environ), ended), concurrent

    def at_a_time(self, trials: int) -> int:
        return min(self.concurrent or self.devices.count, trials)

    def describe(self, trials: int) -> str:
        devices = (
            f"{self.devices.count} {self.devices.platform} device{'s' if self.devices.count > 1 else ''}"
        )
        return f"{trials} trials on {devices}, {self.at_a_time(trials)} at a time"


def run_trials(
    trials: Sequence[Trial], environments: Sequence[Mapping[str, str]], ended: Listener
) -> list[TrialOutcome]:
    """As many at a time as there are environments."""
    children = ChildProcesses()
    free: SimpleQueue[int] = SimpleQueue()
    for slot in range(len(environments)):
        free.put(slot)

    def run(trial: Trial) -> TrialOutcome:
        slot = free.get()
        try:
            return run_trial(trial, slot, environments[slot], children)
        finally:
            free.put(slot)

    outcomes = []
    with raise_stops(), before_leaving(children.kill), ThreadPoolExecutor(len(environments)) as pool:
        try:
            for future in as_completed([pool.submit(run, trial) for trial in trials]):
                outcomes.append(future.result())
                ended(outcomes[-1])
        except BaseException:
            children.stop()  # and none of the trials that wait will start
            raise
    return sorted(outcomes, key=lambda outcome: outcome.trial.number)


def run_trial(
    trial: Trial, slot: int, environment: Mapping[str, str], children: "ChildProcesses"
) -> TrialOutcome:
    began = time.monotonic()
    child = children.start(trial.command, environment)
    assert child.stdout is not None and child.stderr is not None
    out, err = StreamTail(child.stdout), StreamTail(child.stderr)
    status = child.wait(FOREVER)
    children.forget(child)
    seconds = time.monotonic() - began
    answer, figures = _parse_answer(out.text()), read_figures(trial.folder)
    return TrialOutcome(trial, slot, status, seconds, answer, err.text(), figures)


def _parse_answer(text: str) -> Mapping[str, Any] | None:
    try:
        found = parse_json(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


class ChildProcesses:
    """Processes that must not outlive this one: in groups of their own, stopped together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._running: set[subprocess.Popen[bytes]] = set()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A new child; KeyboardInterrupt once they were stopped."""
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                process_group=0,  # Ctrl-C is for us, who then stop it and whatever it started
            )
            self._running.add(child)
            return child

    def forget(self, child: subprocess.Popen[bytes]) -> None:
        """It has ended: nothing more to stop."""
        with self._lock:
            self._running.discard(child)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Ask every child to stop, then kill what is left of their groups; no child starts afterwards."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        try:
            _send(running, signal.SIGTERM)
            limit = time.monotonic() + grace
            for child in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, limit - time.monotonic()))
        finally:
            _send(running, signal.SIGKILL)

    def kill(self) -> None:
        self.stop(0)


def _send(children: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)


class StreamTail:
    """Reads a stream to its end in a thread and keeps the last part, so that a child never waits for us."""

    def __init__(self, stream: IO[bytes]):
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while part := os.read(stream.fileno(), TAIL_BYTES):
                self._kept = (self._kept + part)[-TAIL_BYTES:]

    def text(self) -> str:
        """What was kept, once the stream ended; a grandchild that holds it open is not waited for."""
        self._thread.join(GRACE_SECONDS / 2)
        return self._kept.decode(errors="replace")
