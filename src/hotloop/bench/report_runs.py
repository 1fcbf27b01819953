"""The parts of the report on benchmark runs: summary, history, spread of repeats, throughput against latency.

Each takes records and gives tables and charts; `report.py` puts them on a page.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hotloop.bench import results
from hotloop.bench.compare import CompareRules, compare_samples, comparison_cells, rename_partners
from hotloop.bench.record import Record
from hotloop.bench.results import MetricSample, collect_samples, commit_name, device_name, start_time
from hotloop.bench.statistics import median, median_interval, spread
from hotloop.bench.svg import COLOURS, Axis, Chart, Strip, Strips
from hotloop.bench.verdict import RATE, better_direction, judge

Cell = str | float | None
BATCH = ("batch_size", "batchsize", "micro_batch_size", "global_batch_size", "batch", "bs")
ROWS = 24  # of one chart of strips
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


def build_history(records: Sequence[Record]) -> list[HistoryPoint]:
    found = []
    for runs in results.group_sessions(records):
        when = min(map(start_time, runs))
        name = commit_name(runs[0]) or when[5:16]
        found.append(HistoryPoint(name, when, device_name(runs[0]), collect_samples(runs)))
    return found


def summary_rows(found: Sequence[HistoryPoint]) -> list[list[Cell]]:
    """The latest values of every variant's metrics on every device, and the verdict against the time before."""
    known = [(*key, point.device, sample) for point in found for key, sample in point.samples.items()]
    rows: list[list[Cell]] = []
    for (variant, metric, device), past in results.group_by(known, lambda one: one[:3]).items():
        last = past[-1][-1]
        sure = median_interval(last.values)
        interval = f"{sure.low:.4g} … {sure.high:.4g}" if math.isfinite(sure.low) else "–"
        change = "–"
        if len(past) > 1:
            against = judge(past[-2][-1], last, better_direction(metric, last.unit))
            change = f"{against.word} {against.ratio:.3f}"
        numbers = (sure.value, last.unit, interval, 100 * spread(last.values), len(last.values))
        rows.append([variant, metric, *numbers, change, device])
    return rows


def turns_rows(records: Sequence[Record]) -> list[Sequence[Cell]]:
    """The verdicts between two programs that ran in turns, as `hotloop bench compare` gives them."""
    rows: list[Sequence[Cell]] = []
    for a, b in pairwise(results.group_sessions(records)):
        if results.ran_in_turns(a, b):
            beside = rename_partners(collect_samples(b), results.find_partners(b))
            compared = compare_samples(collect_samples(a), beside, CompareRules())
            rows += [comparison_cells(row) for row in compared]
    return rows


def history_charts(found: Sequence[HistoryPoint]) -> list[tuple[Chart, str]]:
    """A chart for each benchmark's metric on each device that was measured more than once."""
    charts = []
    for name in dict.fromkeys(point.device for point in found):
        past = [point for point in found if point.device == name]
        known = {key: sample for point in past for key, sample in point.samples.items()}
        often = [known[key] for key in known if sum(key in point.samples for point in past) > 1]
        groups = results.group_by(often, lambda sample: (sample.benchmark, sample.metric))
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
                chart.range(place, sure.low, sure.high, colour)
        chart.line(points, colour=colour)
        chart.dots(points, sample.variant, colour=colour)
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
        groups = results.group_by(rates, lambda sample: (sample.benchmark, sample.metric))
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
    chart.line(points)
    chart.dots(points, colour=0)
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
