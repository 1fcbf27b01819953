"""Processes that must not outlive this one: started in groups of their own, read without end, stopped together.

It knows nothing of what they do.

Where trials can run on this machine: its devices, and the environment that shows a process one of them.
"""

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import IO

TAIL_BYTES = 64 * 1024
"""Bytes of each stream of a child that are kept."""
GRACE_SECONDS = 10.0
"""Seconds in which a child that is told to stop may save."""


class ChildProcesses:
    """The processes that must not outlive this one."""

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
                process_group=0,
            )
            self._running.add(child)
            return child

    def ended(self, child: subprocess.Popen[bytes]) -> None:
        """Nothing more to stop."""
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
        """Kill them all, now."""
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
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_ignore_interrupts) as pool:
        return pool.submit(_find_devices, device, only_accelerator).result()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _find_devices(device: str, only_accelerator: bool) -> DevicesFound:
    from hotloop.engine.device import setup

    said: list[str] = []
    chosen = setup(device, only_accelerator=only_accelerator, warn=said.append)
    import jax

    # A process takes all TPU chips of a host, and a CPU is one device however it is cut.
    count = len(jax.devices("gpu")) if chosen.platform == "gpu" else 1
    return DevicesFound(chosen.platform, count, tuple(said))


def trial_environments(seen: DevicesFound, concurrent: int, given: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each of so many processes at a time: devices by turns, memory shared where they are."""
    if seen.platform != "gpu":
        return [dict(given) for _ in range(concurrent)]
    names = [name.strip() for name in given.get(VISIBLE, "").split(",") if name.strip()]
    names = names or [str(n) for n in range(seen.count)]
    sharing = math.ceil(concurrent / seen.count)
    memory = {MEMORY: f"{SHARED_MEMORY / sharing:.3f}"} if sharing > 1 and MEMORY not in given else {}
    return [{**given, VISIBLE: names[slot % seen.count], **memory} for slot in range(concurrent)]
