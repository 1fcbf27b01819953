"""Where results come from: source, packages, machine, device, environment. Nothing here imports what it describes;
what cannot be found is None, and variables whose names sound like secrets are never kept.
"""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hotloop.engine.device import read_commit, run_query, source_commit
from hotloop.machine import cpu_model, usable_cores
from hotloop.version import VERSION

KEPT = re.compile(  # of variables, those that may change how fast a program runs
    r"(JAX|XLA|TF|CUDA|NVIDIA|NCCL|CUDNN|HOTLOOP|OMP|MKL|OPENBLAS|LD|MALLOC|POPLAR|KMP)_\w*"
    r"|PYTHON\w*|PATH|VIRTUAL_ENV|DATASETS_DIR"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
GPU_FIELDS = ("name", "driver_version", "memory.total", "uuid", "power.limit", "clocks.max.sm")


def collect_provenance(
    specs: Mapping[str, str], folder: Path, extra: Mapping[str, str] = {}
) -> dict[str, Any]:
    """All of it; `specs`: hashes of benchmark files, `folder`: of the first, `extra`: variables of every program."""
    variables = {**os.environ, **extra}
    kept = [name for name in sorted(variables) if KEPT.fullmatch(name) and not SECRET.search(name)]
    gpus, device = list_gpus(), {"kind": "cpu", "name": cpu_model(), "count": 1, "driver": None}
    hidden = variables.get("JAX_PLATFORMS") == "cpu" or variables.get("CUDA_VISIBLE_DEVICES") == ""
    if gpus and not hidden:  # what programs compute on by default
        name, driver = gpus[0]["name"], gpus[0]["driver_version"]
        device = {"kind": "gpu", "name": name, "count": len(gpus), "driver": driver}
    return {
        **read_commit(folder),
        "hotloop": {"version": VERSION, **source_commit()},
        "device": device,
        "gpus": gpus,
        "cpu": {"name": cpu_model(), "cores": os.cpu_count(), "usable_cores": usable_cores()},
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": list_packages(),
        "environment": {name: variables[name] for name in kept},
        "specs": dict(specs),
    }


@cache
def list_packages() -> Mapping[str, str]:
    """Name and version of everything installed; looked up once, since it takes a while."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for one in distributions():
        if name := one.metadata["Name"]:
            found.setdefault(name, one.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


@cache
def list_gpus() -> Sequence[Mapping[str, str]]:
    said = run_query(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (said or "").splitlines()]
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]
