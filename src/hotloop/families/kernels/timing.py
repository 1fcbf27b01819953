"""Seconds into figures: medians and percentiles, rates, and the share of what the device can do at most.

It knows neither what was timed nor how: only seconds, iterations and costs.

What a benchmark leaves on disk when asked: its program's text, and a report. It knows no kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.engine import measure
from hotloop.engine.measure import Ceilings
from hotloop.engine.progress import Console
from hotloop.engine.run import default_path
from hotloop.errors import OptionError
from hotloop.families.kernels.config import TimingOptions
from hotloop.families.kernels.costs import Cost

LATENCY_SECONDS = 20e-6
"""Work that would ideally take less than this a serial chain is bound by starting it, not by doing it."""


@dataclass(frozen=True)
class TimedWork:
    """What one timed step does."""

    iterations: int
    items: int
    """In one step, of all replicas."""
    cost: Cost
    """Of one iteration on one replica."""
    replicas: int
    dtype: str


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    p10, median, p90 = (float(v) for v in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def figures(repeats: Sequence[Sequence[float]], work: TimedWork, ceilings: Ceilings) -> dict[str, Any]:
    """Everything that follows from the seconds of each repeat's steps."""
    seconds = [each for repeat in repeats for each in repeat]
    middle = percentiles(seconds)
    a_step = middle["median"]
    flops = work.cost.flops * work.iterations * work.replicas
    moved = work.cost.bytes * work.iterations * work.replicas
    result = {
        "items_per_second": work.items / a_step,
        "seconds_per_step": a_step,
        "seconds": {"all": seconds, **middle},
        "microseconds_per_iteration": a_step / work.iterations * 1e6,
        "tflops": flops / a_step / 1e12,
        "gbps": moved / a_step / 1e9,
        **roofline(work, a_step / work.iterations, ceilings),
        "cost": {
            "flops": work.cost.flops,
            "bytes": work.cost.bytes,
            "streamed_bytes": work.cost.streamed_bytes,
            "weight_bytes": work.cost.weight_bytes,
            "serial_steps": work.cost.serial_steps,
        },
    }
    if len(repeats) > 1:
        result["repeats"] = [work.items / percentiles(repeat)["median"] for repeat in repeats]
    return result


def roofline(work: TimedWork, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """`roofline`: the least time that the device's limits allow an iteration over the time it took; and `limits`."""
    # A device that rounds float32 factors has a second figure for exact ones, which is what the kernels use.
    exact = f"{work.dtype}_highest"
    dtype = exact if exact in ceilings.matmul_tflops else work.dtype
    peak, bandwidth = ceilings.matmul_tflops[dtype] * 1e12, ceilings.copy_gbps * 1e9
    ideal = ceilings.seconds(work.cost.flops, work.cost.bytes, dtype)
    bound = "compute" if work.cost.flops / peak >= work.cost.bytes / bandwidth else "memory"
    note = ""
    if ideal < LATENCY_SECONDS and ideal < 0.5 * seconds:
        bound = "latency"
        note = (
            f"{ideal * 1e6:.3g} us of work an iteration: what counts is the latency of its dependent steps "
            f"({work.cost.serial_steps} at least), not the roofline"
        )
    limits = {
        "attainable_tflops": work.cost.flops / ideal / 1e12 * work.replicas,
        "ideal_microseconds": ideal * 1e6,
        "bound": bound,
        "note": note,
        "peak_tflops": peak / 1e12,
        "copy_gbps": ceilings.copy_gbps,
    }
    return {"roofline": ideal / seconds, "limits": limits}


def figure_lines(result: dict[str, Any], unit: str) -> list[str]:
    """The figures for people."""
    seconds, roof = result["seconds"], result["limits"]
    text = [
        "seconds per step: " + ", ".join(f"{name} {seconds[name]:.6g}" for name in ("median", "p10", "p90")),
        f"{result['items_per_second']:.2f} {unit} at the median, "
        f"{result['microseconds_per_iteration']:.4g} us an iteration",
        f"{result['tflops']:.4g} TFLOP/s, {result['gbps']:.4g} GB/s",
        f"{100 * result['roofline']:.3g} % of the roofline, {roof['bound']}-bound: "
        f"{roof['attainable_tflops']:.4g} TFLOP/s attainable of {roof['peak_tflops']:.4g}, "
        f"copy {roof['copy_gbps']:.4g} GB/s",
    ]
    if roof["note"]:
        text.append(roof["note"])
    if "repeats" in result:
        text.append(f"repeats: {', '.join(f'{rate:.2f}' for rate in result['repeats'])} {unit}")
    return text


def own_folder(config: TimingOptions) -> Path:
    """Where a benchmark writes what was asked for without a folder for it."""
    return default_path(f"kernel {type(config).__name__}")


def report_folder(config: TimingOptions, name: str, console: Console) -> Path | None:
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


def save_graph(config: TimingOptions, before: str, compiled: Any, console: Console) -> Path:
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
