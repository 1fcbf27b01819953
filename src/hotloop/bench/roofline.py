"""The roofline chart: each kernel's speed against its arithmetic intensity, under the device's measured limits.

Kernels are results as `hotloop kernel ... --json` prints them; ceilings are what `hotloop devices --json` prints or
what the device's own kernels were judged by. It reads JSON and measures nothing.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hotloop.bench.record import is_positive
from hotloop.bench.svg import Axis, Chart, Point

Result = Mapping[str, Any]
NOTES = 12  # names that still find room beside their dots


def is_kernel(result: Any) -> bool:
    """Whether something is a kernel's result that can stand on a roofline."""
    if not isinstance(result, Mapping):
        return False
    cost, limits = result.get("cost"), result.get("limits")
    if not isinstance(cost, Mapping) or not isinstance(limits, Mapping):
        return False
    needed = (
        cost.get("flops"),
        cost.get("bytes"),
        result.get("tflops"),
        limits.get("peak_tflops"),
        limits.get("copy_gbps"),
    )
    return all(map(is_positive, needed))


def roofline_chart(kernels: Mapping[str, Result], ceilings: Result | None = None) -> Chart:
    """The chart of one device's kernels."""
    spots = {name: kernel_point(result) for name, result in kernels.items() if is_kernel(result)}
    peaks, slope = find_limits(kernels, ceilings)
    highest = max(peaks.values())
    chart = Chart("Roofline", Axis("arithmetic intensity, FLOP/byte", log=True), Axis("TFLOP/s", log=True))
    places = [x for x, _ in spots.values()]
    left, right = min(*places, highest / slope / 4), max(*places, highest / slope * 4)
    for name, peak in peaks.items():
        corners = sorted({left, peak / slope, right})
        chart.line([(x, min(peak, slope * x)) for x in corners], name)
    for place, (mode, names) in enumerate(group_by_mode(kernels).items()):
        chart.dots([spots[name] for name in names], mode, colour=len(peaks) + place)
    for name in list(spots)[:NOTES]:
        chart.note(spots[name], name)
    return chart


def kernel_point(result: Result) -> Point:
    """A kernel's place: FLOPs a byte, and 10^12 FLOPs a second."""
    return result["cost"]["flops"] / result["cost"]["bytes"], result["tflops"]


def find_limits(kernels: Mapping[str, Result], ceilings: Result | None) -> tuple[dict[str, float], float]:
    """The peaks by name in TFLOP/s, and the copy's speed in 10^12 bytes a second; medians where kernels differ."""
    if ceilings is not None:
        return dict(ceilings["matmul_tflops"]), ceilings["copy_gbps"] / 1e3
    shown = [result for result in kernels.values() if is_kernel(result)]
    peaks: dict[str, list[float]] = {}
    for result in shown:
        name = f"measured limits, {result.get('dtype', '')}".rstrip(", ")
        peaks.setdefault(name, []).append(result["limits"]["peak_tflops"])
    copy = median(result["limits"]["copy_gbps"] for result in shown)
    return {name: median(found) for name, found in peaks.items()}, copy / 1e3


def group_by_mode(kernels: Mapping[str, Result]) -> dict[str, list[str]]:
    """Names of kernels apart by inference and training."""
    found: dict[str, list[str]] = {}
    for name, result in kernels.items():
        if is_kernel(result):
            found.setdefault(str(result.get("mode", "layers")), []).append(name)
    return found


COLUMNS = (
    "kernel",
    "mode",
    "dtype",
    "items/s",
    "µs an iteration",
    "TFLOP/s",
    "GB/s",
    "% of roofline",
    "bound by",
)


def roofline_rows(kernels: Mapping[str, Result]) -> Sequence[Sequence[str | float | None]]:
    """The table beside the chart."""
    return [
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
