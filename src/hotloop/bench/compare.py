"""Two sets of results, or a file of baselines (the last accepted values by device, kept under version control) and a
set, side by side: for each variant and metric both medians, their ratio and a verdict, FAST, SLOW, SAME or AMBIGUOUS.
docs/comparing.md says how often each word is right.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from hotloop.bench.benchmark import count_of
from hotloop.bench.page import write_text
from hotloop.bench.record import MetricSample
from hotloop.bench.statistics import Interval, finite, median, ratio_in_turns, ratio_interval
from hotloop.errors import DataError
from hotloop.options.files import load_json

Samples = Mapping[tuple[str, str], MetricSample]
COLUMNS = ("variant", "metric", "better", "A", "B", "B/A", "interval", "n", "verdict", "because")
Better = Literal["higher", "lower"]
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
QUALITIES = re.compile(r"\b(?:accuracy|acceptance|auc|elbo|f1|likelihood|ess|samples|top)\b", re.IGNORECASE)
FEWEST = 3  # repeats of a side below which there is no verdict
LEVEL = 0.98  # of the ratio's interval: a program against itself is FAST or SLOW in at most 2 of 100
OFF_LEVEL = 0.95  # of the interval of the machine's own pace; it is off where that does not hold 1
GAIN = 2.0  # a program may slow down by this power of the pace: other work takes caches and memory, too
THRESHOLD = 0.02


@dataclass(frozen=True)
class Verdict:
    """B against A: the word, B as a multiple of A with its interval, and why if it is unclear."""

    word: str
    ratio: float
    low: float
    high: float
    reason: str = ""
    pairs: int = 0
    """Pairs of runs in turns that it comes from; 0 for runs that had nothing to do with each other."""


def judge(a: MetricSample, b: MetricSample, better: Better, threshold: float = THRESHOLD) -> Verdict:
    """The verdict on B against A: from pairs where they ran in turns, else from all runs and the machine's pace.

    FAST and SLOW: the interval of the medians' ratio does not hold 1, and the ratio is beyond the threshold; SAME: the
    whole interval is within it. A below zero counts by its size, so that more is above 1: from -100 to -95 is 1.05.
    """
    if a.turns and a.turns == b.turns:
        return _judge_turns(a, b, better, threshold)
    old, new = finite(a.values), finite(b.values)
    fewest = min(old.size, new.size)
    ratio = ratio_interval(old, new, LEVEL) if fewest else Interval(-math.inf, math.nan, math.inf)
    if fewest < FEWEST:
        few = f"{old.size} and {new.size} repeats; {FEWEST} of each are the fewest for a verdict"
        return Verdict("AMBIGUOUS", ratio.value, -math.inf, math.inf, few)
    found = _verdict_of(ratio, better, threshold)
    # A processor that is slower for a while changes times and rates: not what is learnt, nor what it needs.
    kinds = [_kind(side.metric, side.unit, RATE, TIMES, ERRORS, NEEDS, QUALITIES) for side in (a, b)]
    unlike = a.best_paces != b.best_paces or a.accelerated or b.accelerated
    if unlike or min(len(a.paces), len(b.paces)) < FEWEST or not {None, RATE, TIMES}.issuperset(kinds):
        return found
    machine = ratio_interval(a.paces, b.paces, OFF_LEVEL)  # its pace at B as a multiple of that at A
    if machine.low <= 1 <= machine.high or found.word == "AMBIGUOUS":
        return found
    if found.word == "SAME":  # stands if the machine was off by little, others do beyond what that explains
        stands = abs(machine.value - 1) <= threshold
    else:
        low, high = ratio.low, ratio.high
        if better == "lower" and low > 0:
            low, high = 1 / high, 1 / low
        fastest, slowest = max(machine.high, 1.0) ** GAIN, min(machine.low, 1.0) ** GAIN
        stands = ratio.low <= 0 or (low > fastest if found.word == "FAST" else high < slowest)
    if stands:
        return found
    why = f"the machine itself was at {machine.value:.2f} of its pace, which may be why; measure in turns (--ab)"
    return replace(found, word="AMBIGUOUS", reason=why)


def _judge_turns(a: MetricSample, b: MetricSample, better: Better, threshold: float) -> Verdict:
    places = {number: place for place, number in enumerate(b.rounds)}
    both = [(place, places[number]) for place, number in enumerate(a.rounds) if number in places]
    both.sort(key=lambda pair: a.starts[pair[0]])
    a_values, b_values = [a.values[place] for place, _ in both], [b.values[place] for _, place in both]
    if len(both) < FEWEST:
        middle = ratio_interval(a_values, b_values, LEVEL).value if both else math.nan
        few = f"{count_of(len(both), 'pair')}; {FEWEST} are the fewest for a verdict"
        return Verdict("AMBIGUOUS", middle, -math.inf, math.inf, few, len(both))
    a_starts, b_starts = [a.starts[place] for place, _ in both], [b.starts[place] for _, place in both]
    found = ratio_in_turns(a_values, b_values, a_starts, b_starts, LEVEL)
    return replace(_verdict_of(found, better, threshold), pairs=len(both))


def _verdict_of(found: Interval, better: Better, threshold: float) -> Verdict:
    beyond = abs(found.value - 1) > threshold
    word, reason = "AMBIGUOUS", ""
    if not math.isfinite(found.value):
        reason = "A's median is 0: no ratio to it"
    elif beyond and not found.low <= 1 <= found.high:
        word = "FAST" if (found.value > 1) == (better == "higher") else "SLOW"
    elif found.low >= 1 - threshold and found.high <= 1 + threshold:
        word = "SAME"
    elif beyond:
        reason = "the interval holds 1"
    else:
        reason = f"the ratio is within 1 ± {threshold:g}, its interval is not"
    return Verdict(word, found.value, found.low, found.high, reason)


def better_direction(metric: str, unit: str = "") -> Better:
    """Less of times, losses, errors, memory and energy; a unit says more than a name: memory in GB/s is a rate."""
    return "higher" if _kind(metric, unit, RATE, TIMES, ERRORS, NEEDS) in (None, RATE) else "lower"


def _kind(metric: str, unit: str, *kinds: re.Pattern[str]) -> re.Pattern[str] | None:
    """The first of the kinds that the unit has a word of, or else the name."""
    texts = (unit, metric.replace("_", " "))
    return next((kind for text in texts for kind in kinds if kind.search(text)), None)


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
    word: str
    """FAST, SLOW, SAME, AMBIGUOUS, or MISSING where one side has no value."""
    reason: str


def _fits(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def compare_samples(a: Samples, b: Samples, rules: CompareRules) -> list[MetricComparison]:
    """A row for every variant and metric of either side, in A's order and then B's."""
    rows = []
    for key in dict.fromkeys([*a, *b]):
        old, new, known = a.get(key), b.get(key), a.get(key) or b[key]
        if not rules.wants(known.metric):
            continue
        better, name, verdict = rules.better(known), known.variant, None
        word, reason = "MISSING", f"only in {'A' if old else 'B'}"
        if old and new:
            name = name if old.variant == new.variant else f"{old.variant} → {new.variant}"
            verdict = judge(old, new, better, rules.limit(known.metric))
            word, reason = verdict.word, verdict.reason
        a_middle, b_middle = (median(side.values) if side else None for side in (old, new))
        repeats = (len(old.values) if old else 0, len(new.values) if new else 0)
        sides = (a_middle, b_middle, repeats, verdict, word, reason)
        rows.append(MetricComparison(name, known.metric, known.unit, better, *sides))
    return rows


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
    try:
        said = load_json(Path(path))
        thresholds = {metric: float(share) for metric, share in said.get("thresholds", {}).items()}
        for share in thresholds.values():
            if not 0 <= share < math.inf:
                raise ValueError(f"a threshold of {share:g}: give a share of 0 or more")
        devices: dict[str, dict[tuple[str, str], MetricSample]] = {}
        for device, variants in said["devices"].items():
            found = devices[device] = {}
            for variant, metrics in variants.items():
                for metric, one in metrics.items():
                    known = (one["benchmark"], variant, metric, one.get("unit", ""), one.get("params", {}))
                    values, paces = tuple(map(float, one["values"])), tuple(map(float, one.get("paces", ())))
                    found[variant, metric] = MetricSample(*known, values, paces=paces)
    except OSError as error:
        why = f"cannot be read ({error.strerror}); make it"
        raise DataError(f"{path}: {why} with --update-baseline") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        why = f"is no file of baselines ({error}); make one"
        raise DataError(f"{path}: {why} with --update-baseline") from error
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
