"""The keys of an entry in a benchmark file as typed values. A value that does not fit is reported with its line and
replaced by the default, so that reading goes on to the next problem.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TypeVar

from hotloop.bench import expressions
from hotloop.bench.benchmark import Derived, Metric
from hotloop.bench.metrics import REDUCTIONS, is_reduction
from hotloop.options import did_you_mean
from hotloop.options.document import (
    LocatedList,
    LocatedMapping,
    LocatedPair,
    LocatedText,
    LocatedValue,
    ReportProblem,
)

FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
METRIC_KEYS = ("regexp", "skip", "reduction_type", "field", "unit", "sorted_skip")
DERIVED_KEYS = ("expr", "reduction_type", "unit")
TIME_UNITS = ("s", "ms", "us", "sec", "secs", "seconds", "minutes", "hours")
UNITS = (*TIME_UNITS, "%", "percent", "nats", "TFLOPs", "GB")
MOST_VARIANTS = 10_000
Output = tuple[tuple[str, str], ...]
ParameterRow = dict[str, str]
T = TypeVar("T")


class Fields:
    """The keys of one mapping; `place` is how the file's author would call it, such as `data.loss`."""

    def __init__(self, pairs: LocatedMapping, place: str, report: ReportProblem):
        self.pairs, self.place, self.report = pairs.pairs, place, report

    def __contains__(self, key: str) -> bool:
        pair = self.pairs.get(key)
        return pair is not None and not (isinstance(pair.value, LocatedText) and pair.value.is_null)

    def line(self, key: str) -> int:
        return self.pairs[key].line

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Report each key that means nothing here, with the nearest that does."""
        names, where = list(known), f" in {self.place}" if self.place else ""
        for key, pair in self.pairs.items():
            if key not in names:
                self.report(pair.line, f"unknown key '{key}'{where}{did_you_mean(key, names)}")

    def text(self, key: str, default: T) -> str | T:
        if key not in self:
            return default
        value = self.pairs[key].value
        return value.text if isinstance(value, LocatedText) else self.wrong(key, "must be a text", default)

    def flag(self, key: str, default: T) -> bool | T:
        word = self.text(key, "").lower()
        if not word or word in FLAGS:
            return FLAGS[word] if word else default
        return self.wrong(key, f"must be true or false, not '{word}'", default)

    def whole(self, key: str, default: T, least: int) -> int | T:
        text = self.text(key, "")
        if not text:
            return default
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least:
            return int(text)
        return self.wrong(key, f"must be a whole number from {least}, not '{text}'", default)

    def seconds(self, key: str, default: T) -> float | T:
        text = self.text(key, "")
        try:
            if not text or 0 < float(text) < float("inf"):
                return float(text) if text else default
        except ValueError:
            pass
        return self.wrong(key, f"must be a number of seconds above 0, not '{text}'", default)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of scalars; a single one is a list of one."""
        value = self.value(key)
        items = value.items if isinstance(value, LocatedList) else () if value is None else (value,)
        texts = tuple(item.text for item in items if isinstance(item, LocatedText))
        return texts if len(texts) == len(items) else self.wrong(key, "must be a list of texts", ())

    def value(self, key: str) -> LocatedValue | None:
        return self.pairs[key].value if key in self else None

    def parts(self, key: str) -> dict[str, "Fields"]:
        """The mappings in a mapping: `data` and `derived`; an empty place is an empty mapping."""
        parts = {}
        for name, pair in self.mapping(key).items():
            value = pair.value
            if isinstance(value, LocatedText) and value.is_null:
                value = LocatedMapping({}, value.line)
            if isinstance(value, LocatedMapping):
                parts[name] = Fields(value, f"{key}.{name}", self.report)
            else:
                self.report(pair.line, f"{key}.{name} must be a mapping")
        return parts

    def mapping(self, key: str) -> dict[str, LocatedPair]:
        value = self.value(key)
        if value is None or isinstance(value, LocatedMapping):
            return dict(value.pairs) if value else {}
        return self.wrong(key, "must be a mapping", {})

    def mapping_of_texts(self, key: str) -> dict[str, str]:
        texts = {}
        for name, (line, value) in self.mapping(key).items():
            if isinstance(value, LocatedText):
                texts[name] = value.text
            else:
                self.report(line, f"{key}.{name} must be a text")
        return texts

    def wrong(self, key: str, why: str, default: T) -> T:
        self.report(self.line(key), f"{self.place + '.' if self.place else ''}{key} {why}")
        return default


def read_metrics(fields: Fields, output: Output) -> tuple[Metric, ...]:
    """The metrics of `data`; `output` has their units."""
    return tuple(_metric(name, part, output) for name, part in fields.parts("data").items())


def _metric(name: str, part: Fields, output: Output) -> Metric:
    part.refuse_unknown(METRIC_KEYS)
    regexp = part.text("regexp", None)
    try:
        re.compile(regexp or "")
    except (re.error, RecursionError, OverflowError) as error:
        part.wrong("regexp", f"'{regexp}' is no regular expression: {error}", None)
    return Metric(
        name,
        regexp,
        part.whole("skip", 0, least=0),
        _reduction(part),
        part.text("field", None),
        part.text("unit", find_unit(name, output)),
        part.flag("sorted_skip", False),
    )


