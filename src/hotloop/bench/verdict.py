"""The verdict between two samples: FAST, SLOW, SAME or AMBIGUOUS. The machine's own pace can only take one away, and
only where it was demonstrably off between the sides. docs/comparing.md says how often each word is right.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hotloop.bench.benchmark import count_of
from hotloop.bench.results import MetricSample
from hotloop.bench.statistics import Interval, finite, ratio_in_turns, ratio_interval

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
ANSWERS = re.compile(r"\b(?:accuracy|acceptance|auc|elbo|f1|likelihood|ess|samples|top)\b", re.IGNORECASE)
Word = Literal["FAST", "SLOW", "SAME", "AMBIGUOUS"]
FEWEST = 3  # repeats of a side below which there is no verdict
LEVEL = 0.98  # of the ratio's interval: a program against itself is FAST or SLOW in at most 2 of 100
OFF_LEVEL = 0.95  # of the interval of the machine's own pace; it is off where that does not hold 1
GAIN = 2.0  # a program may slow down by this power of the pace: other work takes caches and memory, too
THRESHOLD = 0.02


@dataclass(frozen=True)
class Verdict:
    """B against A: the word, B as a multiple of A with its interval, and why if it is unclear."""

    word: Word
    ratio: float
    low: float
    high: float
    reason: str = ""
    pairs: int = 0
    """Pairs of runs in turns that it comes from; 0 for runs that had nothing to do with each other."""


def judge(a: MetricSample, b: MetricSample, better: Better, threshold: float = THRESHOLD) -> Verdict:
    """The verdict on B against A: from pairs where they ran in turns, else from all runs and the machine's pace."""
    if a.turns and a.turns == b.turns:
        return _judge_turns(a, b, better, threshold)
    found = judge_values(a.values, b.values, better, threshold)
    few = min(len(a.paces), len(b.paces)) < FEWEST
    unlike = a.best_paces != b.best_paces or a.accelerated or b.accelerated
    if few or unlike or not all(follows_processor(side.metric, side.unit) for side in (a, b)):
        return found
    machine = ratio_interval(a.paces, b.paces, OFF_LEVEL)  # its pace at B as a multiple of that at A
    was_off = not machine.low <= 1 <= machine.high
    if not was_off or found.word == "AMBIGUOUS" or _stands(found, machine, better, threshold):
        return found
    why = f"the machine itself was at {machine.value:.2f} of its pace, which may be why; measure in turns (--ab)"
    return replace(found, word="AMBIGUOUS", reason=why)


def judge_values(
    a_values: Sequence[float],
    b_values: Sequence[float],
    better: Better = "higher",
    threshold: float = THRESHOLD,
) -> Verdict:
    """B against A by the ratio of medians.

    FAST and SLOW: the interval does not hold 1, and the ratio is beyond the threshold; SAME: the whole interval is
    within it. A below zero counts by its size, so that a ratio above 1 means more in any case: from -100 to -95 is
    1.05.
    """
    a, b = finite(a_values), finite(b_values)
    fewest = min(a.size, b.size)
    found = ratio_interval(a, b, LEVEL) if fewest else Interval(-math.inf, math.nan, math.inf)
    if fewest < FEWEST:
        few = f"{a.size} and {b.size} repeats; {FEWEST} of each are the fewest for a verdict"
        return Verdict("AMBIGUOUS", found.value, -math.inf, math.inf, few)
    return _verdict_of(found, better, threshold)


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


def _stands(found: Verdict, machine: Interval, better: Better, threshold: float) -> bool:
    """Whether a verdict holds although the machine was off: SAME if by little, others beyond what it explains."""
    if found.word == "SAME":
        return abs(machine.value - 1) <= threshold
    if found.low <= 0:
        return True
    low, high = (found.low, found.high) if better == "higher" else (1 / found.high, 1 / found.low)
    if found.word == "FAST":
        return low > math.pow(max(machine.high, 1.0), GAIN)
    return high < math.pow(min(machine.low, 1.0), GAIN)


def _verdict_of(found: Interval, better: Better, threshold: float) -> Verdict:
    beyond = abs(found.value - 1) > threshold
    word: Word = "AMBIGUOUS"
    reason = ""
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
    """Whether more or less of a metric is better: less of times, losses, errors, memory and energy.

    A unit says more than a name: memory_bandwidth in GB/s is a rate.
    """
    return "higher" if _kind(metric, unit, RATE, TIMES, ERRORS, NEEDS) in (None, RATE) else "lower"


def follows_processor(metric: str, unit: str = "") -> bool:
    """Whether a processor that is slower for a while may change the metric: not what is learnt, nor what it needs."""
    return _kind(metric, unit, RATE, TIMES, ERRORS, NEEDS, ANSWERS) in (None, RATE, TIMES)


def _kind(metric: str, unit: str, *kinds: re.Pattern[str]) -> re.Pattern[str] | None:
    """The first of the kinds that the unit has a word of, or else the name."""
    texts = (unit, metric.replace("_", " "))
    return next((kind for text in texts for kind in kinds if kind.search(text)), None)
