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
from typing import Any

import numpy as np

from hotloop.bench.benchmark import count_of
from hotloop.bench.compare import (
    COLUMNS,
    RATE,
    CompareRules,
    better_direction,
    compare_samples,
    comparison_cells,
    judge,
)
from hotloop.bench.page import COLOURS, Axis, Chart, Page, Strip, Strips
from hotloop.bench.peers import PeerRow, add_peers, is_peer_document, read_peer_rows
from hotloop.bench.record import (
    RECORDS,
    SIDES,
    MetricSample,
    Record,
    collect_samples,
    commit_name,
    device_name,
    ended_well,
    group_by,
    group_sessions,
    is_number,
    is_positive,
    ran_in_turns,
    read_printed_result,
    read_records,
    samples_of_partners,
    start_time,
)
from hotloop.bench.roofline import add_roofline, is_kernel
from hotloop.bench.statistics import median, median_interval, spread
from hotloop.errors import DataError
from hotloop.options.files import load_json

BATCH = ("batch_size", "batchsize", "micro_batch_size", "global_batch_size", "batch", "bs")
ROWS = 24  # of one chart of strips
SHOWN_PACKAGES = ("hotloop", "jax", "jaxlib", "numpy", "torch")
MACHINES = ("device", "driver", "host", "commit", "python", "packages", "cpu")
LOAD: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": plain_median, "max": max}
"""What is shown of a load over the runs of a variant."""
ONE_RUN = ", or one reading of it where there was one run"
SUMMARY = (
    *("variant", "metric", "median", "unit", "95 % interval", "spread %", "repeats"),
    *("since before", "device"),
)


@dataclass(frozen=True)
class HistoryPoint:
    """The records of one folder on one device: a point of every history."""

    name: str
    when: str
    device: str
    samples: Mapping[tuple[str, str], MetricSample]


def add_runs(page: Page, records: Sequence[Record]) -> None:
    """Summary, programs in turns, failures, history, spread of repeats, throughput against latency."""
    sessions = group_sessions(records)
    found = []
    for runs in sessions:
        when = min(map(start_time, runs))
        name = commit_name(runs[0]) or when[5:16]
        found.append(HistoryPoint(name, when, device_name(runs[0]), collect_samples(runs)))
    page.heading("Summary")
    page.text(
        "The median over repeats of whole runs, with an interval that is honest about few of them, in the latest "
        "folder of each device. Since before: against the folder before, where there is one."
    )
    known = [(*key, point.device, sample) for point in found for key, sample in point.samples.items()]
    rows: list[list[Any]] = []
    for (variant, metric, device), past in group_by(known, lambda one: one[:3]).items():
        last = past[-1][-1]
        sure = median_interval(last.values)
        interval = f"{sure.low:.4g} … {sure.high:.4g}" if math.isfinite(sure.low) else "–"
        change = "–"
        if len(past) > 1:
            against = judge(past[-2][-1], last, better_direction(metric, last.unit))
            change = f"{against.word} {against.ratio:.3f}"
        numbers = (sure.value, last.unit, interval, 100 * spread(last.values), len(last.values))
        rows.append([variant, metric, *numbers, change, device])
    page.table(SUMMARY, rows)
    verdicts: list[tuple[str, ...]] = []
    for a, b in pairwise(sessions):
        if ran_in_turns(a, b):
            compared = compare_samples(collect_samples(a), samples_of_partners(b), CompareRules())
            verdicts += [comparison_cells(row) for row in compared]
    if verdicts:
        page.heading("In turns")
        page.text(
            "Two programs that ran in turns, A and B; the ratio and its interval are those of the pairs."
        )
        page.table(COLUMNS, verdicts)
    if failed := [run for run in records if run["status"] != "passed"]:
        page.heading("Runs that did not pass")
        rows = [
            [run["variant"], run.get("repeat"), run["status"], run.get("reason") or "", run["folder"]]
            for run in failed
        ]
        page.table(("variant", "repeat", "status", "reason", "log"), rows)
    for heading, charts in (
        ("History", history_charts(found)),
        ("Spread of repeats", spread_charts(found)),
        ("Throughput and latency", trade_off_charts(found)),
    ):
        if charts:
            page.heading(heading)
            page.charts(charts)


def history_charts(found: Sequence[HistoryPoint]) -> list[tuple[Chart, str]]:
    """A chart for each benchmark's metric on each device that was measured more than once."""
    charts = []
    for name in dict.fromkeys(point.device for point in found):
        past = [point for point in found if point.device == name]
        known = {key: sample for point in past for key, sample in point.samples.items()}
        often = [known[key] for key in known if sum(key in point.samples for point in past) > 1]
        groups = group_by(often, lambda sample: (sample.benchmark, sample.metric))
        for (benchmark, metric), shown in groups.items():
            for first in range(0, len(shown), COLOURS):
                chart = _history(past, shown[first : first + COLOURS])
                charts.append((chart, f"{benchmark}: {metric} on {name}, oldest first."))
    return charts