def _reduction(part: Fields) -> str:
    kind = part.text("reduction_type", "mean")
    if is_reduction(kind):
        return kind
    known = [*REDUCTIONS, "p50", "p99"]
    hint = did_you_mean(kind, known) or f"; known: {', '.join(known)}"
    return part.wrong("reduction_type", f"'{kind}' is not known{hint}", "mean")


def read_derived(
    fields: Fields, measured: Sequence[Metric], row: Mapping[str, str], output: Output
) -> tuple[Derived, ...]:
    """The metrics of `derived`; each may use metrics, parameters and those before it."""
    names: dict[str, object] = dict.fromkeys([*row, *(metric.name for metric in measured)])
    found = []
    for name, part in fields.parts("derived").items():
        part.refuse_unknown(DERIVED_KEYS)
        expr = part.text("expr", "")
        try:
            expressions.check_expression(expr, names)
        except expressions.ExpressionError as error:
            line = part.line("expr") if "expr" in part else fields.line("derived")
            fields.report(line, f"derived.{name}: {error}")
        if name in names:
            part.report(fields.line("derived"), f"derived.{name} has the name of a metric or parameter")
        names[name] = None
        found.append(Derived(name, expr, _reduction(part), part.text("unit", find_unit(name, output))))
    return tuple(found)


def read_output(fields: Fields) -> Output:
    value = fields.value("output")
    if value is None:
        return ()
    if not isinstance(value, LocatedList):
        return fields.wrong("output", "must be a list of [label, metric]", ())
    pairs = []
    for item in value.items:
        texts = []
        if isinstance(item, LocatedList):
            texts = [part.text for part in item.items if isinstance(part, LocatedText)]
        elif isinstance(item, LocatedMapping) and len(item.pairs) == 1:
            ((label, (_, metric)),) = item.pairs.items()
            texts = [label, metric.text] if isinstance(metric, LocatedText) else []
        if len(texts) == 2:
            pairs.append((texts[0], texts[1]))
        else:
            fields.report(
                item.line, "output must be a list of [label, metric], such as [samples/sec, throughput]"
            )
    return tuple(pairs)


def find_unit(name: str, output: Output) -> str:
    """The unit that a metric's label tells: `samples/sec`, the ms of `latency(ms)`; none from `loss`."""
    for label, metric in output:
        if metric == name:
            inner = re.search(r"\(([^()]+)\)\s*$", label)
            return inner[1] if inner else label if "/" in label or label in UNITS else ""
    return ""


def read_parameters(value: LocatedValue | None, report: ReportProblem) -> list[ParameterRow]:
    """The parameter values of each variant, at least one row; problems are reported.

    A mapping of names gives every combination; its values may be comma strings or lists. A list gives the rows
    themselves: names first and then values, or a mapping a row.
    """
    if value is None:
        return [{}]
    if isinstance(value, LocatedMapping):
        return _combine(value, report)
    if isinstance(value, LocatedText) or not value.items:
        report(value.line, "parameters must be a mapping of names to values, or a list of rows")
        return [{}]
    if not isinstance(value.items[0], LocatedMapping):
        return _table(value, report) or [{}]
    rows: list[ParameterRow] = []
    for item in value.items:
        pairs = item.pairs if isinstance(item, LocatedMapping) else {}
        row = {name: pair.value.text for name, pair in pairs.items() if isinstance(pair.value, LocatedText)}
        if not row or len(row) != len(pairs) or (rows and set(row) != set(rows[0])):
            report(item.line, "each row of parameters must be a mapping of the same names to single values")
        rows.append(row)
    return rows


def _combine(value: LocatedMapping, report: ReportProblem) -> list[ParameterRow]:
    choices: dict[str, list[str]] = {}
    for name, (line, options) in value.pairs.items():
        choices[name] = _cells(options)
        if isinstance(options, LocatedMapping):  # unquoted {3, 4} is to YAML a mapping of 3 and 4 to nothing
            nothing = [isinstance(one, LocatedText) and one.is_null for _, one in options.pairs.values()]
            choices[name] = list(options.pairs) if all(nothing) else []
        if not choices[name] or not all(choices[name]):
            report(line, f"parameters.{name} must be values such as '1, 32' or [1, 32], none of them empty")
            return [{}]
    if math.prod(len(options) for options in choices.values()) > MOST_VARIANTS:
        report(
            value.line, f"parameters have more than {MOST_VARIANTS} combinations; list the rows that matter"
        )
        return [{}]
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _table(value: LocatedList, report: ReportProblem) -> list[ParameterRow]:
    """Names in the first row, values in the others."""
    cells = [_cells(item) for item in value.items]
    names = cells[0]
    if not all(names) or len(set(names)) != len(names) or len(cells) < 2:
        report(
            value.items[0].line, "parameters need a first row of different names, and rows of values after it"
        )
        return []
    for item, row in zip(value.items, cells, strict=True):
        if len(row) != len(names):
            report(item.line, f"this row of parameters has {len(row)} values for {len(names)} names")
    return [dict(zip(names, row, strict=False)) for row in cells[1:]]


def _cells(value: LocatedValue) -> list[str]:
    """The texts of a list, or of a comma string: `3, 4`, `[3, 4]` or `{3, 4}`."""
    if isinstance(value, LocatedList):
        return [item.text if isinstance(item, LocatedText) else "" for item in value.items]
    if not isinstance(value, LocatedText):
        return []
    text = value.text.strip()
    bare = text[1:-1] if text[:1] + text[-1:] in ("[]", "{}") else text
    return [part.strip() for part in bare.split(",")]
