"""What a benchmark needs of the machine, by its `needs_dataset` and `devices`: what is missing is why it is skipped.

Nothing is started and no jax imported: devices are counted as far as the system tells. Where it does not (a TPU),
nothing is refused.
"""

import re
from collections.abc import Mapping
from functools import cache

from hotloop.bench.model import Benchmark
from hotloop.bench.provenance import nvidia

DATASETS = "DATASETS_DIR"
VIRTUAL = re.compile(r"--xla_force_host_platform_device_count=(\d{1,6})")


def missing(benchmark: Benchmark, env: Mapping[str, str]) -> str | None:
    """Why the benchmark cannot run in this environment, or None."""
    if benchmark.needs_dataset and not env.get(DATASETS):
        return f"needs a data set, and {DATASETS} is not set: set it to the folder that data sets are in"
    there = count_devices(env) if benchmark.devices else None
    if there is not None and benchmark.devices is not None and there < benchmark.devices:
        here = "there is 1" if there == 1 else f"there are {there}"
        return f"is for {benchmark.devices} devices, and {here}"
    return None


def count_devices(env: Mapping[str, str]) -> int | None:
    """How many devices a program sees; None where only jax could tell."""
    platforms = env.get("JAX_PLATFORMS", "")
    visible = env.get("CUDA_VISIBLE_DEVICES")
    gpus = _gpus() if visible is None else len([name for name in visible.split(",") if name.strip()])
    if platforms != "cpu" and gpus:
        return gpus
    if platforms not in ("", "cpu"):
        return None
    virtual = VIRTUAL.findall(env.get("XLA_FLAGS", ""))
    return int(virtual[-1]) if virtual else 1


@cache
def _gpus() -> int:
    return len(nvidia())
