"""What the compiler made of a program and how it ran: cost, memory, the optimised program, a profiler trace.

A report is a folder with one sub-folder a program (training, evaluation). It is asked for by `--report DIR`,
by HOTLOOP_REPORT, or by the POPLAR_ENGINE_OPTIONS that older guides tell people to set. It knows no family.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotloop import rehearsal
from hotloop.engine.records import write_json
from hotloop.errors import OptionError
from hotloop.options import plain
from hotloop.options.json_text import parse_json

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
_SIZES = ("argument", "output", "alias", "temp", "generated_code")


def _complain(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def requested(
    option: str | Path | None,
    run: Path,
    warn: Callable[[str], None] = _complain,
    programs: Sequence[str] = ("training", "evaluation"),
) -> Path | None:
    """The report's folder by option, HOTLOOP_REPORT, else POPLAR_ENGINE_OPTIONS; None if none asks.

    A named one is made and tried at once; where none is named it is the run's own, which comes with the run's folder.
    """
    own = run / "report"
    named = option or os.environ.get("HOTLOOP_REPORT")
    folder = Path(named) if named else _poplar(os.environ.get(_POPLAR, ""), own, warn)
    return folder if folder in (None, own) else check_writable(folder, programs)


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


def check_writable(path: str | Path, programs: Sequence[str] = ("training", "evaluation")) -> Path:
    """Make the folder and try to write in it, before anything is compiled for it.

    A sub-folder that a program's report would use and that holds somebody else's files is refused.
    """
    path = Path(path)
    try:
        if rehearsal.is_on():
            rehearsal.check_can_make(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        foreign = [name for name in programs if _is_foreign(path / name)]
    except OSError as error:
        raise OptionError(
            f"report={path}: cannot write there ({error.strerror}); choose another one"
        ) from None
    if foreign:
        raise OptionError(f"report={path}: {path / foreign[0]} holds other files; choose another folder")
    return path


def _is_foreign(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir()) and not (folder / _INDEX).exists()


def _program_folder(folder: str | Path, name: str) -> Path:
    target = check_writable(folder, (name,)) / name
    target.mkdir(exist_ok=True)
    if not (target / _INDEX).exists():
        write_json(target / _INDEX, {})  # from here on the folder is known as ours, even after a kill
    return target


def write_program(folder: str | Path, compiled: Any, compile_seconds: float, name: str) -> dict[str, Any]:
    """Write summary.json, summary.txt and program.hlo.txt into `folder/name`; returns the summary."""
    target = _program_folder(folder, name)
    facts = {
        "program": name,
        "compile_seconds": compile_seconds,
        "cost": cost(compiled),
        "memory": memory(compiled),
        "device_memory": device_memory(),
    }
    write_json(target / "summary.json", facts)
    (target / "summary.txt").write_text(readable(facts))
    if text := _asked(compiled.as_text):
        (target / "program.hlo.txt").write_text(text)
    _write_index(target)
    return facts


def _asked(question: Callable[[], Any]) -> Any:
    """The answer, or None where the backend has none to give."""
    try:
        return question()
    except Exception:  # jaxlib raises several kinds for "not implemented on this backend"
        return None


def cost(compiled: Any) -> dict[str, float] | None:
    """XLA's own count of operations and bytes for one call; None where the backend has none."""
    found = _asked(compiled.cost_analysis)
    if isinstance(found, list | tuple):  # one entry a computation in some versions
        found = found[0] if found else None
    return {str(key): float(value) for key, value in sorted(found.items())} if found else None


def memory(compiled: Any) -> dict[str, int] | None:
    """Bytes of arguments, outputs, temporaries and code, and the peak; None where the backend has none."""
    stats = _asked(compiled.memory_analysis)
    if stats is None:
        return None
    sizes = {name: int(getattr(stats, f"{name}_size_in_bytes", 0)) for name in _SIZES}
    held = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"] + sizes["generated_code"]
    return {**sizes, "total": held, "peak": int(getattr(stats, "peak_memory_in_bytes", 0)) or held}


def device_memory() -> dict[str, Mapping[str, Any] | None]:
    """What each device's allocator says (bytes in use, peak, limit); None where it keeps no count."""
    import jax

    return {str(device): plain(_asked(device.memory_stats)) for device in jax.local_devices()}


def readable(facts: Mapping[str, Any]) -> str:
    """The summary as lines of text."""
    lines = [f"program: {facts['program']}", f"compile time: {facts['compile_seconds']:.3f} s"]
    costs, sizes = facts["cost"], facts["memory"]
    lines += [
        f"{key}: {costs[key]:.6g}"
        for key in ("flops", "transcendentals", "bytes accessed")
        if key in (costs or {})
    ]
    lines += [f"{key} memory: {size / 2**20:.3f} MiB" for key, size in (sizes or {}).items()]
    for device, stats in facts["device_memory"].items():
        if stats and "peak_bytes_in_use" in stats:
            lines.append(f"peak memory of {device}: {stats['peak_bytes_in_use'] / 2**20:.3f} MiB")
    absent = [key for key in ("cost", "memory") if facts[key] is None]
    lines += [f"{key} analysis: this backend has none" for key in absent]
    return "\n".join(lines) + "\n"


@contextmanager
def trace(folder: str | Path, name: str) -> Iterator[Path]:
    """Profile what runs inside into `folder/name/trace`, for TensorBoard and Perfetto; opens no browser."""
    import jax

    target = _program_folder(folder, name)
    with jax.profiler.trace(str(target / "trace"), create_perfetto_trace=True):
        yield target / "trace"
    write_json(target / "device_memory.json", device_memory())
    _write_index(target)


def _write_index(folder: Path) -> None:
    entries = {name: text.format(folder=folder) for name, text in _FILES.items() if (folder / name).exists()}
    write_json(folder / _INDEX, entries)
    (folder / "README.txt").write_text("".join(f"{name}: {text}\n" for name, text in entries.items()))
