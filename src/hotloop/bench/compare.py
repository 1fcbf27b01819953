"""Two sets of results side by side: for each variant and metric both medians, their ratio and a verdict.

Which direction is better comes from a metric's name and unit unless it is said. It reads samples and writes rows,
plain text cells and Markdown; it prints nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hotloop.bench.kinds import Better, direction
from hotloop.bench.results import Sample
from hotloop.bench.statistics import bootstrap
from hotloop.bench.verdict import THRESHOLD, Verdict, judge


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


def compare(
    a: Mapping[tuple[str, str], Sample], b: Mapping[tuple[str, str], Sample], rules: Rules
) -> list[Row]:
    """A row for every variant and metric of either side, in A's order and then B's."""
    return [_row(a.get(key), b.get(key), rules) for key in dict.fromkeys([*a, *b]) if rules.wants(key[1])]


def beside(
    found: Mapping[tuple[str, str], Sample], partners: Mapping[str, str]
) -> dict[tuple[str, str], Sample]:
    """B's samples under the names of the variants of A that they ran in turns with."""
    return {(partners.get(variant, variant), metric): sample for (variant, metric), sample in found.items()}


def _row(a: Sample | None, b: Sample | None, rules: Rules) -> Row:
    known = a or b
    assert known is not None
    better = rules.better(known)
    found = judge(a, b, better, rules.limit(known.metric)) if a and b else None
    a_middle, b_middle = (bootstrap(side.values).value if side else None for side in (a, b))
    repeats = (len(a.values) if a else 0, len(b.values) if b else 0)
    name = f"{a.variant} → {b.variant}" if a and b and a.variant != b.variant else known.variant
    return Row(name, known.metric, known.unit, better, a_middle, b_middle, repeats, found)


COLUMNS = ("variant", "metric", "better", "A", "B", "B/A", "interval", "n", "verdict", "because")


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts under COLUMNS."""
    unit = f" {row.unit}" if row.unit else ""
    sides = ("–" if side is None else f"{side:.5g}{unit}" for side in (row.a, row.b))
    found = row.verdict
    clear = found is not None and abs(found.low) != float("inf")
    ratio = f"{found.ratio:.4f}" if found else "–"
    interval = f"{found.low:.4f} … {found.high:.4f}" if found and clear else "–"
    counts = f"{found.pairs} pairs" if found and found.pairs else "/".join(map(str, row.repeats))
    return (row.variant, row.metric, row.better, *sides, ratio, interval, counts, row.word, row.reason)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""

    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    rule = "|" + "|".join("---:" if name in ("A", "B", "B/A") else "---" for name in COLUMNS) + "|"
    return "\n".join([line(COLUMNS), rule, *(line(cells(row)) for row in rows)])
