"""Kernels on the roofline of their device: the speed of each against its arithmetic intensity, under limits that were
measured there. Of repeats every figure is the median, as in the summary, so that both say the same.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hotloop.bench.axes import Axis, Point
from hotloop.bench.charts import Chart
from hotloop.bench.page import Page
from hotloop.bench.record import group_by, is_number, is_positive

NOTES = 12  # names of kernels that still find room beside their dots
KERNELS = (
    *("kernel", "mode", "dtype", "items/s", "µs an iteration", "TFLOP/s", "GB/s"),
    *("% of roofline", "bound by"),
)
LIMITS = "lines are its own measured product and copy; a kernel's share in the table is of what its own runs measured."
Result = Mapping[str, Any]
Kernels = dict[str, dict[str, Result]]
"""Results by device and name."""


def add_kernels(document: Result, name: str, found: Kernels) -> bool:
    """Kernels of one result, of `hotloop kernel all`, or of the demo; False where there is none."""
    several = document.get("kernels") or document.get("results")
    each = {name: document} if is_kernel(document) else several if isinstance(several, Mapping) else {}
    kernels = {one: result for one, result in each.items() if is_kernel(result)}
    for one, result in kernels.items():
        where = str(result.get("device") or document.get("device") or "unknown")
        found.setdefault(where, {})[one] = result
    return bool(kernels)


def median_result(results: Sequence[Any]) -> Any:
    """One result for several of the same shape: the median of each number that is one, as the summary has it, anything
    else as the last has it."""
    last = results[-1]
    if isinstance(last, Mapping) and all(isinstance(one, Mapping) for one in results):
        return {name: median_result([one[name] for one in results if name in one]) for name in last}
    if not all(map(is_number, results)):
        return last
    finite = [one for one in results if math.isfinite(one)]
    return median(finite) if finite else last


def is_kernel(result: Any) -> bool:
    """Whether something is a kernel's result that can stand on a roofline."""
    if not isinstance(result, Mapping):
        return False
    cost, limits = result.get("cost"), result.get("limits")
    if not isinstance(cost, Mapping) or not isinstance(limits, Mapping):
        return False
    needed = cost.get("flops"), cost.get("bytes"), result.get("tflops")
    return all(map(is_positive, (*needed, limits.get("peak_tflops"), limits.get("copy_gbps"))))


def roofline_chart(kernels: Mapping[str, Result], ceilings: Result | None = None) -> Chart:
    """Each kernel's speed against its arithmetic intensity, under the limits that were measured on its device.

    Without `ceilings` the limits are the kernels' own, medians where they differ. What is no kernel is left out.
    """
    kernels = {name: result for name, result in kernels.items() if is_kernel(result)}
    if ceilings is not None:
        peaks, copy = dict(ceilings["matmul_tflops"]), ceilings["copy_gbps"]
    else:
        found: dict[str, list[float]] = {}
        for result in kernels.values():
            name = f"measured limits, {result.get('dtype', '')}".rstrip(", ")
            found.setdefault(name, []).append(result["limits"]["peak_tflops"])
        peaks = {name: median(speeds) for name, speeds in found.items()}
        copy = median(result["limits"]["copy_gbps"] for result in kernels.values())
    slope, highest = copy / 1e3, max(peaks.values())  # in 10^12 bytes a second, and in TFLOP/s
    spots: dict[str, Point] = {
        name: (result["cost"]["flops"] / result["cost"]["bytes"], result["tflops"])
        for name, result in kernels.items()
    }
    chart = Chart("Roofline", Axis("arithmetic intensity, FLOP/byte", log=True), Axis("TFLOP/s", log=True))
    places = [x for x, _ in spots.values()]
    left, right = min(*places, highest / slope / 4), max(*places, highest / slope * 4)
    for name, peak in peaks.items():
        corners = sorted({left, peak / slope, right})
        chart.add("line", [(x, min(peak, slope * x)) for x in corners], name)
    modes = group_by(spots, lambda name: str(kernels[name].get("mode", "layers")))
    for place, (mode, names) in enumerate(modes.items()):
        chart.add("dots", [spots[name] for name in names], mode, len(peaks) + place)
    for name in list(spots)[:NOTES]:
        chart.note(spots[name], name)
    return chart


def add_roofline(page: Page, kernels: Kernels, ceilings: Mapping[str, Result]) -> None:
    page.section(
        "Roofline of the kernels",
        "How fast each kernel computes, and how fast its device could: at the left memory is the limit, at the right "
        "arithmetic. Figures are medians over repeats, as in the summary.",
    )
    for device, shown in kernels.items():
        chart = roofline_chart(shown, ceilings.get(device))
        page.charts([(chart, f"{device}: {LIMITS}")])
        page.table(
            KERNELS, [_kernel_cells(name, result) for name, result in shown.items()], f"Kernels on {device}"
        )


def _kernel_cells(name: str, result: Result) -> tuple[Any, ...]:
    said = map(result.get, ("mode", "dtype", "items_per_second", "microseconds_per_iteration"))
    share = 100 * result["roofline"] if result.get("roofline") is not None else None
    return (name, *said, result["tflops"], result.get("gbps"), share, result["limits"].get("bound"))
