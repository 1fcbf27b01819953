"""The verdict between two samples: FAST, SLOW, SAME or AMBIGUOUS, from their values alone.

How fast the machine itself was can only take a verdict away, and only where it was demonstrably off between the two
sides: readings that are merely noisy change nothing. docs/comparing.md says how often each word is right, and
`benchmarks/verdicts.py` counts it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hotloop.bench.kinds import Better, follows_processor
from hotloop.bench.ratios import ratio
from hotloop.bench.results import Sample
from hotloop.bench.statistics import Interval, finite
from hotloop.bench.turns import ratio_in_turns

Word = Literal["FAST", "SLOW", "SAME", "AMBIGUOUS"]

FEWEST = 3  # repeats of a side below which there is no verdict
LEVEL = (
    0.98  # of the ratio's interval: a program against itself is FAST or SLOW in at most 2 of 100 comparisons
)
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


def judge(a: Sample, b: Sample, better: Better, threshold: float = THRESHOLD) -> Verdict:
    """The verdict on B against A: from pairs where they ran in turns, else from all runs and the machine's pace."""
    if a.turns and a.turns == b.turns:
        return _judge_turns(a, b, better, threshold)
    found = verdict(a.values, b.values, better, threshold)
    machine = machine_between(a, b)
    if machine is None or found.word == "AMBIGUOUS" or _stands(found, machine, better, threshold):
        return found
    why = f"the machine itself was at {machine.value:.2f} of its pace, which may be why; measure in turns (--ab)"
    return replace(found, word="AMBIGUOUS", reason=why)


def verdict(
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
    found = ratio(a, b, LEVEL) if fewest else Interval(-math.inf, math.nan, math.inf)
    if fewest < FEWEST:
        few = f"{a.size} and {b.size} repeats; {FEWEST} of each are the fewest for a verdict"
        return Verdict("AMBIGUOUS", found.value, -math.inf, math.inf, few)
    return _worded(found, better, threshold)


def _judge_turns(a: Sample, b: Sample, better: Better, threshold: float) -> Verdict:
    places = {number: place for place, number in enumerate(b.rounds)}
    both = [(place, places[number]) for place, number in enumerate(a.rounds) if number in places]
    if len(both) < FEWEST:
        middle = (
            ratio([a.values[i] for i, _ in both], [b.values[j] for _, j in both], LEVEL).value
            if both
            else math.nan
        )
        few = f"{len(both)} pairs; {FEWEST} are the fewest for a verdict"
        return Verdict("AMBIGUOUS", middle, -math.inf, math.inf, few, len(both))
    both.sort(key=lambda pair: a.starts[pair[0]])
    first, second = zip(*both, strict=True)
    found = ratio_in_turns(
        [a.values[place] for place in first],
        [b.values[place] for place in second],
        [a.starts[place] for place in first],
        [b.starts[place] for place in second],
        LEVEL,
    )
    return replace(_worded(found, better, threshold), pairs=len(both))


def machine_between(a: Sample, b: Sample) -> Interval | None:
    """The machine's pace at B as a multiple of that at A, where it was demonstrably not the same; else None."""
    if min(len(a.paces), len(b.paces)) < FEWEST or not (_has_pace(a) and _has_pace(b)):
        return None
    if a.best_paces != b.best_paces:
        return None
    found = ratio(a.paces, b.paces, OFF_LEVEL)
    return None if found.low <= 1 <= found.high else found


def _has_pace(sample: Sample) -> bool:
    return not sample.accelerated and follows_processor(sample.metric, sample.unit)


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


def _worded(found: Interval, better: Better, threshold: float) -> Verdict:
    if not math.isfinite(found.value):
        return Verdict("AMBIGUOUS", found.value, found.low, found.high, "A's median is 0: no ratio to it")
    word, reason = _word(found, better, threshold)
    return Verdict(word, found.value, found.low, found.high, reason)


def _word(found: Interval, better: Better, threshold: float) -> tuple[Word, str]:
    beyond = abs(found.value - 1) > threshold
    if beyond and not found.low <= 1 <= found.high:
        return ("FAST" if (found.value > 1) == (better == "higher") else "SLOW"), ""
    if found.low >= 1 - threshold and found.high <= 1 + threshold:
        return "SAME", ""
    if beyond:
        return "AMBIGUOUS", "the interval holds 1"
    return "AMBIGUOUS", f"the ratio is within 1 ± {threshold:g}, its interval is not"
