"""The device to compute on: chosen before any other jax work, or an error in one line.

`setup` also turns on the cache of compiled programs and keeps JAX's own log lines to itself. It knows
nothing of what will be computed; several devices at once are `mesh`'s matter.
"""

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.engine import cache, host_memory
from hotloop.engine.configure import configure
from hotloop.errors import DeviceError

if TYPE_CHECKING:
    import jax

INSTALL = {"gpu": "hotloop[cuda]", "tpu": "hotloop[tpu]"}


def setup(
    device: str = "auto", *, only_accelerator: bool = False, warn: Callable[[str], None] = warnings.warn
) -> "jax.Device":
    """The first device of the platform asked for (auto: accelerators before the CPU), made jax's default."""
    quiet()
    import jax

    cache.enable(warn)
    chosen = _auto(warn) if device == "auto" else _named(device)
    if only_accelerator and chosen.platform == "cpu":
        raise DeviceError(
            "only_accelerator=True: only a CPU was found; leave it out to compute there, or install "
            "'hotloop[cuda]' or 'hotloop[tpu]' for the accelerator"
        )
    if chosen.platform != jax.default_backend():
        configure(jax_default_device=chosen)
    if chosen.platform == "cpu":
        host_memory.keep_freed()
    return chosen


def quiet() -> None:
    """Errors of XLA and jax come to us as exceptions; their log lines only confuse."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "JAX_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("jax").setLevel(logging.ERROR)


def _auto(warn: Callable[[str], None]) -> "jax.Device":
    import jax

    try:
        chosen = jax.devices()[0]
    except RuntimeError as error:
        configure(jax_platforms="cpu")
        warn(f"the accelerator cannot be used, so the CPU is: {one_line(error)}")
        return jax.devices()[0]
    if chosen.platform == "cpu" and nvidia_present() and os.environ.get("JAX_PLATFORMS") != "cpu":
        warn("an NVIDIA GPU is here but jax cannot use it, so the CPU is used: pip install 'hotloop[cuda]'")
    return chosen


def _named(platform: str) -> "jax.Device":
    import jax

    # Where other backends are up already this changes nothing; the lookup below is by platform all the same.
    configure(jax_platforms="cpu" if platform == "cpu" else None)
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        fix = (
            f"pip install '{INSTALL[platform]}', or use device=auto"
            if platform in INSTALL
            else "use device=auto"
        )
        reason = "jax knows none here" if "Unknown backend" in str(error) else one_line(error)
        raise DeviceError(f"device={platform}: {reason}; {fix}") from error


def nvidia_present() -> bool:
    """Whether the system shows an NVIDIA GPU, whatever jax makes of it."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/dxg"))


def one_line(error: Exception) -> str:
    """The first line of an error, cut where it runs on."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
