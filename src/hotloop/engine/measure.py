"""What a device can do at most, and what the compiler made of a program and how it ran. It knows no model.

`ceilings` are matrix products per second by type and bytes copied per second, measured once for each device and kept in
the cache folder. A report is a folder with one sub-folder a program (training, evaluation): cost, memory, the optimised
program, a profiler trace. It is asked for by `--report DIR`, by HOTLOOP_REPORT, or by the POPLAR_ENGINE_OPTIONS that
older guides tell people to set.
"""

import contextlib
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hotloop import rehearsal
from hotloop.engine.run import check_can_make, write_json
from hotloop.errors import OptionError
from hotloop.machine import cache_folder, cpu_model, usable_cores
from hotloop.options import to_jsonable
from hotloop.options.files import load_json, parse_json

SECONDS_EACH = 0.2  # of timed calls for one figure, once it has compiled
MOST_CALLS, FEWEST_CALLS = 7, 3
_POPLAR = "POPLAR_ENGINE_OPTIONS"
_INDEX = "index.json"
_FILES = {
    "summary.txt": "compile time, cost and memory, for people",
    "summary.json": "the same for programs: bytes, seconds and floating-point operations of one call",
    "program.hlo.txt": "the optimised program as HLO text, for any editor",
    "device_memory.json": "what each device's allocator counted up to the end of the trace; null where it counts none",
    "trace": "profiler trace: open its perfetto_trace.json.gz at https://ui.perfetto.dev, or use TensorBoard "
    "(pip install tensorboard 'hotloop[report]'; tensorboard --logdir {folder}/trace)",
}


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


class Sizes(NamedTuple):
    """How large the measured work is: by type the rows of square products and the turns of their loop, bytes copied."""

    products: Mapping[str, tuple[int, int]]
    copied: int


ON_CPU = Sizes({"float32": (1024, 2), "bfloat16": (512, 1), "float16": (512, 1)}, 2**28)
ON_ACCELERATOR = Sizes({"float32": (8192, 2), "bfloat16": (8192, 8), "float16": (8192, 8)}, 2**31)


def ceilings(device: jax.Device, calibrate: bool = False) -> Ceilings:
    """The limits of a device: kept from an earlier time, or measured now (`calibrate`: in any case)."""
    path = _ceilings_file(device)
    if not calibrate and (kept := _read_ceilings(path)) is not None:
        return kept
    found = measure_ceilings(device, ON_CPU if device.platform == "cpu" else ON_ACCELERATOR)
    if path is not None:
        with contextlib.suppress(OSError):  # measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(found), indent=1))
    return found


def known_ceilings(device: jax.Device) -> Ceilings | None:
    """The limits of a device if they were measured before."""
    return _read_ceilings(_ceilings_file(device))


def describe_device(device: jax.Device) -> str:
    """A device's name for people, and for the file its limits are kept in: a CPU's depends on its cores."""
    return f"{cpu_model()}, {usable_cores()} cores" if device.platform == "cpu" else device.device_kind


