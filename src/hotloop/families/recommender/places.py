"""Where trials can run on this machine: its devices, and the environment that shows a process one of them.

Devices are counted in a process of its own, because whoever asks an accelerator holds it. It knows nothing of what
will run there.
"""

import math
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

VISIBLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHARED = 0.9
"""Of a device's memory, what processes that share it may take together."""


@dataclass(frozen=True)
class Seen:
    """The devices that processes can be given one by one, and what was said while looking."""

    platform: str
    count: int
    warnings: tuple[str, ...] = ()


def look(device: str, only_accelerator: bool) -> Seen:
    """What `--device` finds here; DeviceError where it finds nothing."""
    if not only_accelerator and (device == "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu"):
        return Seen("cpu", 1)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_ignore_interrupts) as pool:
        return pool.submit(_look, device, only_accelerator).result()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _look(device: str, only_accelerator: bool) -> Seen:
    from hotloop.engine.device import setup

    said: list[str] = []
    chosen = setup(device, only_accelerator=only_accelerator, warn=said.append)
    import jax

    # A process takes all TPU chips of a host, and a CPU is one device however it is cut.
    count = len(jax.devices("gpu")) if chosen.platform == "gpu" else 1
    return Seen(chosen.platform, count, tuple(said))


def environments(seen: Seen, concurrent: int, given: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each of so many processes at a time: devices by turns, memory shared where they are."""
    if seen.platform != "gpu":
        return [dict(given) for _ in range(concurrent)]
    names = [name.strip() for name in given.get(VISIBLE, "").split(",") if name.strip()]
    names = names or [str(n) for n in range(seen.count)]
    sharing = math.ceil(concurrent / seen.count)
    memory = {MEMORY: f"{SHARED / sharing:.3f}"} if sharing > 1 and MEMORY not in given else {}
    return [{**given, VISIBLE: names[slot % seen.count], **memory} for slot in range(concurrent)]
