"""The device to compute on, chosen before any other jax work; devices as a mesh; what a result owes to the machine.

Nothing here imports jax at its top: `setup` quiets jax first.
"""

import ctypes
import logging
import os
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, processor, python_version, system
from typing import TYPE_CHECKING, Any

from hotloop.engine import cache
from hotloop.engine.cache import configure
from hotloop.errors import DeviceError
from hotloop.version import VERSION as __version__

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

INSTALL = {"gpu": "hotloop[cuda]", "tpu": "hotloop[tpu]"}
REPLICA = "replica"
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
SOURCE = Path(__file__).resolve().parents[3]
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h


def setup(
    device: str = "auto", *, only_accelerator: bool = False, warn: Callable[[str], None] = warnings.warn
) -> "jax.Device":
    """The first device of the platform asked for (auto: accelerators before the CPU), made jax's default.

    Compiled programs are kept in the cache from here on.
    """
    # Errors of XLA and jax come to us as exceptions; their log lines only confuse.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "JAX_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("jax").setLevel(logging.ERROR)
    import jax

    cache.enable(warn)
    chosen = _find_any(warn) if device == "auto" else _find_named(device)
    if only_accelerator and chosen.platform == "cpu":
        raise DeviceError(
            "only_accelerator=True: only a CPU was found; leave it out to compute there, or install "
            "'hotloop[cuda]' or 'hotloop[tpu]' for the accelerator"
        )
    if chosen.platform != jax.default_backend():
        configure(jax_default_device=chosen)
    if chosen.platform == "cpu":
        keep_freed()
    return chosen


def _find_any(warn: Callable[[str], None]) -> "jax.Device":
    import jax

    try:
        chosen = jax.devices()[0]
    except RuntimeError as error:
        configure(jax_platforms="cpu")
        warn(f"the accelerator cannot be used, so the CPU is: {_first_line(error)}")
        return jax.devices()[0]
    if chosen.platform == "cpu" and nvidia_present() and os.environ.get("JAX_PLATFORMS") != "cpu":
        warn("an NVIDIA GPU is here but jax cannot use it, so the CPU is used: pip install 'hotloop[cuda]'")
    return chosen


def nvidia_present() -> bool:
    """Whether the system shows an NVIDIA GPU, whatever jax makes of it."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/dxg"))


def _find_named(platform: str) -> "jax.Device":
    import jax

    # Where other backends are up already this changes nothing; the lookup below is by platform all the same.
    configure(jax_platforms="cpu" if platform == "cpu" else None)
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        fix = f"pip install '{INSTALL[platform]}', or " if platform in INSTALL else ""
        reason = "jax knows none here" if "Unknown backend" in str(error) else _first_line(error)
        raise DeviceError(f"device={platform}: {reason}; {fix}use device=auto") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def platform() -> str:
    """cpu, gpu or tpu: that of the default device, which need not be the default backend's."""
    import jax

    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return str(getattr(chosen, "platform", chosen) or jax.default_backend())


def replica_mesh(count: int, platform: str | None = None) -> "Mesh":
    """A mesh of the first `count` devices of a platform (None: the default one) along the axis `replica`."""
    import jax
    from jax.sharding import AxisType

    devices = jax.devices(platform)
    if count > len(devices):
        here = f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}"
        raise DeviceError(f"replicas={count}: only {here} here; use at most {len(devices)}")
    return jax.make_mesh((count,), (REPLICA,), (AxisType.Auto,), devices=devices[:count])


def pick_device(number: int, platform: str | None = None) -> "jax.Device":
    """The device of a platform with this number, counted from 0; -1 is the first."""
    import jax

    devices = jax.devices(platform)
    if number >= len(devices):
        raise DeviceError(f"device_id={number}: the devices here are 0 to {len(devices) - 1}")
    return devices[max(number, 0)]


def describe_environment() -> dict[str, Any]:
    """The record that goes with every result, without a host name; devices are those of the platform in use."""
    import jax

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    devices = jax.devices()
    driver = _search(r"\s([0-9]+\.[0-9.]+)\s", "/proc/driver/nvidia/version")
    return {
        "hotloop": __version__,
        "python": python_version(),
        **{package: installed(package) for package in PACKAGES},
        "platform": devices[0].platform,
        "device_kinds": sorted({device.device_kind for device in devices}),
        "device_count": len(devices),
        "driver": driver if devices[0].platform == "gpu" else None,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{system()} {machine()}",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **source_commit(),
    }


def cpu_model() -> str:
    return _search(r"(?m)^model name\s*:\s*(.+)$", "/proc/cpuinfo") or processor() or machine()


def _search(pattern: str, file: str) -> str | None:
    """The first group of a pattern in a file of the system; None where there is none of either."""
    try:
        found = re.search(pattern, Path(file).read_text())
    except OSError:
        return None
    return found[1].strip() if found else None


def usable_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def source_commit() -> dict[str, Any]:
    """The source tree's commit and whether files were changed since; None for an installed package."""
    commit = _git("rev-parse", "HEAD") if (SOURCE / ".git").exists() else None
    if commit is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*words: str) -> str | None:
    # Without optional locks: a kill of ours must not leave the repository locked.
    argv = ["git", "--no-optional-locks", "-C", str(SOURCE), *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def keep_freed() -> bool:
    """Let malloc keep what is freed; False where there is no glibc to tell.

    glibc hands large blocks back to the system, and every compiled call allocates its temporaries anew: each page is
    cleared and mapped again, 450,000 times in 150 updates of a small CNN. Kept, it is a third of that; the updates took
    5 to 10 % less time, and the process no more memory at its peak.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20))
    return all(mallopt(name, value) == 1 for name, value in settings)


def peak_bytes() -> int:
    """The most memory that this process has had.

    By the kernel's own mark where there is one: `ru_maxrss` begins with that of the process which started this one.
    """
    if mark := _search(r"VmHWM:\s*(\d+) kB", "/proc/self/status"):
        return 1024 * int(mark)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
