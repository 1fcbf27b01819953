"""Where results come from: source, packages, machine, device, environment. Nothing here imports what it describes;
what cannot be found is None, and variables whose names sound like secrets are never kept.
"""

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hotloop.engine.device import cpu_model, source_commit, usable_cores
from hotloop.version import VERSION

TIMEOUT = 5.0
KEPT = re.compile(
    r"(JAX|XLA|TF|CUDA|NVIDIA|NCCL|CUDNN|HOTLOOP|OMP|MKL|OPENBLAS|LD|MALLOC|POPLAR|KMP)_\w*"
    r"|PYTHON\w*|PATH|VIRTUAL_ENV|DATASETS_DIR"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
GPU_FIELDS = ("name", "driver_version", "memory.total", "uuid", "power.limit", "clocks.max.sm")


def collect_provenance(
    specs: Mapping[str, str], folder: Path, extra: Mapping[str, str] = {}
) -> dict[str, Any]:
    """All of it; `specs` are the benchmark files and their hashes, `folder` is where the first of them lies.

    `extra` are variables that every program gets over those of this process.
    """
    variables = {**os.environ, **extra}
    gpus = list_gpus()
    return {
        **read_commit(folder),
        "hotloop": {"version": VERSION, **source_commit()},
        "device": describe_device(gpus, variables),
        "gpus": gpus,
        "cpu": {"name": cpu_model(), "cores": os.cpu_count(), "usable_cores": usable_cores()},
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": list_packages(),
        "environment": select_variables(variables),
        "specs": dict(specs),
    }


def run_query(argv: Sequence[str]) -> str | None:
    """What another program says, or None if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
            check=True,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def read_commit(folder: Path) -> dict[str, Any]:
    """The commit of a folder, and whether tracked files differ from it."""
    commit = run_query(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if commit is None:
        return {"commit": None, "dirty": None}
    look = ["git", "--no-optional-locks", "-C", str(folder)]  # a kill must not leave the repository locked
    changes = run_query([*look, "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


@cache
def list_packages() -> Mapping[str, str]:
    """Name and version of everything installed; looked up once, since it takes a while."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for one in distributions():
        if name := one.metadata["Name"]:
            found.setdefault(name, one.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def select_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that may change how fast a program runs."""
    kept = {
        name: text for name, text in variables.items() if KEPT.fullmatch(name) and not SECRET.search(name)
    }
    return dict(sorted(kept.items()))


@cache
def list_gpus() -> Sequence[Mapping[str, str]]:
    said = run_query(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (said or "").splitlines()]
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def describe_device(gpus: Sequence[Mapping[str, str]], variables: Mapping[str, str]) -> dict[str, Any]:
    """What programs compute on by default: the GPU where there is one, and no variable hides it."""
    hidden = variables.get("JAX_PLATFORMS") == "cpu" or variables.get("CUDA_VISIBLE_DEVICES") == ""
    if gpus and not hidden:
        first = gpus[0]
        return {"kind": "gpu", "name": first["name"], "count": len(gpus), "driver": first["driver_version"]}
    return {"kind": "cpu", "name": cpu_model(), "count": 1, "driver": None}
