"""The page of `hotloop bench report`: log folders, what `hotloop kernel`, `devices` and `demo` print with --json, and
comparisons with peers are sorted and shown; a part without results is left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median as plain_median
from typing import Any, NamedTuple

import numpy as np

from hotloop.bench import compare, record
from hotloop.bench.benchmark import count_of
from hotloop.bench.page import COLOURS, Axis, CaptionedChart, Chart, Page, Point, Strip, Strips
from hotloop.bench.peers import PeerRow, add_peers, is_peer_document, read_peer_rows
from hotloop.bench.record import RECORDS, SIDES, MetricSample, Record, group_by, group_sessions, is_positive
from hotloop.bench.statistics import median, median_interval, spread
from hotloop.errors import DataError
from hotloop.options.files import load_json

BATCH = ("batch_size", "batchsize", "micro_batch_size", "global_batch_size", "batch", "bs")
ROWS = 24  # of one chart of strips
SHOWN_PACKAGES = ("hotloop", "jax", "jaxlib", "numpy", "torch")
MACHINES = ("device", "driver", "host", "commit", "python", "packages", "cpu")
MILLISECONDS = {"s": 1e3, "sec": 1e3, "seconds": 1e3, "us": 1e-3, "µs": 1e-3}
LOAD: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": plain_median, "max": max}
"""What is shown of a load over the runs of a variant."""
SUMMARY = (
    *("variant", "metric", "median", "unit", "95 % interval", "spread %", "repeats"),
    *("since before", "device"),
)
NOTES = 12  # names of kernels that still find room beside their dots
KERNELS = (
    *("kernel", "mode", "dtype", "items/s", "µs an iteration", "TFLOP/s", "GB/s"),
    *("% of roofline", "bound by"),
)
Result = Mapping[str, Any]


@dataclass
class Sources:
    """All that was found, kernels and ceilings by device, and the names of files in folders that were none of it."""

    records: list[Record] = field(default_factory=list)
    kernels: dict[str, dict[str, Result]] = field(default_factory=dict)
    peers: list[PeerRow] = field(default_factory=list)
    ceilings: dict[str, Result] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Record]:
        return [run for run in self.records if run["status"] != "skipped"]


def gather_sources(paths: Sequence[str | Path]) -> Sources:
    found = Sources()
    for path in map(Path, paths):
        if all((path / side / RECORDS).exists() for side in SIDES):
            found.records += record.read_records([path / side for side in SIDES])
        elif path.is_dir() and not (path / RECORDS).exists():
            files = sorted(path.glob("*.json"))
            if not files:
                neither = f"has neither {RECORDS} nor JSON files"
                raise DataError(f"{path}: {neither}; name a log folder of `hotloop bench run`")
            found.left_out += [file.name for file in files if not _add_document(file, found)]
        elif path.is_dir() or path.suffix == ".jsonl":
            found.records += record.read_records([path])
        elif not _add_document(path, found):
            nothing = "holds no results that a report can show"
            raise DataError(f"{path}: {nothing}; name log folders or --json results")
    # Kernels among the benchmarks: their runs printed results that can stand on a roofline. Of several repeats each
    # number is the median, and of several folders the latest counts, as in the summary.
    for session in group_sessions(found.records):
        printed: dict[str, list[Result]] = {}
        for run in session:
            if record.ended_well(run) and (result := record.read_printed_result(run)) is not None:
                printed.setdefault(run["variant"], []).append(result)
        for variant, results in printed.items():
            with suppress(AttributeError, TypeError):  # a program may print whatever it likes
                _add_kernels(_median_result(results), variant, found)
    return found


def _add_document(file: Path, found: Sources) -> bool:
    """Add what a file holds; False if that is nothing."""
    try:
        document = load_json(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error})") from error
    try:
        if not isinstance(document, Mapping):
            return False
        limits = document.get("ceilings", document)
        if isinstance(limits, Mapping) and {"matmul_tflops", "copy_gbps", "device"} <= limits.keys():
            peaks = limits["matmul_tflops"]  # which a roofline must be able to draw
            if not isinstance(limits["device"], str):
                raise ValueError("device is no name")
            if not isinstance(peaks, Mapping) or not peaks or not all(map(is_positive, peaks.values())):
                raise ValueError("matmul_tflops has no numbers by name")
            if not is_positive(limits["copy_gbps"]):
                raise ValueError("copy_gbps is no number above 0")
            found.ceilings[limits["device"]] = limits
            return True
        if is_peer_document(document):
            found.peers += read_peer_rows(document, file.stem)
            return True
        return _add_kernels(document, file.stem, found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        damaged = f"looks like results but is damaged ({error})"
        raise DataError(f"{file}: {damaged}; make it anew or leave it out") from error


def _add_kernels(document: Result, name: str, found: Sources) -> bool:
    """Kernels of one result, of `hotloop kernel all`, or of the demo."""
    several = document.get("kernels") or document.get("results")
    each = {name: document} if is_kernel(document) else several if isinstance(several, Mapping) else {}
    kernels = {one: result for one, result in each.items() if is_kernel(result)}
    for one, result in kernels.items():
        where = str(result.get("device") or document.get("device") or "unknown")
        found.kernels.setdefault(where, {})[one] = result
    return bool(kernels)


def _median_result(results: Sequence[Any]) -> Any:
    """One result for several of the same shape: the median of each number, anything else as the last has it."""
    last = results[-1]
    if isinstance(last, Mapping) and all(isinstance(one, Mapping) for one in results):
        return {name: _median_result([one[name] for one in results if name in one]) for name in last}
    return plain_median(results) if all(map(record.is_number, results)) else last


def build_report(found: Sources, title: str = "Benchmarks") -> Page:
    parts = []
    if found.records:
        variants = count_of(len({run["variant"] for run in found.runs}), "variant")
        failed = sum(run["status"] != "passed" for run in found.runs)
        parts.append(f"{count_of(len(found.runs), 'run')} of {variants}, {failed} failed")
    if found.kernels:
        parts.append(count_of(sum(map(len, found.kernels.values())), "kernel"))
    if found.peers:
        parts.append(f"{count_of(len(found.peers), 'comparison')} with peers")
    page = Page(title, " · ".join([*parts, *sorted({record.device_name(run) for run in found.records})]))
    if found.records:
        add_runs(page, found.records)
    if found.kernels:
        page.section("Roofline of the kernels")
    for device, kernels in found.kernels.items():
        chart = roofline_chart(kernels, found.ceilings.get(device))
        page.charts([(chart, f"{device}: lines are its own measured product and copy.")])
        rows = []
        for name, result in kernels.items():
            said = map(result.get, ("mode", "dtype", "items_per_second", "microseconds_per_iteration"))
            share = 100 * result["roofline"] if result.get("roofline") is not None else None
            speeds = (result["tflops"], result.get("gbps"), share, result["limits"].get("bound"))
            rows.append((name, *said, *speeds))
        page.table(KERNELS, rows)
    if found.peers:
        add_peers(page, found.peers)
    if found.records:
        add_machines(page, found.records)
    return page


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
        peaks = {name: plain_median(speeds) for name, speeds in found.items()}
        copy = plain_median(result["limits"]["copy_gbps"] for result in kernels.values())
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


class HistoryPoint(NamedTuple):
    """The records of one folder on one device: a point of every history."""

    name: str
    when: str
    device: str
    samples: Mapping[tuple[str, str], MetricSample]


def add_runs(page: Page, records: Sequence[Record]) -> None:
    sessions = group_sessions(records)
    found = []
    for runs in sessions:
        when = min(map(record.start_time, runs))
        name = record.commit_name(runs[0]) or when[5:16]
        found.append(HistoryPoint(name, when, record.device_name(runs[0]), record.collect_samples(runs)))
    page.section(
        "Summary",
        "The median over repeats of whole runs, with an interval that is honest about few of them, in the latest "
        "folder of each device. Since before: against the folder before, where there is one.",
    )
    known = [(*key, point.device, sample) for point in found for key, sample in point.samples.items()]
    rows: list[list[Any]] = []
    for (variant, metric, device), past in group_by(known, lambda one: one[:3]).items():
        last = past[-1][-1]
        sure = median_interval(last.values)
        interval = f"{sure.low:.4g} … {sure.high:.4g}" if math.isfinite(sure.low) else "–"
        change = "–"
        if len(past) > 1:
            against = compare.judge(past[-2][-1], last, compare.better_direction(metric, last.unit))
            change = f"{against.word} {against.ratio:.3f}"
        numbers = (sure.value, last.unit, interval, 100 * spread(last.values), len(last.values))
        rows.append([variant, metric, *numbers, change, device])
    page.table(SUMMARY, rows)
    verdicts: list[tuple[str, ...]] = []
    for a, b in pairwise(sessions):
        if record.ran_in_turns(a, b):
            sides = record.collect_samples(a), record.samples_of_partners(b)
            compared = compare.compare_samples(*sides, compare.CompareRules())
            verdicts += [compare.comparison_cells(row) for row in compared]
    if verdicts:
        said = "Two programs that ran in turns, A and B; the ratio and its interval are those of the pairs."
        page.section("In turns", said)
        page.table(compare.COLUMNS, verdicts)
    if failed := [run for run in records if run["status"] != "passed"]:
        page.section("Runs that did not pass")
        rows = [
            [run["variant"], run.get("repeat"), run["status"], run.get("reason") or "", run["folder"]]
            for run in failed
        ]
        page.table(("variant", "repeat", "status", "reason", "log"), rows)
    if histories := history_charts(found):
        page.section("History", charts=histories)
    if spreads := spread_charts(found):
        page.section("Spread of repeats", charts=spreads)
    if trade_offs := trade_off_charts(found):
        page.section("Throughput and latency", charts=trade_offs)


def history_charts(found: Sequence[HistoryPoint]) -> list[CaptionedChart]:
    """A chart for each benchmark's metric on each device that was measured more than once."""
    charts: list[CaptionedChart] = []
    for device, past in group_by(found, lambda point: point.device).items():
        names = tuple(point.name for point in past)
        if len(set(names)) < len(names):
            names = tuple(point.when[5:16] for point in past)
        known = {key: sample for point in past for key, sample in point.samples.items()}
        often = [known[key] for key in known if sum(key in point.samples for point in past) > 1]
        groups = group_by(often, lambda sample: (sample.benchmark, sample.metric))
        for (benchmark, metric), group in groups.items():
            for first in range(0, len(group), COLOURS):
                shown = group[first : first + COLOURS]
                unit = f", {shown[0].unit}" if shown[0].unit else ""
                x, y = Axis("commit or time", names=names), Axis(metric + unit)
                chart = Chart(f"{benchmark}: {metric} over time", x, y)
                for colour, sample in enumerate(shown):
                    points = []
                    for place, point in enumerate(past, 1):
                        if one := point.samples.get((sample.variant, metric)):
                            sure = median_interval(one.values)
                            points.append((float(place), sure.value))
                            chart.add("range", [(place, sure.low), (place, sure.high)], colour=colour)
                    chart.add("dotted line", points, sample.variant, colour)
                charts.append((chart, f"{benchmark}: {metric} on {device}, oldest first."))
    return charts


