"""Every test runs on four virtual CPU devices (or on the platform that JAX_PLATFORMS names), with its own cache."""

import gc
import math
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jaxlib.version
import pytest
from hypothesis import settings

from hotloop.engine import progress

LEVEL = "--xla_backend_optimization_level"
VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "PYTHONPATH" in os.environ:
    # Children must find the same packages as the test that starts them, from whichever folder.
    entries = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries)
# float32 means float32 also where an accelerator would take a faster, shorter type for products.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
flags = os.environ.get("XLA_FLAGS", "")
if os.environ["JAX_PLATFORMS"] == "cpu" and VIRTUAL_DEVICES not in flags:
    flags = f"{flags} {VIRTUAL_DEVICES}=4"
    # Virtual devices share what cores there are: one that waits for the others must not give up on them.
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=600".strip()
# A test that wants other libraries' kernels asks for them: to time every shape of every test would take minutes.
os.environ.setdefault("HOTLOOP_NATIVE", "0")
if "HOTLOOP_CACHE" not in os.environ:
    cache = tempfile.TemporaryDirectory(prefix="hotloop-test-cache-")
    os.environ["HOTLOOP_CACHE"] = cache.name

# What a test reads must not depend on how long the compiler took.
progress.SLOW = math.inf

# Compiling inside an example takes as long as it takes; a slow machine is not a failure.
settings.register_profile("hotloop", deadline=None)
settings.load_profile("hotloop")


def pytest_configure(config: pytest.Config) -> None:
    """Most of the suite's time is the compiler's, and programs that run a few times need not be optimised.

    With XLA's plain loops for fused operations, too, it takes half the time; the slow tests have those that users have.
    The XLA of jaxlib 0.11 has no such loops any more and ends a process that asks for them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if VIRTUAL_DEVICES in flags and LEVEL not in flags:
        has_plain_loops = jaxlib.version.__version_info__ < (0, 11)
        quick = f"{LEVEL}=0" + (" --xla_cpu_use_fusion_emitters=false" if has_plain_loops else "")
        os.environ["XLA_FLAGS"] = f"{flags} {quick if config.option.markexpr == 'not slow' else f'{LEVEL}=1'}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before any is left out: what needs the machine to itself is slow."""
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Thousands of tests live to the end: the collector need not look at them, and all modules, each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def signals_heard() -> Iterator[None]:
    """Signals do what they do in a terminal, even where the tests' own parent ignores them: nohup, a background job."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
