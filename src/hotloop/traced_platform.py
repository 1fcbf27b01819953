"""The platform that a program is traced for, where it is compiled here and now and for no other.

An operation with a path for each of several platforms (`layers/paths.py`) is traced for all of them, with its
gradients: twice the tracing of a ResNet-50. Who knows the platform spares that. What is exported is traced outside of
it, as it must have all paths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

# Part of jit's cache key, so that what was traced for one platform is taken for no other.
_PLATFORM: Any = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]


@contextmanager
def trace_for(platform: str | None) -> Iterator[None]:
    """Within it, what is traced is for this platform alone: cpu, cuda, rocm or tpu (None: for any)."""
    with _PLATFORM(platform):
        yield


def find_traced_platform() -> str | None:
    """None where it is for any."""
    platform: str | None = _PLATFORM.value
    return platform


def name_platform(device: jax.Device) -> str:
    """A device's platform as paths are chosen by it: GPUs by their maker."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