def _history(past: Sequence[HistoryPoint], shown: Sequence[MetricSample]) -> Chart:
    names = tuple(point.name for point in past)
    if len(set(names)) < len(names):
        names = tuple(point.when[5:16] for point in past)
    one = shown[0]
    x, y = Axis("commit or time", names=names), Axis(f"{one.metric}, {one.unit}" if one.unit else one.metric)
    chart = Chart(f"{one.benchmark}: {one.metric} over time", x, y)
    for colour, sample in enumerate(shown):
        points = []
        for place, point in enumerate(past, 1):
            if found := point.samples.get((sample.variant, sample.metric)):
                sure = median_interval(found.values)
                points.append((float(place), sure.value))
                chart.add("range", [(place, sure.low), (place, sure.high)], colour=colour)
        chart.add("dotted line", points, sample.variant, colour)
    return chart


def spread_charts(found: Sequence[HistoryPoint]) -> list[tuple[Strips, str]]:
    """Charts of how far single values lie from their variant's median, one for each metric and device."""
    latest = {(key[1], point.device, key[0]): s for point in found for key, s in point.samples.items()}
    charts = []
    for metric, name in dict.fromkeys(key[:2] for key in latest):
        shown = {key[2]: _relative(sample) for key, sample in latest.items() if key[:2] == (metric, name)}
        names = [variant for variant, values in shown.items() if values]
        for first in range(0, len(names), ROWS):
            rows = []
            for variant in names[first : first + ROWS]:
                low, middle, high = map(float, np.quantile(shown[variant], [0.25, 0.5, 0.75]))
                rows.append(Strip(variant, low, middle, high, shown[variant]))
            chart = Strips(f"Spread of {metric}", Axis(f"{metric} / its median"), rows, at=1.0)
            caption = f"{metric} on {name}: each dot is a run{ONE_RUN}; the box is the middle half."
            charts.append((chart, caption))
    return charts


def _relative(sample: MetricSample) -> tuple[float, ...]:
    """The values of a sample, or the readings inside its one run, as multiples of their median."""
    values = sample.values if len(sample.values) > 1 else sample.inside
    middle = median(values)
    return tuple(value / middle for value in values) if len(values) > 1 and middle else ()


def trade_off_charts(found: Sequence[HistoryPoint]) -> list[tuple[Chart, str]]:
    """Throughput against latency of benchmarks whose variants differ in batch size; the last time of each device."""
    charts = []
    for point in {point.device: point for point in found}.values():
        rates = [s for s in point.samples.values() if batch_size(s) and RATE.search(f"{s.metric} {s.unit}")]
        groups = group_by(rates, lambda sample: (sample.benchmark, sample.metric))
        for (benchmark, metric), group in sorted(groups.items()):
            each = sorted(group, key=lambda sample: batch_size(sample) or 0)
            if len(each) > 1:
                caption = f"{benchmark} on {point.device}: {metric}, numbers are batch sizes."
                charts.append((_trade_off(each, point), caption))
    return charts


def _trade_off(each: Sequence[MetricSample], point: HistoryPoint) -> Chart:
    measured = all(_latency(sample, point) for sample in each)
    label = "latency, ms" if measured else "batch size / throughput, ms"
    rate = each[0].unit or each[0].metric
    chart = Chart(f"{each[0].benchmark}: throughput and latency", Axis(label, log=True), Axis(rate, low=0))
    points = []
    for sample in each:
        speed, size = median(sample.values), batch_size(sample) or 1
        latency = _latency(sample, point) if measured else 1e3 * size / speed if speed else math.nan
        points.append((latency or math.nan, speed))
        chart.note(points[-1], f"{size:g}")
    chart.add("dotted line", points)
    return chart


def batch_size(sample: MetricSample) -> float | None:
    for name in BATCH:
        try:
            return float(sample.params[name])
        except (KeyError, ValueError):
            continue
    return None


def _latency(sample: MetricSample, point: HistoryPoint) -> float | None:
    """A variant's latency in milliseconds if that was measured."""
    scales = {"s": 1e3, "sec": 1e3, "seconds": 1e3, "us": 1e-3, "µs": 1e-3}
    for (variant, metric), other in point.samples.items():
        if variant == sample.variant and "latency" in metric.lower():
            unit = other.unit.lower().removeprefix("latency").strip(" ()")
            return median(other.values) * scales.get(unit, 1.0)
    return None