def measure_ceilings(device: jax.Device, sizes: Sizes) -> Ceilings:
    """Measured now: each figure is the median of several timed calls of a compiled loop whose every turn depends on the
    one before, on random numbers, as a GPU is faster on zeros."""
    with jax.default_device(device):
        uses = float32_uses()
        products = {dtype: matmul_tflops(dtype, *size) for dtype, size in sizes.products.items()}
        if uses != "float32":
            rows, _ = sizes.products["float32"]
            products["float32_highest"] = matmul_tflops("float32", rows, 1, "highest")
        copied = copy_gbps(min(sizes.copied, (memory_of_device(device) or 8 * sizes.copied) // 8))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Ceilings(describe_device(device), products, uses, copied, now, jax.__version__)


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
    def loop(y: jax.Array, w: jax.Array) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, y: product(product(y, w), w), y)

    return turns * 2 * 2 * rows**3 / seconds_a_call(loop, x, w) / 1e12


def copy_gbps(size: int) -> float:
    """10^9 bytes a second read and written by passes over memory far larger than any cache."""
    turns = 2
    x = noise((size // 4,))

    def loop(y: jax.Array, factor: jax.Array) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, y: y * factor, y)

    return turns * 2 * float(x.nbytes) / seconds_a_call(loop, x, jnp.float32(0.999)) / 1e9


@partial(jax.jit, static_argnums=0)
def noise(shape: tuple[int, ...]) -> jax.Array:
    """Numbers of mean 0 and variance 1 from a hash of their place: `jax.random` takes longer to compile."""
    bits = jax.lax.iota(jnp.uint32, math.prod(shape))
    for multiplier in (0x7FEB352D, 0x846CA68B):
        bits = (bits ^ (bits >> 15)) * jnp.uint32(multiplier)
    uniform = (bits >> 8).astype(jnp.float32) / 2**23 - 1
    return (uniform * 3**0.5).reshape(shape)


def seconds_a_call(loop: Callable[..., Any], state: jax.Array, with_: jax.Array) -> float:
    """The median time of a compiled call that takes the last call's result in place and has run before."""
    call = jax.jit(loop, donate_argnums=0)
    state = call(state, with_).block_until_ready()
    times: list[float] = []
    while len(times) < FEWEST_CALLS or (sum(times) < SECONDS_EACH and len(times) < MOST_CALLS):
        start = time.perf_counter()
        state = call(state, with_).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memory_of_device(device: jax.Device) -> int | None:
    """The bytes that the device has for us; None where the system does not say."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)


def _ceilings_file(device: jax.Device) -> Path | None:
    root = cache_folder()
    name = re.sub(r"[^a-z0-9]+", "-", f"{device.platform} {describe_device(device)}".lower()).strip("-")
    return None if root is None else root / "ceilings" / f"{name}.json"


def _read_ceilings(path: Path | None) -> Ceilings | None:
    """What an earlier measurement wrote; None where there is nothing that can be used."""
    try:
        return Ceilings(**load_json(path)) if path else None
    except (OSError, ValueError, TypeError):
        return None


def find_report_folder(
    option: str | Path | None,
    run: Path,
    warn: Callable[[str], None],
    programs: Sequence[str] = ("training", "evaluation"),
) -> Path | None:
    """The report's folder by option, HOTLOOP_REPORT, else POPLAR_ENGINE_OPTIONS; None if none asks.

    A named one is made and tried at once; where none is named it is the run's own, which comes with the run's folder.
    """
    own = run / "report"
    named = option or os.environ.get("HOTLOOP_REPORT")
    folder = Path(named) if named else _poplar(os.environ.get(_POPLAR, ""), own, warn)
    return folder if folder in (None, own) else check_report_folder(folder, programs)


def _poplar(text: str, own: Path, warn: Callable[[str], None]) -> Path | None:
    if not text.strip():
        return None
    try:
        options = parse_json(text)
    except ValueError as error:
        warn(f'{_POPLAR} is not JSON ({error}) and is ignored; write {{"autoReport.all": "true"}}')
        return None
    if not isinstance(options, dict):
        warn(f"{_POPLAR} is a {type(options).__name__}, not an object, and is ignored")
        return None
    if str(options.get("autoReport.all", "false")).lower() != "true":
        return None
    return Path(str(options["autoReport.directory"])) if "autoReport.directory" in options else own


def check_report_folder(path: str | Path, programs: Sequence[str] = ("training", "evaluation")) -> Path:
    """Make the folder and try to write in it, before anything is compiled for it.

    A sub-folder that a program's report would use and that holds somebody else's files is refused.
    """
    path = Path(path)
    try:
        if rehearsal.is_on():
            check_can_make(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        used = [path / name for name in programs if (path / name).exists() and any((path / name).iterdir())]
        others = [folder for folder in used if not (folder / _INDEX).exists()]
    except OSError as error:
        raise OptionError(
            f"report={path}: cannot write there ({error.strerror}); choose another one"
        ) from None
    if others:
        raise OptionError(f"report={path}: {others[0]} holds other files; choose another folder")
    return path


def _program_folder(folder: str | Path, name: str) -> Path:
    target = check_report_folder(folder, (name,)) / name
    target.mkdir(exist_ok=True)
    if not (target / _INDEX).exists():
        write_json(target / _INDEX, {})  # from here on the folder is known as ours, even after a kill
    return target


def write_program_report(
    folder: str | Path, compiled: Any, compile_seconds: float, name: str
) -> dict[str, Any]:
    """Write summary.json, summary.txt and program.hlo.txt into `folder/name`; returns the summary.

    XLA's own counts are for one call, in operations and bytes; None where the backend has none.
    """
    target = _program_folder(folder, name)
    costs, stats = _ask(compiled.cost_analysis), _ask(compiled.memory_analysis)
    if isinstance(costs, list | tuple):  # one entry a computation in some versions
        costs = costs[0] if costs else None
    costs = {str(key): float(value) for key, value in sorted(costs.items())} if costs else None
    sizes = None
    if stats is not None:
        names = ("argument", "output", "alias", "temp", "generated_code")
        sizes = {name: int(getattr(stats, f"{name}_size_in_bytes", 0)) for name in names}
        total = sum(sizes.values()) - 2 * sizes["alias"]  # an alias is an output in an argument's place
        sizes |= {"total": total, "peak": int(getattr(stats, "peak_memory_in_bytes", 0)) or total}
    text = _ask(compiled.as_text) or ""
    uncounted = text.count('custom_call_target="hotloop_')
    counts: dict[str, Any] = {"cost": costs, "memory": sizes, "device_memory": device_memory()}
    counts["uncounted_calls"] = uncounted  # kernels of hotloop-native, whose work XLA does not know
    facts = {"program": name, "compile_seconds": compile_seconds, **counts}
    write_json(target / "summary.json", facts)
    lines = [f"program: {name}", f"compile time: {compile_seconds:.3f} s"]
    counted = ("flops", "transcendentals", "bytes accessed")
    without = (
        f" (without {uncounted} calls of hotloop-native, whose work XLA does not count)" if uncounted else ""
    )
    lines += [f"{key}: {costs[key]:.6g}{without}" for key in counted if costs and key in costs]
    lines += [f"{key} memory: {size / 2**20:.3f} MiB" for key, size in (sizes or {}).items()]
    for device, held in counts["device_memory"].items():
        if held and "peak_bytes_in_use" in held:
            lines.append(f"peak memory of {device}: {held['peak_bytes_in_use'] / 2**20:.3f} MiB")
    lines += [f"{key} analysis: this backend has none" for key in ("cost", "memory") if counts[key] is None]
    (target / "summary.txt").write_text("\n".join(lines) + "\n")
    if text:
        (target / "program.hlo.txt").write_text(text)
    _write_index(target)
    return facts


def _ask(question: Callable[[], Any]) -> Any:
    """The answer, or None where the backend has none to give."""
    try:
        return question()
    except Exception:  # jaxlib raises several kinds for "not implemented on this backend"
        return None


def device_memory() -> dict[str, Any]:
    """What each device's allocator says (bytes in use, peak, limit); None where it keeps no count."""
    return {str(device): to_jsonable(_ask(device.memory_stats)) for device in jax.local_devices()}


@contextmanager
def trace_program(folder: str | Path, name: str) -> Iterator[Path]:
    """Profile what runs inside into `folder/name/trace`, for TensorBoard and Perfetto; opens no browser."""
    target = _program_folder(folder, name)
    with jax.profiler.trace(str(target / "trace"), create_perfetto_trace=True):
        yield target / "trace"
    write_json(target / "device_memory.json", device_memory())
    _write_index(target)


def _write_index(folder: Path) -> None:
    entries = {name: text.format(folder=folder) for name, text in _FILES.items() if (folder / name).exists()}
    write_json(folder / _INDEX, entries)
    (folder / "README.txt").write_text("".join(f"{name}: {text}\n" for name, text in entries.items()))
