"""Two sets of results side by side: for each variant and metric both medians, their ratio and a verdict.

Which direction is better comes from a metric's name and unit unless it is said. It reads samples and writes rows,
plain text cells and Markdown; it prints nothing.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from hotloop.bench.results import Sample
from hotloop.bench.statistics import FEWEST, THRESHOLD, Better, Verdict, bootstrap, verdict

TIME = r"(?:[mnuµ]?s|m?secs?|(?:micro|milli|nano)?seconds?|mins?|minutes?|h|hrs?|hours?|days?)"
RATE = re.compile(
    rf"(?:per|/)[ _]?(?:{TIME}|j|joules?|w|watts?)\b|throughput|flops|gbps|\bmfu\b|\bbandwidth\b|\befficiency\b",
    re.IGNORECASE,
)
TIMES = re.compile(rf"\b(?:{TIME}|compile|duration|latency|overhead|time)\b", re.IGNORECASE)
ERRORS = re.compile(
    r"\b(?:err|errors?|loss|mae|mse|nll|negative log.?likelihood|perplexity|rmse)\b", re.IGNORECASE
)
NEEDS = re.compile(r"\b(?:[kmgt]?i?b|bytes|memory|energy|k?j|joules?|k?w|k?wh|watts?|power)\b", re.IGNORECASE)
ANSWERS = re.compile(r"\b(?:accuracy|acceptance|auc|elbo|f1|likelihood|ess|samples|top)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Rules:
    """What to compare and how: metric names are globs, the first threshold whose glob fits counts."""

    metrics: Sequence[str] = ()
    lower: Sequence[str] = ()
    higher: Sequence[str] = ()
    threshold: float | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def wants(self, metric: str) -> bool:
        """Whether a metric is compared at all."""
        return not self.metrics or _fits(metric, self.metrics)

    def better(self, sample: Sample) -> Better:
        """The direction that is an improvement."""
        if _fits(sample.metric, self.lower):
            return "lower"
        return "higher" if _fits(sample.metric, self.higher) else direction(sample.metric, sample.unit)

    def limit(self, metric: str) -> float:
        """The share by which a metric may differ and still be the same."""
        if self.threshold is not None:
            return self.threshold
        for glob, value in self.thresholds.items():
            if fnmatchcase(metric, glob):
                return value
        return THRESHOLD


@dataclass(frozen=True)
class Row:
    """One variant's metric on both sides; a side that has none is missing."""

    variant: str
    metric: str
    unit: str
    better: Better
    a: float | None
    b: float | None
    repeats: tuple[int, int]
    verdict: Verdict | None

    @property
    def word(self) -> str:
        """FAST, SLOW, SAME, AMBIGUOUS, or MISSING where one side has no value."""
        return self.verdict.word if self.verdict else "MISSING"

    @property
    def reason(self) -> str:
        """Why there is no clear word."""
        if self.verdict:
            return self.verdict.reason
        return f"only in {'A' if self.a is not None else 'B'}"


def _fits(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def direction(metric: str, unit: str = "") -> Better:
    """Whether more or less of a metric is better: less of times, losses, errors, memory and energy.

    A unit says more than a name: memory_bandwidth in GB/s is a rate.
    """
    return "higher" if _kind(metric, unit, RATE, TIMES, ERRORS, NEEDS) in (None, RATE) else "lower"


def has_pace(metric: str, unit: str = "") -> bool:
    """Whether a machine that is slower for a while may change the metric: not what is learnt, nor what it needs."""
    return _kind(metric, unit, RATE, TIMES, ERRORS, NEEDS, ANSWERS) in (None, RATE, TIMES)


def _kind(metric: str, unit: str, *kinds: re.Pattern[str]) -> re.Pattern[str] | None:
    """The first of the kinds that the unit has a word of, or else the name."""
    texts = (unit, metric.replace("_", " "))
    return next((kind for text in texts for kind in kinds if kind.search(text)), None)


def compare(
    a: Mapping[tuple[str, str], Sample], b: Mapping[tuple[str, str], Sample], rules: Rules
) -> list[Row]:
    """A row for every variant and metric of either side, in A's order and then B's."""
    return [_row(a.get(key), b.get(key), rules) for key in dict.fromkeys([*a, *b]) if rules.wants(key[1])]


def _row(a: Sample | None, b: Sample | None, rules: Rules) -> Row:
    known = a or b
    assert known is not None
    better = rules.better(known)
    found = judged(a, b, better, rules.limit(known.metric)) if a and b else None
    a_middle, b_middle = (bootstrap(side.values).value if side else None for side in (a, b))
    repeats = (len(a.values) if a else 0, len(b.values) if b else 0)
    return Row(known.variant, known.metric, known.unit, better, a_middle, b_middle, repeats, found)


def judged(a: Sample, b: Sample, better: Better, threshold: float = THRESHOLD) -> Verdict:
    """The verdict, unless what the machine's own pace did meanwhile may explain the difference."""
    found = verdict(a.values, b.values, better, threshold)
    if found.word not in ("FAST", "SLOW") or found.low <= 0 or min(len(a.paces), len(b.paces)) < FEWEST:
        return found
    if not has_pace(a.metric, a.unit):
        return found
    machine = verdict(a.paces, b.paces, "higher", threshold)
    low, high = (found.low, found.high) if better == "higher" else (1 / found.high, 1 / found.low)
    beyond = low / machine.high > 1 if found.word == "FAST" else high / machine.low < 1
    if machine.word == "SAME" or (machine.low > 0 and beyond):
        return found
    told = f"the machine itself was at {machine.ratio:.2f} of its pace: measure both again, taking turns"
    return replace(found, word="AMBIGUOUS", reason=told)


COLUMNS = ("variant", "metric", "better", "A", "B", "B/A", "interval", "n", "verdict", "because")


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts under COLUMNS."""
    unit = f" {row.unit}" if row.unit else ""
    sides = ("–" if side is None else f"{side:.5g}{unit}" for side in (row.a, row.b))
    found = row.verdict
    clear = found is not None and abs(found.low) != float("inf")
    ratio = f"{found.ratio:.4f}" if found else "–"
    interval = f"{found.low:.4f} … {found.high:.4f}" if found and clear else "–"
    counts = "/".join(map(str, row.repeats))
    return (row.variant, row.metric, row.better, *sides, ratio, interval, counts, row.word, row.reason)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""

    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    rule = "|" + "|".join("---:" if name in ("A", "B", "B/A") else "---" for name in COLUMNS) + "|"
    return "\n".join([line(COLUMNS), rule, *(line(cells(row)) for row in rows)])
