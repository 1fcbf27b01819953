"""Seconds into figures: medians and percentiles, rates, and the share of what the device can do at most.

It knows neither what was timed nor how: only seconds, iterations and costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotloop.engine.measure import Ceilings
from hotloop.families.kernels.costs import Cost

LATENCY_SECONDS = 20e-6
"""Work that would ideally take less than this a serial chain is bound by starting it, not by doing it."""


@dataclass(frozen=True)
class Work:
    """What one timed step does."""

    iterations: int
    items: int
    """In one step, of all replicas."""
    cost: Cost
    """Of one iteration on one replica."""
    replicas: int
    dtype: str


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    p10, median, p90 = (float(v) for v in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def figures(repeats: Sequence[Sequence[float]], work: Work, ceilings: Ceilings) -> dict[str, Any]:
    """Everything that follows from the seconds of each repeat's steps."""
    seconds = [each for repeat in repeats for each in repeat]
    middle = spread(seconds)
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
        result["repeats"] = [work.items / spread(repeat)["median"] for repeat in repeats]
    return result


def roofline(work: Work, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
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


def lines(result: dict[str, Any], unit: str) -> list[str]:
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
