"""Metrics out of what a program printed: JSON lines where there are any, else the benchmark's regular expressions.
Whatever is wrong with one metric is that metric's problem: nothing a program prints raises an error here.

Of JSON lines, an event is an object with an `event`, as in a run's events.jsonl; the result is the last object on
standard output without one, as `--json` prints it. Where the result names its run's folder, the events can be had from
there. A key may be a path: `cost.flops` is inside an object, `validation.loss` is the `loss` of events called
validation; and `loss|validation.loss` is both, in the order of the events.
"""

import json
import math
import re
import signal
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hotloop.bench.benchmark import Benchmark, Metric, Variant
from hotloop.bench.expressions import ExpressionError, evaluate_expression
from hotloop.bench.record import is_number
from hotloop.options.files import parse_json

LONGEST_JSON = 1 << 20
LONGEST_SEARCHED = 8192  # characters of a line; a pattern may need time with the square of this
LARGEST_RECORD = 256 << 20
MOST_VALUES = 1_000_000
TICK = 0.1  # seconds between looks at how long a search has taken
LINE_SECONDS, ALL_SECONDS = 3.0, 120.0  # for one pattern's searches: in one line, and in all lines of a run
LAZY_END = re.compile(r"[*+?}]\?\)$")
IN_ORDER = ("first", "value", "final")  # reductions that ask for a place in the order of printing
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?|100)")
LARGEST = 1e150  # so that squares, for a spread, are still numbers
MPI, COPIES = re.compile(r"\bmpirun\b"), re.compile(r"\s--?np?[ =](\d{1,6})\b")
_MISSING = object()


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


@dataclass
class MetricValues:
    """What a run gave: all values of a metric in order, its one result, or why it has none."""

    values: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def extract(
    benchmark: Benchmark, stdout: Iterable[str], stderr: Iterable[str], variant: Variant | None = None
) -> MetricValues:
    """Every metric of the benchmark, and what is derived from them and the variant's parameters."""
    patterns = {metric.name: metric.regexp for metric in benchmark.metrics if metric.regexp is not None}
    matches = {name: PatternMatches(regexp) for name, regexp in patterns.items()}
    json_lines = JsonLines([metric.key for metric in benchmark.metrics])
    with limit_searches(list(matches.values())):
        for is_stdout, lines in ((True, stdout), (False, stderr)):
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
    for one in variant.derived if variant and variant.derived else benchmark.derived:
        try:
            value = evaluate_expression(one.expr, {**parameters, **found.results})  # of those before it, too
        except ExpressionError as error:
            missing = [name for name in found.problems if re.search(rf"\b{re.escape(name)}\b", one.expr)]
            found.problems[one.name] = f"needs {missing[0]}, which is missing" if missing else str(error)
        else:
            found.values[one.name], found.results[one.name] = [value], value
    return found


