"""The frame of every kernel benchmark: timed steps, seconds made into figures, and what is left on disk when asked."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hotloop.engine import measure as measuring
from hotloop.engine.device import describe_environment
from hotloop.engine.measure import Ceilings, ceilings
from hotloop.engine.progress import Console
from hotloop.engine.run import default_path
from hotloop.errors import OptionError
from hotloop.families.kernels.catalogue import Cost
from hotloop.families.kernels.config import TimingOptions
from hotloop.options import to_jsonable

LATENCY_SECONDS = 20e-6
"""Work that would ideally take less than this a serial chain is bound by starting it, not by doing it."""


@dataclass(frozen=True)
class TimedWork:
    title: str
    mode: str
    unit: str  # what is printed after a rate
    iterations: int
    items: int  # in one step, of all replicas
    cost: Cost  # of one iteration on one replica
    replicas: int
    dtype: str


def time_step(step: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a step, which is finished when it returns, and what it returned."""
    start = time.perf_counter()
    result = step()
    return time.perf_counter() - start, result


def measure(
    step: Callable[[], Any],
    work: TimedWork,
    config: TimingOptions,
    device: jax.Device,
    console: Console,
    compile_seconds: float,
    warm_up: float,
) -> tuple[dict[str, Any], list[Any]]:
    """Figures of all timed steps, said as they come, with how they came about; and what the steps returned."""
    console.say(f"compiled in {compile_seconds:.3f} s, warm-up {warm_up:.3f} s")
    repeats, results = [], []
    with console.progress(work.title, config.repeat * config.steps) as bar:
        for _ in range(config.repeat):
            seconds = []
            for _ in range(config.steps):
                took, result = time_step(step)
                seconds.append(took)
                results.append(result)
                bar.advance()
                console.say(f"{took:.6f} sec/itr. {work.items / took:.2f} {work.unit}")
            repeats.append(seconds)
    with console.progress("measuring the device"):
        limits = ceilings(device)
    found = figures(repeats, work, limits)
    for line in figure_lines(found, work.unit):
        console.say(line)
    about = {
        "compile_seconds": compile_seconds,
        "warm_up_seconds": warm_up,
        "dtype": work.dtype,
        "mode": work.mode,
        "device": measuring.describe_device(device),
        "config": to_jsonable(config),
        "environment": describe_environment(),
    }
    return {**found, **about}, results


def figures(repeats: Sequence[Sequence[float]], work: TimedWork, ceilings: Ceilings) -> dict[str, Any]:
    seconds = [each for repeat in repeats for each in repeat]
    p10, a_step, p90 = (float(value) for value in np.percentile(seconds, [10, 50, 90]))
    result = {
        "items_per_second": work.items / a_step,
        "seconds_per_step": a_step,
        "seconds": {"all": seconds, "median": a_step, "p10": p10, "p90": p90},
        "microseconds_per_iteration": a_step / work.iterations * 1e6,
        "tflops": work.cost.flops * work.iterations * work.replicas / a_step / 1e12,
        "gbps": work.cost.bytes * work.iterations * work.replicas / a_step / 1e9,
        **roofline(work, a_step / work.iterations, ceilings),
        "cost": asdict(work.cost),
    }
    if len(repeats) > 1:
        result["repeats"] = [work.items / float(np.median(repeat)) for repeat in repeats]
    return result


def roofline(work: TimedWork, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """`roofline`: the least time that the device's limits allow an iteration over the time it took; and `limits`,
    whose speeds are of all replicas' devices, as those of the run are."""
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
        "peak_tflops": peak / 1e12 * work.replicas,
        "copy_gbps": ceilings.copy_gbps * work.replicas,
    }
    return {"roofline": ideal / seconds, "limits": limits}


def figure_lines(result: dict[str, Any], unit: str) -> list[str]:
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
    return default_path(f"kernel {type(config).__name__}")


def report_folder(config: TimingOptions, name: str, console: Console) -> Path | None:
    """The folder that the option or the environment asks for, known to be writable; None if none does."""
    folder = measuring.find_report_folder(config.report, own_folder(config), console.warn, (name,))
    return None if folder is None else measuring.check_report_folder(folder, (name,))


def save_graph(config: TimingOptions, before: str, compiled: Any, console: Console) -> None:
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


def write_report(
    folder: Path, name: str, compiled: Any, compile_seconds: float, step: Callable[[], Any], console: Console
) -> None:
    measuring.write_program_report(folder, compiled, compile_seconds, name)
    with measuring.trace_program(folder, name):
        step()
    console.say(f"report: {folder / name}")