def spread_charts(found: Sequence[HistoryPoint]) -> list[CaptionedChart]:
    """Charts of how far single values lie from their variant's median, one for each metric and device."""
    strips: dict[tuple[str, str], dict[str, Strip]] = {}
    for point in found:
        for (variant, metric), sample in point.samples.items():
            rows = strips.setdefault((metric, point.device), {})
            values = sample.values if len(sample.values) > 1 else sample.inside
            middle = median(values)
            if len(values) > 1 and middle:
                relative = tuple(value / middle for value in values)
                low, half, high = map(float, np.quantile(relative, [0.25, 0.5, 0.75]))
                rows[variant] = Strip(variant, low, half, high, relative)
            else:
                rows.pop(variant, None)  # the latest counts, also where it has nothing to show
    charts: list[CaptionedChart] = []
    for (metric, device), rows in strips.items():
        for first in range(0, len(rows), ROWS):
            shown = list(rows.values())[first : first + ROWS]
            chart = Strips(f"Spread of {metric}", Axis(f"{metric} / its median"), shown, at=1.0)
            dots = "each dot is a run, or one reading of it where there was one run"
            charts.append((chart, f"{metric} on {device}: {dots}; the box is the middle half."))
    return charts


def trade_off_charts(found: Sequence[HistoryPoint]) -> list[CaptionedChart]:
    """Throughput against latency of benchmarks whose variants differ in batch size; the last time of each device."""
    charts: list[CaptionedChart] = []
    for point in {point.device: point for point in found}.values():
        latencies: dict[str, float] = {}  # in milliseconds, of variants for which that was measured
        for (variant, metric), sample in point.samples.items():
            if "latency" in metric.lower():
                unit = sample.unit.lower().removeprefix("latency").strip(" ()")
                latencies.setdefault(variant, median(sample.values) * MILLISECONDS.get(unit, 1.0))
        rates = [
            (batch_size(s), s) for s in point.samples.values() if compare.RATE.search(f"{s.metric} {s.unit}")
        ]
        sized = sorted(((size, sample) for size, sample in rates if size), key=itemgetter(0))
        groups = group_by(sized, lambda one: (one[1].benchmark, one[1].metric))
        for (benchmark, metric), group in sorted(groups.items()):
            if len(group) < 2:
                continue
            measured = all(latencies.get(sample.variant) for _, sample in group)
            x = Axis("latency, ms" if measured else "batch size / throughput, ms", log=True)
            y = Axis(group[0][1].unit or metric, low=0)
            chart, points = Chart(f"{benchmark}: throughput and latency", x, y), []
            for size, sample in group:
                speed = median(sample.values)
                latency = latencies[sample.variant] if measured else 1e3 * size / speed if speed else math.nan
                points.append((latency or math.nan, speed))
                chart.note(points[-1], f"{size:g}")
            chart.add("dotted line", points)
            charts.append((chart, f"{benchmark} on {point.device}: {metric}, numbers are batch sizes."))
    return charts