def add_machines(page: Page, records: Sequence[Record]) -> None:
    """How busy they were during the latest runs of each variant, where that was watched, and what they are."""
    latest: dict[str, list[Record]] = {}
    for session in group_sessions(records):
        watched = [record for record in session if len(record.get("monitor") or {}) > 1]
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
        page.heading("While they ran")
        page.table(["variant", *(f"{name.replace('_', ' ')}, {key}" for name, key in shown)], rows)
    page.heading("Machines")
    machines: dict[tuple[str, ...], None] = {}
    for record in records:
        if said := record["machine"]:
            packages = said.get("packages") or {}
            versions = ", ".join(f"{name} {packages[name]}" for name in SHOWN_PACKAGES if name in packages)
            processor = (said.get("cpu") or {}).get("name") or ""
            driver = (said.get("device") or {}).get("driver") or ""
            host, python = str(said.get("host") or ""), str(said.get("python") or "")
            place = (device_name(record), driver, host, commit_name(record))
            machines[*place, python, versions, processor] = None
    page.table(MACHINES, list(machines))


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
        return [record for record in self.records if record["status"] != "skipped"]


def gather_sources(paths: Sequence[str | Path]) -> Sources:
    found = Sources()
    for path in map(Path, paths):
        if all((path / side / RECORDS).exists() for side in SIDES):
            found.records += read_records([path / side for side in SIDES])
        elif path.is_dir() and not (path / RECORDS).exists():
            files = sorted(path.glob("*.json"))
            if not files:
                raise DataError(
                    f"{path}: has neither {RECORDS} nor JSON files; name a log folder of `hotloop bench run`"
                )
            found.left_out += [file.name for file in files if not _add_document(file, found)]
        elif path.is_dir() or path.suffix == ".jsonl":
            found.records += read_records([path])
        elif not _add_document(path, found):
            raise DataError(
                f"{path}: holds no results that a report can show; name log folders or --json results"
            )
    _add_printed_kernels(found)
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
        raise DataError(
            f"{file}: looks like results but is damaged ({error}); make it anew or leave it out"
        ) from error


def _add_kernels(document: Result, name: str, found: Sources) -> bool:
    """Kernels of one result, of `hotloop kernel all`, or of the demo."""
    several = document.get("kernels") or document.get("results")
    each = {name: document} if is_kernel(document) else several if isinstance(several, Mapping) else {}
    kernels = {one: result for one, result in each.items() if is_kernel(result)}
    for one, result in kernels.items():
        where = str(result.get("device") or document.get("device") or "unknown")
        found.kernels.setdefault(where, {})[one] = result
    return bool(kernels)


def _add_printed_kernels(found: Sources) -> None:
    """Kernels among the benchmarks: their runs printed results that can stand on a roofline.

    Of several repeats each number is the median, and of several folders the latest counts, as in the summary.
    """
    for session in group_sessions(found.records):
        printed: dict[str, list[Result]] = {}
        for record in session:
            if ended_well(record) and (result := read_printed_result(record)) is not None:
                printed.setdefault(record["variant"], []).append(result)
        for variant, results in printed.items():
            with suppress(AttributeError, TypeError):  # a program may print whatever it likes
                _add_kernels(_median_result(results), variant, found)


def _median_result(results: Sequence[Any]) -> Any:
    """One result for several of the same shape: the median of each number, anything else as the last has it."""
    last = results[-1]
    if isinstance(last, Mapping) and all(isinstance(one, Mapping) for one in results):
        return {name: _median_result([one[name] for one in results if name in one]) for name in last}
    return plain_median(results) if all(map(is_number, results)) else last


def build_report(found: Sources, title: str = "Benchmarks") -> Page:
    parts = sorted({device_name(record) for record in found.records})
    if found.peers:
        parts.insert(0, f"{count_of(len(found.peers), 'comparison')} with peers")
    if found.kernels:
        parts.insert(0, count_of(sum(map(len, found.kernels.values())), "kernel"))
    if found.records:
        variants = count_of(len({record["variant"] for record in found.runs}), "variant")
        failed = sum(record["status"] != "passed" for record in found.runs)
        parts.insert(0, f"{count_of(len(found.runs), 'run')} of {variants}, {failed} failed")
    page = Page(title, " · ".join(parts))
    if found.records:
        add_runs(page, found.records)
    if found.kernels:
        page.heading("Roofline of the kernels")
    for name, kernels in found.kernels.items():
        add_roofline(page, name, kernels, found.ceilings.get(name))
    if found.peers:
        add_peers(page, found.peers)
    if found.records:
        add_machines(page, found.records)
    return page
