"""Metrics out of what a program printed: JSON lines where there are any, else the benchmark's regular expressions.
Whatever is wrong with one metric is that metric's problem: nothing a program prints raises an error here.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hotloop.bench.benchmark import Benchmark, Metric, Variant
from hotloop.bench.expressions import ExpressionError, evaluate_expression
from hotloop.bench.printed_values import JsonLines, PatternMatches, SearchLimit

IN_ORDER = ("first", "value", "final")  # reductions that ask for a place in the order of printing
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?|100)")
LARGEST = 1e150  # so that squares, for a spread, are still numbers
MPI, COPIES = re.compile(r"\bmpirun\b"), re.compile(r"\s--?np?[ =](\d{1,6})\b")


class ReductionError(ValueError):
    """Values that have no such reduction; the message says why."""


def _stdev(values: Sequence[float]) -> float:
    if len(values) < 2:
        raise ReductionError("a standard deviation needs two values or more")
    centre = statistics.fmean(values)
    # By hand: statistics.stdev computes in fractions, which takes seconds for as many values as are kept.
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "final": lambda values: values[-1],
    "first": lambda values: values[0],
    "value": lambda values: values[0],
    "stdev": _stdev,
}


def is_reduction(kind: str) -> bool:
    """Whether there is such a reduction: one of REDUCTIONS, or p0 ... p100 (p99.9 too)."""
    return kind in REDUCTIONS or PERCENTILE.fullmatch(kind) is not None


def reduce_values(kind: str, values: Sequence[float]) -> float:
    """One finite number out of one or more finite values, or a ReductionError."""
    if not values:
        raise ReductionError("there are no values")
    for place, value in enumerate(values, 1):
        if not math.isfinite(value):
            raise ReductionError(f"value {place} of {len(values)} is {value}")
    try:
        if wanted := PERCENTILE.fullmatch(kind):
            ordered = sorted(values)
            rank = (len(ordered) - 1) * float(wanted[1]) / 100  # between two neighbours, most often
            low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
            result = low + (high - low) * (rank - math.floor(rank))
        elif kind in REDUCTIONS:
            result = REDUCTIONS[kind](values)
        else:
            raise ReductionError(f"there is no reduction '{kind}'; known: {', '.join(REDUCTIONS)}, pNN")
    except OverflowError:
        result = math.inf
    if not abs(result) < LARGEST:
        raise ReductionError(f"the {kind} of {len(values)} values is too large for a number")
    return float(result)


def drop_skipped(metric: Metric, values: Sequence[float], skip: int) -> Sequence[float]:
    """The values that count: without the first `skip`, or by the older rule without the `skip` worst."""
    if 0 < skip >= len(values):
        raise ReductionError(f"{len(values)} values were found and the first {skip} are skipped")
    if not metric.sorted_skip:
        return values[skip:]
    return (
        values
        if metric.reduction in IN_ORDER
        else sorted(values, reverse=metric.name == "latency")[skip:]  # of a latency the highest are the worst
    )


@dataclass
class MetricValues:
    """What a run gave: all values of a metric in order, its one result, or why it has none."""

    values: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def extract(
    benchmark: Benchmark,
    stdout_lines: Iterable[str],
    stderr_lines: Iterable[str],
    variant: Variant | None = None,
) -> MetricValues:
    """Every metric of the benchmark, and what is derived from them and the variant's parameters."""
    limit = SearchLimit()
    patterns = {metric.name: metric.regexp for metric in benchmark.metrics if metric.regexp is not None}
    matches = {name: PatternMatches(regexp, limit) for name, regexp in patterns.items()}
    json_lines = JsonLines([metric.key for metric in benchmark.metrics])
    with limit.enforce():
        for is_stdout, lines in ((True, stdout_lines), (False, stderr_lines)):
            for line in lines:
                json_lines.read(line, is_stdout)
                for match in matches.values():
                    match.read(line)
    recorded = [metric.key for metric in benchmark.metrics if metric.field or metric.regexp is None]
    json_lines.read_run((variant and variant.folder) or benchmark.folder, recorded)
    cmd = variant.cmd if variant else benchmark.cmd
    mpi = MPI.search(cmd)
    copies = COPIES.search(cmd, mpi.end()) if mpi else None
    found = MetricValues()
    for metric in benchmark.metrics:
        scale = int(copies[1]) if copies and metric.name == "throughput" else 1  # each copy prints its own
        _collect_metric(metric, json_lines, matches.get(metric.name), scale, found)
    parameters: dict[str, float] = {}
    for name, text in (variant.params if variant else {}).items():
        with suppress(ValueError):
            parameters[name] = float(text)
    for one in (
        variant.derived if variant and variant.derived else benchmark.derived
    ):  # may use those before it
        try:
            value = evaluate_expression(one.expr, {**parameters, **found.results})
        except ExpressionError as error:
            missing = [name for name in found.problems if re.search(rf"\b{re.escape(name)}\b", one.expr)]
            found.problems[one.name] = f"needs {missing[0]}, which is missing" if missing else str(error)
        else:
            found.values[one.name], found.results[one.name] = [value], value
    return found


def use_record_fields(benchmark: Benchmark, figures: Mapping[str, str]) -> Benchmark:
    """The benchmark with metrics out of a program's records where it no longer prints what their patterns look for."""
    metrics = [
        replace(metric, field=metric.field or figures.get(metric.regexp or ""))
        for metric in benchmark.metrics
    ]
    return replace(benchmark, metrics=tuple(metrics))


def _collect_metric(
    metric: Metric, json_lines: JsonLines, matches: PatternMatches | None, scale: int, found: MetricValues
) -> None:
    series, skip = json_lines.series(metric.key), metric.skip
    if series is not None and not (series.problem and matches is not None and matches.values):
        values, problem = series.values, series.problem
        skip = 0 if series.is_summary else skip  # a program's own summary has no warm-up left in it
    elif matches is None:
        values, problem = [], f"no JSON line of the program has a '{metric.key}'"
    else:
        values, problem = matches.values, matches.problem
        if not values and not problem:
            problem = f"nothing matched the regexp '{metric.regexp}', and no JSON line has a '{metric.key}'"
    found.values[metric.name] = [scale * value for value in values]
    if not problem:
        try:
            kept = drop_skipped(metric, found.values[metric.name], skip)
            found.results[metric.name] = reduce_values(metric.reduction, kept)
            return
        except ReductionError as error:
            problem = str(error)
    found.problems[metric.name] = problem