def batch_size(sample: MetricSample) -> float | None:
    for name in BATCH:
        with suppress(KeyError, ValueError):
            return float(sample.params[name])
    return None


def add_machines(page: Page, records: Sequence[Record]) -> None:
    """How busy they were during the latest runs of each variant, where that was watched, and what they are."""
    latest: dict[str, list[Record]] = {}
    for session in group_sessions(records):
        watched = [run for run in session if len(run.get("monitor") or {}) > 1]
        latest |= group_by(watched, itemgetter("variant"))
    names = dict.fromkeys(name for runs in latest.values() for run in runs for name in run["monitor"])
    names.pop("samples", None)
    shown = [(name, key) for name in names for key in LOAD]
    rows: list[list[Any]] = []
    for variant, runs in latest.items():
        loads = [[run["monitor"].get(name, {}).get(key) for run in runs] for name, key in shown]
        known = [[value for value in values if value is not None] for values in loads]
        cells = [LOAD[key](values) if values else None for (_, key), values in zip(shown, known, strict=True)]
        rows.append([variant, *cells])
    if rows:
        page.section("While they ran")
        page.table(["variant", *(f"{name.replace('_', ' ')}, {key}" for name, key in shown)], rows)
    page.section("Machines")
    machines: dict[tuple[str, ...], None] = {}
    for run in records:
        if said := run["machine"]:
            packages = said.get("packages") or {}
            versions = ", ".join(f"{name} {packages[name]}" for name in SHOWN_PACKAGES if name in packages)
            processor = (said.get("cpu") or {}).get("name") or ""
            driver = (said.get("device") or {}).get("driver") or ""
            host, python = str(said.get("host") or ""), str(said.get("python") or "")
            place = (record.device_name(run), driver, host, record.commit_name(run))
            machines[*place, python, versions, processor] = None
    page.table(MACHINES, list(machines))
