"""What a device can do at most, measured: matrix products per second by type, bytes copied per second.

Measured once for each device and kept in the cache folder; families compare themselves with it. Each figure
is the median of several timed calls of a compiled loop whose every turn depends on the one before, on
random numbers (a GPU is faster on zeros). It knows no model.
"""

import contextlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.engine import cache
from hotloop.engine.environment import cpu_model, usable_cores
from hotloop.options.json_text import load_json

SECONDS_EACH = 0.2  # of timed calls for one figure, once it has compiled
MOST_CALLS, FEWEST_CALLS = 7, 3


@dataclass(frozen=True)
class Ceilings:
    """The measured limits of one device, and with what they were measured."""

    device: str
    matmul_tflops: Mapping[str, float]  # by dtype: float32 is what jax uses by default, see float32_uses
    float32_uses: str  # the type that a float32 product is computed in: float32, tf32 or bfloat16
    copy_gbps: float  # bytes read plus bytes written, 10^9 a second
    measured: str
    jax: str

    def seconds(self, flops: float, bytes_moved: float, dtype: str) -> float:
        """The least time for this much work: the roofline."""
        return max(flops / (self.matmul_tflops[dtype] * 1e12), bytes_moved / (self.copy_gbps * 1e9))


@dataclass(frozen=True)
class Sizes:
    """How large the measured work is: rows of the square products, loop turns, bytes copied."""

    rows: Mapping[str, int]
    turns: Mapping[str, int]
    copied: int


ON_CPU = Sizes(
    {"float32": 1024, "bfloat16": 512, "float16": 512}, {"float32": 2, "bfloat16": 1, "float16": 1}, 2**28
)
ON_ACCELERATOR = Sizes(
    {"float32": 8192, "bfloat16": 8192, "float16": 8192}, {"float32": 2, "bfloat16": 8, "float16": 8}, 2**31
)


def ceilings(device: jax.Device, calibrate: bool = False) -> Ceilings:
    """The limits of a device: kept from an earlier time, or measured now (`calibrate`: in any case)."""
    path = _path(device)
    if not calibrate and path is not None and (kept := _kept(path)) is not None:
        return kept
    found = measure(device, ON_CPU if device.platform == "cpu" else ON_ACCELERATOR)
    if path is not None:
        _keep(path, found)
    return found


def known(device: jax.Device) -> Ceilings | None:
    """The limits of a device if they were measured before; on an accelerator, where it takes a moment, now."""
    if device.platform != "cpu":
        return ceilings(device)
    path = _path(device)
    return None if path is None else _kept(path)


def describe(device: jax.Device) -> str:
    """A device's name for people, and for the file its limits are kept in: a CPU's depends on its cores."""
    return f"{cpu_model()}, {usable_cores()} cores" if device.platform == "cpu" else device.device_kind


def measure(device: jax.Device, sizes: Sizes) -> Ceilings:
    """Measure a device now; what it took of the device's memory is given back."""
    with jax.default_device(device):
        uses = float32_uses()
        products = {
            dtype: matmul_tflops(dtype, rows, sizes.turns[dtype]) for dtype, rows in sizes.rows.items()
        }
        if uses != "float32":
            products["float32_highest"] = matmul_tflops("float32", sizes.rows["float32"], 1, "highest")
        copied = copy_gbps(min(sizes.copied, (memory(device) or 8 * sizes.copied) // 8))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Ceilings(describe(device), products, uses, copied, now, jax.__version__)


def float32_uses() -> str:
    """The type that jax's default precision computes a float32 product in, found from its error."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((256, 256)), jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64)
    error = float(np.abs(np.asarray(x @ x, np.float64) - exact).max() / np.abs(exact).max())
    return "float32" if error < 1e-5 else "tf32" if error < 1.5e-3 else "bfloat16"


def matmul_tflops(dtype: str, rows: int, turns: int, precision: str | None = None) -> float:
    """10^12 operations a second of products of square matrices, each with the last one's result."""
    x = noise((rows, rows)).astype(dtype)
    w = (noise((rows, rows)) / rows**0.5).astype(dtype)  # so scaled that numbers neither overflow nor die out

    product = partial(jnp.matmul, precision=precision)

    # Two products a turn: a single one would need its result copied back over its own factor.
    def loop(y: jax.Array, w: jax.Array) -> jax.Array:
        result: jax.Array = jax.lax.fori_loop(0, turns, lambda _, y: product(product(y, w), w), y)
        return result

    return turns * 2 * 2 * rows**3 / seconds_a_call(loop, x, w) / 1e12


def copy_gbps(size: int) -> float:
    """10^9 bytes a second read and written by passes over memory far larger than any cache."""
    turns = 2
    x = noise((size // 4,))

    def loop(y: jax.Array, factor: jax.Array) -> jax.Array:
        result: jax.Array = jax.lax.fori_loop(0, turns, lambda _, y: y * factor, y)
        return result

    return turns * 2 * float(x.nbytes) / seconds_a_call(loop, x, jnp.float32(0.999)) / 1e9


@partial(jax.jit, static_argnums=0)
def noise(shape: tuple[int, ...]) -> jax.Array:
    """Numbers of mean 0 and variance 1 from a hash of their place: `jax.random` takes longer to compile."""
    bits = jax.lax.iota(jnp.uint32, math.prod(shape))
    for multiplier in (0x7FEB352D, 0x846CA68B):
        bits = (bits ^ (bits >> 15)) * jnp.uint32(multiplier)
    uniform = (bits >> 8).astype(jnp.float32) / 2**23 - 1
    return (uniform * 3**0.5).reshape(shape)


def seconds_a_call(
    loop: Callable[[jax.Array, jax.Array], jax.Array], state: jax.Array, with_: jax.Array
) -> float:
    """The median time of a compiled call that takes the last call's result in place and has run before."""
    call = jax.jit(loop, donate_argnums=0)
    state = call(state, with_).block_until_ready()
    times: list[float] = []
    while len(times) < FEWEST_CALLS or (sum(times) < SECONDS_EACH and len(times) < MOST_CALLS):
        start = time.perf_counter()
        state = call(state, with_).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memory(device: jax.Device) -> int | None:
    """The bytes that the device has for us; None where the system does not say."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)


def _path(device: jax.Device) -> Path | None:
    root = cache.folder()
    name = re.sub(r"[^a-z0-9]+", "-", f"{device.platform} {describe(device)}".lower()).strip("-")
    return None if root is None else root / "ceilings" / f"{name}.json"


def _kept(path: Path) -> Ceilings | None:
    """What an earlier measurement wrote; None where there is nothing that can be used."""
    try:
        return Ceilings(**load_json(path))
    except (OSError, ValueError, TypeError):
        return None


def _keep(path: Path, found: Ceilings) -> None:
    with contextlib.suppress(OSError):  # measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found), indent=1))
