"""How the values that a program printed become one number. It knows numbers alone, not where they came from.

Every reduction refuses NaN and infinity: a mean over a diverged run is worse than no number at all.

Metrics out of what a program printed: JSON lines where there are any, else the benchmark's regular expressions.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hotloop.bench.benchmark import Benchmark, Derived, Metric, Variant
from hotloop.bench.expressions import ExpressionError, evaluate_expression
from hotloop.bench.printed_values import JsonLines, SearchLimit, Stopwatch, TooSlow

IN_ORDER = ("first", "value", "final")
"""Reductions that ask for a place in the order of printing."""
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?|100)")
LARGEST = 1e150  # so that squares, for a spread, are still numbers


class ReductionError(ValueError):
    """Values that have no such reduction; the message says why."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _stdev(values: Sequence[float]) -> float:
    if len(values) < 2:
        raise ReductionError("a standard deviation needs two values or more")
    centre = _mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": _mean,
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
            result = percentile(values, float(wanted[1]))
        elif kind in REDUCTIONS:
            result = REDUCTIONS[kind](values)
        else:
            raise ReductionError(f"there is no reduction '{kind}'; known: {', '.join(REDUCTIONS)}, pNN")
    except OverflowError:
        result = math.inf
    if not abs(result) < LARGEST:
        raise ReductionError(f"the {kind} of {len(values)} values is too large for a number")
    return float(result)


def drop_warm_up(values: Sequence[float], skip: int) -> Sequence[float]:
    """The values after the first `skip`, in the order of printing."""
    _check_skip(values, skip)
    return values[skip:]


def drop_worst(values: Sequence[float], skip: int, *, lower_is_better: bool) -> Sequence[float]:
    """The old rule: the values in order of size without the `skip` worst, wherever they were printed."""
    _check_skip(values, skip)
    return sorted(values, reverse=lower_is_better)[skip:]


def _check_skip(values: Sequence[float], skip: int) -> None:
    if 0 < skip >= len(values):
        raise ReductionError(f"{len(values)} values were found and the first {skip} are skipped")


LONGEST_LINE = 8192  # a pattern may need time with the square of this
MOST_VALUES = 1_000_000
LAZY_END = re.compile(r"[*+?}]\?\)$")
MPI, COPIES = re.compile(r"\bmpirun\b"), re.compile(r"\s--?np?[ =](\d{1,6})\b")


@dataclass
class MetricValues:
    """What a run gave: all values of a metric in order, its one result, or why it has none."""

    values: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class PatternMatches:
    """The numbers that one metric's regular expression finds, line by line."""

    def __init__(self, metric: Metric, limit: SearchLimit):
        self.values: list[float] = []
        self.problem = ""
        self.limit, self.stopwatch = limit, Stopwatch()
        self.regexp = metric.regexp or ""
        try:
            self.pattern = re.compile(self.regexp)
        except re.error as error:
            self.problem = f"the regexp '{self.regexp}' is none: {error}"
            return
        names = tuple(self.pattern.groupindex)
        self.group = names[0] if len(names) == 1 else min(self.pattern.groups, 1)
        if LAZY_END.search(self.regexp):
            self.problem = (
                f"the regexp '{self.regexp}' ends in a lazy group, which matches as little as it may: "
                "an empty text or a part of the number; take out its last '?'"
            )
        elif len(names) != 1 and self.pattern.groups > 1:
            self.problem = (
                f"the regexp '{self.regexp}' has {self.pattern.groups} groups; keep one, or name one"
            )

    def read(self, line: str) -> None:
        """Take the matches of one line, until something is wrong."""
        if self.problem:
            return
        try:
            self.limit.begin(self.stopwatch)
            self._read(line)
            self.limit.end()
        except TooSlow as error:
            self.limit.end()
            self.problem = (
                f"the regexp '{self.regexp}' was given up, it needed {error}: it tries too many ways to match, so "
                "leave out repeats inside of repeats"
            )

    def _read(self, line: str) -> None:
        for match in self.pattern.finditer(line):
            text = match[self.group]
            try:
                self.values.append(float(text))
            except (TypeError, ValueError):
                self.problem = self._no_number(text)
            if len(self.values) > MOST_VALUES:
                self.problem = f"more than {MOST_VALUES} values; print fewer"
            if self.problem:
                return

    def _no_number(self, text: str | None) -> str:
        what = f"'{text[:80]}'" if text else "an empty text"
        return f"the regexp '{self.regexp}' matched {what}, which is no number"


