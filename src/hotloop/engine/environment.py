"""What a result depends on besides its options: versions, devices, cores, the source's commit. No host
name.
"""

import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, processor, python_version, system
from typing import Any

from hotloop.version import VERSION as __version__

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
SOURCE = Path(__file__).resolve().parents[3]


def environment() -> dict[str, Any]:
    """The record that goes with every result; devices are those of the platform in use."""
    return {
        "hotloop": __version__,
        "python": python_version(),
        **{package: package_version(package) for package in PACKAGES},
        **devices(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{system()} {machine()}",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **source_commit(),
    }


def package_version(package: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> dict[str, Any]:
    """Platform, kinds, count and driver of jax's devices."""
    import jax

    found = jax.devices()
    return {
        "platform": found[0].platform,
        "device_kinds": sorted({device.device_kind for device in found}),
        "device_count": len(found),
        "driver": nvidia_driver() if found[0].platform == "gpu" else None,
    }


def nvidia_driver() -> str | None:
    """The version of the NVIDIA kernel driver, where one is loaded."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\s([0-9]+\.[0-9.]+)\s", text)
    return found[1] if found else None


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else processor() or machine()


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
