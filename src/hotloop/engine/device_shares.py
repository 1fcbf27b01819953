"""The devices of this machine, counted without jax, and each process's share of them.

Whoever asks jax for a GPU holds it, and a launcher must hold none. Two processes never share a GPU: each sees its own
by CUDA_VISIBLE_DEVICES. A CPU's cores count as devices, unless XLA_FLAGS says how many a process has.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hotloop.engine.device import run_query
from hotloop.errors import OptionError
from hotloop.machine import usable_cores

VISIBLE, PLATFORMS = "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"
VIRTUAL = re.compile(r"--xla_force_host_platform_device_count=(\d{1,6})")
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")


@dataclass(frozen=True)
class LocalDevices:
    """What processes can be given: the names of GPUs, or so many processes at most (None: any number)."""

    platform: str
    names: tuple[str, ...] = ()
    most: int | None = None

    @property
    def limit(self) -> int | None:
        return len(self.names) if self.platform == "gpu" else self.most

    def describe(self) -> str:
        """`2 GPUs`, `1 core`, `1 TPU host`."""
        count = self.limit or 0
        unit = {"gpu": "GPU", "tpu": "TPU host"}.get(self.platform, "core")
        return f"{count} {unit}{'s' * (count != 1)}"

    def share(self, processes: int) -> tuple[dict[str, str], ...]:
        """The variables that give each process its own devices, equally many."""
        if self.platform != "gpu":
            return tuple({} for _ in range(processes))
        each = len(self.names) // processes
        return tuple({VISIBLE: ",".join(self.names[n * each : (n + 1) * each])} for n in range(processes))


def find_devices(device: str, environment: Mapping[str, str]) -> LocalDevices:
    """What `--device` would find here, without asking jax."""
    platforms = environment.get(PLATFORMS, "").lower().split(",")[0]
    wanted = {"cuda": "gpu", "": "auto"}.get(platforms, platforms) if device == "auto" else device
    gpus = list_visible_gpus(environment) if wanted in ("auto", "gpu") else ()
    if gpus and (wanted == "gpu" or any(find_spec(name) for name in CUDA_PLUGINS)):
        return LocalDevices("gpu", gpus)
    if wanted == "tpu" or (wanted == "auto" and has_tpu()):
        return LocalDevices("tpu", most=1)  # a process takes all chips of its host
    virtual = VIRTUAL.search(environment.get("XLA_FLAGS", ""))
    return LocalDevices("cpu", most=None if virtual else usable_cores())


def has_tpu() -> bool:
    return find_spec("libtpu") is not None and any(any(Path("/dev").glob(name)) for name in TPU_FILES)


def list_visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the GPUs that a process with this environment sees: numbers, or what it calls them itself."""
    if VISIBLE in environment:
        names = [name.strip() for name in environment[VISIBLE].split(",")]
        known = names[: next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))]
        return tuple(dict.fromkeys(known))
    said = run_query(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"])
    numbers = [line.strip() for line in (said or "").splitlines()]
    if not numbers or not all(number.isdigit() for number in numbers):
        found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia[0-9]*"))
        numbers = sorted((match[1] for match in found if match), key=int)
    return tuple(numbers)


def can_share(instances: int, replicas: int, devices_each: int = 1) -> bool:
    """Whether so many processes can share replicas of `devices_each` devices.

    A process has whole replicas, or a replica whole processes, and all have equally many devices.
    """
    divide = max(instances, replicas) % min(instances, replicas) == 0
    return divide and replicas * devices_each % instances == 0


def check_instances(instances: int, replicas: int, devices_each: int = 1) -> None:
    """OptionError where they cannot."""
    devices = replicas * devices_each
    if instances > devices:
        raise OptionError(
            f"num_instances={instances}: more than replicas ({replicas}) x devices a replica ({devices_each}); ask "
            f"for at most {devices}, or for more replicas"
        )
    if not can_share(instances, replicas, devices_each):
        raise OptionError(
            f"replicas={replicas}: {instances} instances do not divide them; ask for a multiple of {instances}"
        )
