"""The `data`, `derived` and `output` of an entry: metrics, what is computed from them, and their units."""

import re
from collections.abc import Mapping, Sequence

from hotloop.bench import expressions, reductions
from hotloop.bench.model import Derived, Metric
from hotloop.bench.spec_fields import Fields
from hotloop.bench.spec_yaml import Items, Pairs, Text, Value
from hotloop.options import did_you_mean

METRIC_KEYS = ("regexp", "skip", "reduction_type", "field", "unit", "sorted_skip")
DERIVED_KEYS = ("expr", "reduction_type", "unit")
UNITS = (
    "s",
    "ms",
    "us",
    "sec",
    "secs",
    "seconds",
    "minutes",
    "hours",
    "%",
    "percent",
    "nats",
    "TFLOPs",
    "GB",
)
Output = tuple[tuple[str, str], ...]


def metrics(fields: Fields, output: Output) -> tuple[Metric, ...]:
    """The metrics of `data`."""
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
        part.text("unit", unit_of(name, output)),
        part.flag("sorted_skip", False),
    )


def _reduction(part: Fields) -> str:
    kind = part.text("reduction_type", "mean")
    if reductions.known(kind):
        return kind
    known = [*reductions.REDUCTIONS, "p50", "p99"]
    hint = did_you_mean(kind, known) or f"; known: {', '.join(known)}"
    return part.wrong("reduction_type", f"'{kind}' is not known{hint}", "mean")


def derived(
    fields: Fields, measured: Sequence[Metric], row: Mapping[str, str], output: Output
) -> tuple[Derived, ...]:
    """The metrics of `derived`; each may use metrics, parameters and those before it."""
    names: dict[str, object] = dict.fromkeys([*row, *(metric.name for metric in measured)])
    found = []
    for name, part in fields.parts("derived").items():
        part.refuse_unknown(DERIVED_KEYS)
        expr = part.text("expr", "")
        try:
            expressions.check(expr, names)
        except expressions.ExpressionError as error:
            fields.report(
                part.line("expr") if "expr" in part else fields.line("derived"), f"derived.{name}: {error}"
            )
        if name in names:
            part.report(fields.line("derived"), f"derived.{name} has the name of a metric or parameter")
        names[name] = None
        found.append(Derived(name, expr, _reduction(part), part.text("unit", unit_of(name, output))))
    return tuple(found)


def output_of(fields: Fields) -> Output:
    """The (label, metric) pairs of `output`."""
    value = fields.value("output")
    if value is None:
        return ()
    if not isinstance(value, Items):
        return fields.wrong("output", "must be a list of [label, metric]", ())
    pairs = [(item, _pair(item)) for item in value.items]
    for item, pair in pairs:
        if pair is None:
            fields.report(
                item.line, "output must be a list of [label, metric], such as [samples/sec, throughput]"
            )
    return tuple(pair for _, pair in pairs if pair is not None)


def _pair(item: Value) -> tuple[str, str] | None:
    if isinstance(item, Items):
        texts = [part.text for part in item.items if isinstance(part, Text)]
    elif isinstance(item, Pairs) and len(item.pairs) == 1:
        texts = [
            text
            for key, (_, part) in item.pairs.items()
            if isinstance(part, Text)
            for text in (key, part.text)
        ]
    else:
        return None
    return (texts[0], texts[1]) if len(texts) == 2 else None


def unit_of(name: str, output: Output) -> str:
    """The unit that a metric's label tells: `samples/sec`, the ms of `latency(ms)`; none from `loss`."""
    for label, metric in output:
        if metric == name:
            inner = re.search(r"\(([^()]+)\)\s*$", label)
            return inner[1] if inner else label if "/" in label or label in UNITS else ""
    return ""
