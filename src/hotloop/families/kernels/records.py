"""What a benchmark leaves on disk when asked: its program's text, and a report. It knows no kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotloop.engine import measure
from hotloop.engine.progress import Console
from hotloop.engine.run import default_path
from hotloop.errors import OptionError
from hotloop.families.kernels.config import Timing


def own_folder(config: Timing) -> Path:
    """Where a benchmark writes what was asked for without a folder for it."""
    return default_path(f"kernel {type(config).__name__}")


def report_folder(config: Timing, name: str, console: Console) -> Path | None:
    """The folder that the option or the environment asks for, known to be writable; None if none does."""
    folder = measure.requested(config.report, own_folder(config), console.warn, (name,))
    return None if folder is None else measure.check_report_folder(folder, (name,))


def write_report(
    folder: Path, name: str, compiled: Any, compile_seconds: float, step: Callable[[], Any], console: Console
) -> None:
    """Cost, memory and text of the program, and a profiler trace of one more step."""
    measure.write_program_report(folder, compiled, compile_seconds, name)
    with measure.trace_program(folder, name):
        step()
    console.say(f"report: {folder / name}")


def save_graph(config: Timing, before: str, compiled: Any, console: Console) -> Path:
    """The program's text before and after optimisation, in a folder of its own."""
    folder = own_folder(config)
    try:
        folder.mkdir(parents=True)
        (folder / "program.stablehlo.txt").write_text(before)
        (folder / "program.optimised.hlo.txt").write_text(compiled.as_text())
    except OSError as error:
        raise OptionError(
            f"--save-graph: cannot write {folder} ({error.strerror}); run it elsewhere"
        ) from None
    console.say(f"program text: {folder}")
    return folder
