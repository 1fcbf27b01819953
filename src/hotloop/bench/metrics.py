"""Metrics out of what a program printed: JSON lines where there are any, else the benchmark's regular expressions.

Lines are read once, as they come, and only values are kept. Whatever is wrong with one metric is that metric's
problem: nothing a program prints raises an error here. A metric that is asked for as JSON may also be in the events
of the run that the program's result names. It knows no processes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hotloop.bench import reductions
from hotloop.bench.expressions import ExpressionError, evaluate
from hotloop.bench.json_lines import JsonLines
from hotloop.bench.model import Benchmark, Derived, Metric, Variant
from hotloop.bench.search_limit import SearchLimit, Stopwatch, TooSlow

LONGEST_LINE = 8192  # a pattern may need time with the square of this
MOST_VALUES = 1_000_000
LAZY_END = re.compile(r"[*+?}]\?\)$")
MPI, COPIES = re.compile(r"\bmpirun\b"), re.compile(r"\s--?np?[ =](\d{1,6})\b")


@dataclass
class Found:
    """What a run gave: all values of a metric in order, its one result, or why it has none."""

    values: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class Matches:
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
) -> Found:
    """Every metric of the benchmark, and what is derived from them and the variant's parameters."""
    limit = SearchLimit()
    patterns = [metric for metric in benchmark.metrics if metric.regexp is not None]
    matches = {metric.name: Matches(metric, limit) for metric in patterns}
    spoken = JsonLines([metric.key for metric in benchmark.metrics])
    with limit.kept():
        for line in stdout_lines:
            _read(line, True, spoken, matches)
        for line in stderr_lines:
            _read(line, False, spoken, matches)
    recorded = [metric.key for metric in benchmark.metrics if metric.field or metric.regexp is None]
    spoken.read_run((variant and variant.folder) or benchmark.folder, recorded)
    found, copies = Found(), _copies(variant.cmd if variant else benchmark.cmd)
    for metric in benchmark.metrics:
        _settle(metric, spoken, matches.get(metric.name), copies, found)
    derived = variant.derived if variant and variant.derived else benchmark.derived
    _derive(derived, _numbers(variant.params if variant else {}), found)
    return found


def by_fields(benchmark: Benchmark, figures: Mapping[str, str]) -> Benchmark:
    """The benchmark with metrics out of a program's records where it no longer prints what their patterns look for."""
    metrics = [
        replace(metric, field=metric.field or figures.get(metric.regexp or ""))
        for metric in benchmark.metrics
    ]
    return replace(benchmark, metrics=tuple(metrics))


def _read(line: str, is_stdout: bool, spoken: JsonLines, matches: Mapping[str, Matches]) -> None:
    spoken.read(line, is_stdout)
    for match in matches.values():
        match.read(line[:LONGEST_LINE])


def _settle(metric: Metric, spoken: JsonLines, matches: Matches | None, copies: int, found: Found) -> None:
    """One metric's values, and its result or its problem."""
    series, skip, problem = spoken.series(metric.key), metric.skip, ""
    if series is not None and not (series.problem and matches is not None and matches.values):
        values, problem = series.values, series.problem
        skip = 0 if series.is_summary else skip  # a program's own summary has no warm-up left in it
    elif matches is not None:
        values, problem = matches.values, matches.problem or ("" if matches.values else _nothing(metric))
    else:
        values, problem = [], _nothing(metric)
    scale = copies if metric.name == "throughput" else 1  # each copy prints its own
    found.values[metric.name] = [scale * value for value in values]
    if not problem:
        try:
            kept = _kept(metric, found.values[metric.name], skip)
            found.results[metric.name] = reductions.reduce(metric.reduction, kept)
            return
        except reductions.ReductionError as error:
            problem = str(error)
    found.problems[metric.name] = problem


def _kept(metric: Metric, values: list[float], skip: int) -> list[float]:
    if not metric.sorted_skip:
        return list(reductions.warmed_up(values, skip))
    best = list(reductions.without_worst(values, skip, lower_is_better=metric.name == "latency"))
    return values if metric.reduction in reductions.IN_ORDER else best


def _nothing(metric: Metric) -> str:
    if metric.regexp is None:
        return f"no JSON line of the program has a '{metric.key}'"
    return f"nothing matched the regexp '{metric.regexp}', and no JSON line has a '{metric.key}'"


def _derive(derived: Iterable[Derived], parameters: Mapping[str, float], found: Found) -> None:
    """Derived metrics in order, each of which may use the ones before it."""
    for one in derived:
        try:
            value = evaluate(one.expr, {**parameters, **found.results})
        except ExpressionError as error:
            missing = [name for name in found.problems if re.search(rf"\b{re.escape(name)}\b", one.expr)]
            found.problems[one.name] = f"needs {missing[0]}, which is missing" if missing else str(error)
        else:
            found.values[one.name], found.results[one.name] = [value], value


def _numbers(params: Mapping[str, str]) -> dict[str, float]:
    numbers = {}
    for name, text in params.items():
        try:
            numbers[name] = float(text)
        except ValueError:
            continue
    return numbers


def _copies(cmd: str) -> int:
    """The --np of an mpirun in the command, else 1."""
    mpi = MPI.search(cmd)
    found = COPIES.search(cmd, mpi.end()) if mpi else None
    return int(found[1]) if found else 1