def extract(
    benchmark: Benchmark,
    stdout_lines: Iterable[str],
    stderr_lines: Iterable[str],
    variant: Variant | None = None,
) -> MetricValues:
    """Every metric of the benchmark, and what is derived from them and the variant's parameters."""
    limit = SearchLimit()
    patterns = [metric for metric in benchmark.metrics if metric.regexp is not None]
    matches = {metric.name: PatternMatches(metric, limit) for metric in patterns}
    spoken = JsonLines([metric.key for metric in benchmark.metrics])
    with limit.kept():
        for line in stdout_lines:
            _read_line(line, True, spoken, matches)
        for line in stderr_lines:
            _read_line(line, False, spoken, matches)
    recorded = [metric.key for metric in benchmark.metrics if metric.field or metric.regexp is None]
    spoken.read_run((variant and variant.folder) or benchmark.folder, recorded)
    found, copies = MetricValues(), _count_copies(variant.cmd if variant else benchmark.cmd)
    for metric in benchmark.metrics:
        _collect_metric(metric, spoken, matches.get(metric.name), copies, found)
    derived = variant.derived if variant and variant.derived else benchmark.derived
    _derive(derived, _numeric_parameters(variant.params if variant else {}), found)
    return found


def use_record_fields(benchmark: Benchmark, figures: Mapping[str, str]) -> Benchmark:
    """The benchmark with metrics out of a program's records where it no longer prints what their patterns look for."""
    metrics = [
        replace(metric, field=metric.field or figures.get(metric.regexp or ""))
        for metric in benchmark.metrics
    ]
    return replace(benchmark, metrics=tuple(metrics))


def _read_line(line: str, is_stdout: bool, spoken: JsonLines, matches: Mapping[str, PatternMatches]) -> None:
    spoken.read(line, is_stdout)
    for match in matches.values():
        match.read(line[:LONGEST_LINE])


def _collect_metric(
    metric: Metric, spoken: JsonLines, matches: PatternMatches | None, copies: int, found: MetricValues
) -> None:
    """One metric's values, and its result or its problem."""
    series, skip, problem = spoken.series(metric.key), metric.skip, ""
    if series is not None and not (series.problem and matches is not None and matches.values):
        values, problem = series.values, series.problem
        skip = 0 if series.is_summary else skip  # a program's own summary has no warm-up left in it
    elif matches is not None:
        values, problem = (
            matches.values,
            matches.problem or ("" if matches.values else _explain_nothing(metric)),
        )
    else:
        values, problem = [], _explain_nothing(metric)
    scale = copies if metric.name == "throughput" else 1  # each copy prints its own
    found.values[metric.name] = [scale * value for value in values]
    if not problem:
        try:
            kept = _drop_skipped(metric, found.values[metric.name], skip)
            found.results[metric.name] = reduce_values(metric.reduction, kept)
            return
        except ReductionError as error:
            problem = str(error)
    found.problems[metric.name] = problem


def _drop_skipped(metric: Metric, values: list[float], skip: int) -> list[float]:
    if not metric.sorted_skip:
        return list(drop_warm_up(values, skip))
    best = list(drop_worst(values, skip, lower_is_better=metric.name == "latency"))
    return values if metric.reduction in IN_ORDER else best


def _explain_nothing(metric: Metric) -> str:
    if metric.regexp is None:
        return f"no JSON line of the program has a '{metric.key}'"
    return f"nothing matched the regexp '{metric.regexp}', and no JSON line has a '{metric.key}'"


def _derive(derived: Iterable[Derived], parameters: Mapping[str, float], found: MetricValues) -> None:
    """Derived metrics in order, each of which may use the ones before it."""
    for one in derived:
        try:
            value = evaluate_expression(one.expr, {**parameters, **found.results})
        except ExpressionError as error:
            missing = [name for name in found.problems if re.search(rf"\b{re.escape(name)}\b", one.expr)]
            found.problems[one.name] = f"needs {missing[0]}, which is missing" if missing else str(error)
        else:
            found.values[one.name], found.results[one.name] = [value], value


def _numeric_parameters(params: Mapping[str, str]) -> dict[str, float]:
    numbers = {}
    for name, text in params.items():
        try:
            numbers[name] = float(text)
        except ValueError:
            continue
    return numbers


def _count_copies(cmd: str) -> int:
    """The --np of an mpirun in the command, else 1."""
    mpi = MPI.search(cmd)
    found = COPIES.search(cmd, mpi.end()) if mpi else None
    return int(found[1]) if found else 1
