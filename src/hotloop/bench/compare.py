"""Two sets of results, or a file of baselines (the last accepted values by device, kept under version control) and a
set, side by side: for each variant and metric both medians, their ratio and a verdict.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hotloop.bench.benchmark import count_of
from hotloop.bench.page import write_text
from hotloop.bench.results import MetricSample
from hotloop.bench.statistics import median
from hotloop.bench.verdict import THRESHOLD, Better, Verdict, better_direction, judge
from hotloop.errors import DataError
from hotloop.options.files import load_json

Samples = Mapping[tuple[str, str], MetricSample]
COLUMNS = ("variant", "metric", "better", "A", "B", "B/A", "interval", "n", "verdict", "because")


@dataclass(frozen=True)
class CompareRules:
    """What to compare and how: metric names are globs, the first threshold whose glob fits counts."""

    metrics: Sequence[str] = ()
    lower: Sequence[str] = ()
    higher: Sequence[str] = ()
    threshold: float | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def wants(self, metric: str) -> bool:
        return not self.metrics or _fits(metric, self.metrics)

    def better(self, sample: MetricSample) -> Better:
        if _fits(sample.metric, self.lower):
            return "lower"
        return "higher" if _fits(sample.metric, self.higher) else better_direction(sample.metric, sample.unit)

    def limit(self, metric: str) -> float:
        """The share by which a metric may differ and still be the same."""
        if self.threshold is not None:
            return self.threshold
        return next((share for glob, share in self.thresholds.items() if _fits(metric, [glob])), THRESHOLD)


@dataclass(frozen=True)
class MetricComparison:
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
        if self.verdict:
            return self.verdict.reason
        return f"only in {'A' if self.a is not None else 'B'}"


def _fits(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def compare_samples(a: Samples, b: Samples, rules: CompareRules) -> list[MetricComparison]:
    """A row for every variant and metric of either side, in A's order and then B's."""
    return [_row(a.get(key), b.get(key), rules) for key in dict.fromkeys([*a, *b]) if rules.wants(key[1])]


def rename_partners(found: Samples, partners: Mapping[str, str]) -> Samples:
    """B's samples under the names of the variants of A that they ran in turns with."""
    return {(partners.get(variant, variant), metric): sample for (variant, metric), sample in found.items()}


def _row(a: MetricSample | None, b: MetricSample | None, rules: CompareRules) -> MetricComparison:
    known = a or b
    assert known is not None
    better = rules.better(known)
    found = judge(a, b, better, rules.limit(known.metric)) if a and b else None
    a_middle, b_middle = (median(side.values) if side else None for side in (a, b))
    repeats = (len(a.values) if a else 0, len(b.values) if b else 0)
    name = f"{a.variant} → {b.variant}" if a and b and a.variant != b.variant else known.variant
    return MetricComparison(name, known.metric, known.unit, better, a_middle, b_middle, repeats, found)


def comparison_cells(row: MetricComparison) -> tuple[str, ...]:
    unit = f" {row.unit}" if row.unit else ""
    sides = ("–" if side is None else f"{side:.5g}{unit}" for side in (row.a, row.b))
    found = row.verdict
    ratio = f"{found.ratio:.4f}" if found else "–"
    interval = f"{found.low:.4f} … {found.high:.4f}" if found and abs(found.low) != math.inf else "–"
    counts = count_of(found.pairs, "pair") if found and found.pairs else "/".join(map(str, row.repeats))
    return (row.variant, row.metric, row.better, *sides, ratio, interval, counts, row.word, row.reason)


def format_markdown(rows: Sequence[MetricComparison]) -> str:
    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    rule = "|" + "|".join("---:" if name in ("A", "B", "B/A") else "---" for name in COLUMNS) + "|"
    return "\n".join([line(COLUMNS), rule, *(line(comparison_cells(row)) for row in rows)])


@dataclass(frozen=True)
class BaselineFile:
    """The file's contents: samples by device, and the share by which each metric may differ (globs)."""

    devices: Mapping[str, Samples] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)


def load_baselines(path: str | Path) -> BaselineFile:
    """Read the file, or a DataError that says what is wrong with it."""
    try:
        said = load_json(Path(path))
        thresholds = {metric: float(share) for metric, share in said.get("thresholds", {}).items()}
        for share in thresholds.values():
            if not 0 <= share < math.inf:
                raise ValueError(f"a threshold of {share:g}: give a share of 0 or more")
        devices = {
            device: {
                (variant, metric): MetricSample(
                    one["benchmark"],
                    variant,
                    metric,
                    one.get("unit", ""),
                    one.get("params", {}),
                    tuple(float(value) for value in one["values"]),
                    paces=tuple(float(pace) for pace in one.get("paces", ())),
                )
                for variant, metrics in variants.items()
                for metric, one in metrics.items()
            }
            for device, variants in said["devices"].items()
        }
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); make it with --update-baseline"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path}: is no file of baselines ({error}); make one with --update-baseline"
        ) from error
    return BaselineFile(devices, thresholds)


def save_baselines(path: str | Path, baselines: BaselineFile) -> None:
    devices: dict[str, Any] = {}
    for device, found in baselines.devices.items():
        variants = devices.setdefault(device, {})
        for (variant, metric), sample in found.items():
            variants.setdefault(variant, {})[metric] = {
                "benchmark": sample.benchmark,
                "unit": sample.unit,
                "params": dict(sample.params),
                "values": list(sample.values),
                "paces": [] if sample.best_paces else list(sample.paces),
            }
    text = json.dumps({"thresholds": dict(baselines.thresholds), "devices": devices}, indent=1)
    write_text(path, text + "\n")
