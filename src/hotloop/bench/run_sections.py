"""The sections of a report that are about runs of `hotloop bench run`: summary with verdicts, programs in turns,
failures, history, spread, throughput against latency, load and machines. It reads no file.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from statistics import median as plain_median
from typing import Any, NamedTuple

import numpy as np

from hotloop.bench import compare, record
from hotloop.bench.axes import Axis
from hotloop.bench.charts import COLOURS, Chart
from hotloop.bench.page import CaptionedChart, Page, Word
from hotloop.bench.record import MetricSample, Record, group_by, group_sessions
from hotloop.bench.statistics import median, median_interval, spread
from hotloop.bench.strips import Strip, Strips

BATCH = ("batch_size", "batchsize", "micro_batch_size", "global_batch_size", "batch", "bs")
ROWS = 24  # of one chart of strips
SHOWN_PACKAGES = ("hotloop", "jax", "jaxlib", "numpy", "torch")
MACHINES = ("device", "driver", "host", "commit", "python", "packages", "cpu")
MILLISECONDS = {"s": 1e3, "sec": 1e3, "seconds": 1e3, "us": 1e-3, "µs": 1e-3}
LOAD: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": plain_median, "max": max}
"""What is shown of a load over the runs of a variant."""
SUMMARY = (
    *("variant", "metric", "median", "unit", "95 % interval", "spread %", "repeats"),
    *("since before", "ratio", "device", "date", "commit"),
)


class HistoryPoint(NamedTuple):
    """The records of one folder on one device: a point of every history."""

    name: str
    when: str
    device: str
    samples: Mapping[tuple[str, str], MetricSample]


class SummaryRow(NamedTuple):
    """The latest values of a variant's metric on a device, and the verdict on them against those before."""

    variant: str
    metric: str
    device: str
    sample: MetricSample
    date: str
    commit: str
    change: compare.Verdict | None

    @property
    def word(self) -> str:
        return self.change.word if self.change else ""


def list_history(records: Sequence[Record]) -> list[HistoryPoint]:
    found = []
    for runs in group_sessions(records):
        when = min(map(record.start_time, runs))
        name = record.commit_name(runs[0]) or when[5:16]
        found.append(HistoryPoint(name, when, record.device_name(runs[0]), record.collect_samples(runs)))
    return found


def summarise(records: Sequence[Record]) -> list[SummaryRow]:
    known = [
        (*key, point.device, sample, point)
        for point in list_history(records)
        for key, sample in point.samples.items()
    ]
    rows = []
    for (variant, metric, device), past in group_by(known, lambda one: one[:3]).items():
        *_, last, point = past[-1]
        change = None
        if len(past) > 1:
            change = compare.judge(past[-2][3], last, compare.better_direction(metric, last.unit))
        commit = point.name if point.name != point.when[5:16] else ""
        rows.append(SummaryRow(variant, metric, device, last, point.when[:10], commit, change))
    return rows


def summary_cells(row: SummaryRow) -> list[Any]:
    sure, values = median_interval(row.sample.values), row.sample.values
    interval = f"{sure.low:.4g} … {sure.high:.4g}" if math.isfinite(sure.low) else "–"
    numbers = (sure.value, row.sample.unit, interval, 100 * spread(values), len(values))
    change = (Word(row.word), row.change.ratio) if row.change else ("–", None)
    return [row.variant, row.metric, *numbers, *change, row.device, row.date, row.commit]


def change_charts(summary: Sequence[SummaryRow]) -> list[CaptionedChart]:
    """What has changed since the folder before, for each device: ratios with their intervals, and the verdicts."""
    charts: list[CaptionedChart] = []
    judged = [row for row in summary if row.change and math.isfinite(row.change.low)]
    for device, rows in group_by(judged, lambda row: row.device).items():
        for first in range(0, len(rows), ROWS):
            strips = []
            for row in rows[first : first + ROWS]:
                assert row.change is not None
                ends = (row.change.low, row.change.ratio, row.change.high)
                strips.append(Strip(f"{row.variant} · {row.metric}", *ends, word=row.word))
            chart = Strips(f"Now against before on {device}", Axis("now / before"), strips, at=1.0)
            charts.append(
                (chart, "The ratio of the medians and its interval; a rate above 1 is faster, a time below.")
            )
    return charts


def add_runs(page: Page, records: Sequence[Record], summary: Sequence[SummaryRow]) -> None:
    sessions, found = group_sessions(records), list_history(records)
    page.section(
        "Summary",
        "The median over repeats of whole runs, with an interval that is honest about few of them, in the latest "
        "folder of each device. Since before: against the folder before, where there is one.",
    )
    for chart in change_charts(summary):
        page.charts([chart])
    page.table(SUMMARY, list(map(summary_cells, summary)), "Summary")
    verdicts: list[list[str]] = []
    for a, b in pairwise(sessions):
        if record.ran_in_turns(a, b):
            sides = record.collect_samples(a), record.samples_of_partners(b)
            compared = compare.compare_samples(*sides, compare.CompareRules())
            place = compare.COLUMNS.index("verdict")
            for row in compared:
                cells = list(compare.comparison_cells(row))
                verdicts.append([*cells[:place], Word(cells[place]), *cells[place + 1 :]])
    if verdicts:
        said = "Two programs that ran in turns, A and B; the ratio and its interval are those of the pairs."
        page.section("In turns", said)
        page.table(compare.COLUMNS, verdicts, "Programs in turns")
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