def _collect_metric(
    metric: Metric, json_lines: "JsonLines", matches: "PatternMatches | None", scale: int, found: MetricValues
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
    values = found.values[metric.name] = [scale * value for value in values]
    if not problem and 0 < skip >= len(values):
        problem = f"{len(values)} values were found and the first {skip} are skipped"
    if not problem:
        if not metric.sorted_skip:
            values = values[skip:]
        elif metric.reduction not in IN_ORDER:  # by the older rule the worst go, of a latency the highest
            values = sorted(values, reverse=metric.name == "latency")[skip:]
        try:
            found.results[metric.name] = reduce_values(metric.reduction, values)
            return
        except ReductionError as error:
            problem = str(error)
    found.problems[metric.name] = problem


def use_record_fields(benchmark: Benchmark, figures: Mapping[str, str]) -> Benchmark:
    """The benchmark with metrics out of a program's records where it no longer prints what their patterns look for."""
    named = [(metric, metric.field or figures.get(metric.regexp or "")) for metric in benchmark.metrics]
    return replace(benchmark, metrics=tuple(replace(metric, field=name) for metric, name in named))


@dataclass
class Series:
    """The values of one key in order; `is_summary` for a single number out of the result."""

    values: list[float] = field(default_factory=list)
    problem: str = ""
    is_summary: bool = False

    def add(self, key: str, value: Any) -> None:
        """One more value; null stands for NaN, as JSON cannot say that."""
        if value is None or is_number(value):
            self.values.append(float("nan") if value is None else float(value))
        else:
            self.problem = f"'{key}' in a JSON line is {json.dumps(value)[:80]}, which is no number"
        if len(self.values) > MOST_VALUES:
            self.problem = f"more than {MOST_VALUES} values; print fewer"


class JsonLines:
    def __init__(self, keys: Iterable[str]):
        self._events: dict[str, Series] = {key: Series() for key in keys}
        self._result: Mapping[str, Any] = {}

    def read(self, line: str, is_stdout: bool) -> None:
        """Take one line if it is a JSON object; any other line is left alone."""
        record = _parse_line(line)
        if record is not None and "event" in record:
            _take_values(record, self._events)
        elif record is not None and is_stdout:
            self._result = record

    def read_run(self, folder: Path, keys: Iterable[str]) -> None:
        """Take keys that no line had from the events of the run that the result names, relative to `folder`."""
        recorded = {key: Series() for key in keys if not self._events[key].values}
        runs = [name for name in map(self._result.get, ("run", "model_dir")) if isinstance(name, str)]
        with suppress(OSError, ValueError):  # there is no such run
            for run in runs[:1] if recorded else ():
                path = folder / run / "events.jsonl"
                if path.stat().st_size > LARGEST_RECORD:
                    continue
                with path.open(encoding="utf-8", errors="replace") as file:
                    for line in file:
                        record = _parse_line(line) or {}
                        if record.get("event") == "start":  # an earlier process of the run is none of ours
                            recorded = {key: Series() for key in recorded}
                        elif "event" in record:
                            _take_values(record, recorded)
        self._events |= {key: series for key, series in recorded.items() if series.values or series.problem}

    def series(self, key: str) -> Series | None:
        """The key's values: from events, else from the result, else None."""
        series = self._events[key]
        if series.values or series.problem:
            return series
        value = _look_up(self._result, key)
        if value is _MISSING:
            return None
        many = isinstance(value, list)
        found = Series(is_summary=not many)
        for item in value if many else [value]:
            found.add(key, item)
        return found


def _parse_line(line: str) -> Mapping[str, Any] | None:
    text = line.strip() if line[:1] in "{ \t" else ""
    if not (text.startswith("{") and text.endswith("}")) or len(text) > LONGEST_JSON:
        return None
    try:
        record = parse_json(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _look_up(record: Mapping[str, Any], key: str) -> Any:
    """The value under a name or a path of names with dots."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _take_values(event: Mapping[str, Any], wanted: Mapping[str, Series]) -> None:
    """A plain key is looked up in logs, one that begins with an event's name in events of that name; | is or."""
    for key, series in wanted.items():
        for choice in () if series.problem else key.split("|"):
            name, _, rest = choice.partition(".")
            value = _MISSING
            if rest and event["event"] == name:
                value = _look_up(event, rest)
            elif event["event"] == "log":
                value = _look_up(event, choice)
            if value is not _MISSING:
                series.add(key, value)
                break


class TooSlow(Exception):
    """A search was given up."""


class PatternMatches:
    """The numbers that one metric's regular expression finds, line by line."""

    def __init__(self, regexp: str):
        self.regexp, self.is_searching = regexp, False
        self.values: list[float] = []
        self.problem = ""
        self.all_seconds = self.line_seconds = 0.0
        try:
            self.pattern = re.compile(regexp)
        except re.error as error:
            self.problem = f"the regexp '{regexp}' is none: {error}"
            return
        names = tuple(self.pattern.groupindex)
        self.group = names[0] if len(names) == 1 else min(self.pattern.groups, 1)
        if LAZY_END.search(regexp):
            self.problem = (
                f"the regexp '{regexp}' ends in a lazy group, which matches as little as it may: "
                "an empty text or a part of the number; take out its last '?'"
            )
        elif len(names) != 1 and self.pattern.groups > 1:
            self.problem = f"the regexp '{regexp}' has {self.pattern.groups} groups; keep one, or name one"

    def read(self, line: str) -> None:
        """Take the matches of one line, until something is wrong."""
        if self.problem:
            return
        try:
            # Set for every line, so it is a plain attribute: a context would cost more than most searches.
            self.line_seconds, self.is_searching = 0.0, True
            for match in self.pattern.finditer(line[:LONGEST_SEARCHED]):
                text = match[self.group]
                try:
                    self.values.append(float(text))
                except (TypeError, ValueError):
                    what = f"'{text[:80]}'" if text else "an empty text"
                    self.problem = f"the regexp '{self.regexp}' matched {what}, which is no number"
                if len(self.values) > MOST_VALUES:
                    self.problem = f"more than {MOST_VALUES} values; print fewer"
                if self.problem:
                    break
            self.is_searching = False
        except TooSlow as error:
            self.is_searching = False
            self.problem = (
                f"the regexp '{self.regexp}' was given up, it needed {error}: it tries too many ways to match, so "
                "leave out repeats inside of repeats"
            )


@contextmanager
def limit_searches(patterns: Sequence[PatternMatches]) -> Iterator[None]:
    """While the block runs, give up a search that backtracks without end; in the main thread, which has the timer.

    Python's matcher looks for signals while it works, and the timer is of the process's own computing time: a busy
    machine brings no pattern nearer to its limit.
    """

    def tick(number: int, frame: FrameType | None) -> None:
        for pattern in patterns:
            if pattern.is_searching:
                pattern.all_seconds += TICK
                pattern.line_seconds += TICK
                if pattern.line_seconds > LINE_SECONDS:
                    raise TooSlow(f"more than {LINE_SECONDS:g} seconds for one line")
                if pattern.all_seconds > ALL_SECONDS:
                    raise TooSlow(f"more than {ALL_SECONDS:g} seconds for all lines")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, TICK, TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
