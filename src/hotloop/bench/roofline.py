"""The roofline chart: each kernel's speed against its arithmetic intensity, under the device's measured limits, from
what `hotloop kernel` and `hotloop devices` print with --json.
"""

from collections.abc import Collection, Mapping
from statistics import median
from typing import Any

from hotloop.bench.page import Axis, Chart, Page, Point
from hotloop.bench.record import is_positive

Result = Mapping[str, Any]
NOTES = 12  # names that still find room beside their dots
COLUMNS = (
    *("kernel", "mode", "dtype", "items/s", "µs an iteration", "TFLOP/s", "GB/s"),
    *("% of roofline", "bound by"),
)


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
    """The chart of one device's kernels; those that cannot stand on it are left out."""
    kernels = {name: result for name, result in kernels.items() if is_kernel(result)}
    spots: dict[str, Point] = {
        name: (result["cost"]["flops"] / result["cost"]["bytes"], result["tflops"])
        for name, result in kernels.items()
    }
    peaks, slope = find_limits(kernels.values(), ceilings)
    highest = max(peaks.values())
    chart = Chart("Roofline", Axis("arithmetic intensity, FLOP/byte", log=True), Axis("TFLOP/s", log=True))
    places = [x for x, _ in spots.values()]
    left, right = min(*places, highest / slope / 4), max(*places, highest / slope * 4)
    for name, peak in peaks.items():
        corners = sorted({left, peak / slope, right})
        chart.add("line", [(x, min(peak, slope * x)) for x in corners], name)
    modes = {name: str(result.get("mode", "layers")) for name, result in kernels.items()}
    for place, mode in enumerate(dict.fromkeys(modes.values())):
        shown = [spot for name, spot in spots.items() if modes[name] == mode]
        chart.add("dots", shown, mode, colour=len(peaks) + place)
    for name in list(spots)[:NOTES]:
        chart.note(spots[name], name)
    return chart


def find_limits(kernels: Collection[Result], ceilings: Result | None) -> tuple[dict[str, float], float]:
    """The peaks by name in TFLOP/s, and the copy's speed in 10^12 bytes a second; medians where kernels differ."""
    if ceilings is not None:
        return dict(ceilings["matmul_tflops"]), ceilings["copy_gbps"] / 1e3
    peaks: dict[str, list[float]] = {}
    for result in kernels:
        name = f"measured limits, {result.get('dtype', '')}".rstrip(", ")
        peaks.setdefault(name, []).append(result["limits"]["peak_tflops"])
    copy = median(result["limits"]["copy_gbps"] for result in kernels)
    return {name: median(found) for name, found in peaks.items()}, copy / 1e3


def add_roofline(page: Page, device: str, kernels: Mapping[str, Result], ceilings: Result | None) -> None:
    """A part of a report: the chart and the table of one device's kernels."""
    chart = roofline_chart(kernels, ceilings)
    page.charts([(chart, f"{device}: lines are its own measured product and copy.")])
    rows = [
        (
            name,
            result.get("mode"),
            result.get("dtype"),
            result.get("items_per_second"),
            result.get("microseconds_per_iteration"),
            result["tflops"],
            result.get("gbps"),
            100 * result["roofline"] if result.get("roofline") is not None else None,
            result["limits"].get("bound"),
        )
        for name, result in kernels.items()
    ]
    page.table(COLUMNS, rows)
