"""How sure a number is: intervals of a median or mean from few repeats, and the verdict between two sides.

Every value is one whole run of a program. A percentile bootstrap of three to ten values is too narrow, so an
interval is also at least as wide as the bootstrap's own standard error times the quantile of Student's t. It knows
no benchmark.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Statistic = Literal["median", "mean"]
Better = Literal["higher", "lower"]

FEWEST = 3  # repeats of a side below which there is no verdict
LEVEL = 0.95
RESAMPLES = 2000
THRESHOLD = 0.02

OF: dict[Statistic, Callable[..., Any]] = {"median": np.median, "mean": np.mean}


@dataclass(frozen=True)
class Interval:
    """A statistic and the ends between which it lies with the level asked for; as wide as it is unsure."""

    low: float
    value: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """B against A: the word, B's statistic as a multiple of A's with its interval, and why if it is unclear."""

    word: Literal["FAST", "SLOW", "SAME", "AMBIGUOUS"]
    ratio: float
    low: float
    high: float
    reason: str = ""


def bootstrap(values: Sequence[float], statistic: Statistic = "median", level: float = LEVEL) -> Interval:
    """The interval of a median or mean of repeats; infinitely wide for fewer than two."""
    found = _finite(values)
    value = float(OF[statistic](found)) if found.size else math.nan
    if found.size < 2:
        return Interval(-math.inf, value, math.inf)
    draws = _resampled(found, statistic, np.random.default_rng(0))
    low, high = _ends(draws, value, float(draws.std()), found.size - 1, level)
    # Times and rates that are all above zero have no median below it, however few they are.
    return Interval(max(low, 0.0) if found.min() > 0 else low, value, high)


def spread(values: Sequence[float]) -> float:
    """The repeats' standard deviation as a share of their mean; NaN for fewer than two."""
    found = _finite(values)
    if found.size < 2 or found.mean() == 0:
        return math.nan
    return float(found.std(ddof=1) / abs(found.mean()))


def verdict(
    a_values: Sequence[float],
    b_values: Sequence[float],
    better: Better = "higher",
    threshold: float = THRESHOLD,
    level: float = LEVEL,
) -> Verdict:
    """B against A by the ratio of medians: a word other than AMBIGUOUS only where the whole interval agrees.

    FAST and SLOW need it wholly beyond the threshold, SAME wholly within. A below zero counts by its size, so that
    a ratio above 1 means more in any case: from -100 to -95 is 1.05.
    """
    a, b = _finite(a_values), _finite(b_values)
    if min(a.size, b.size) < FEWEST:
        value = _ratio(a, b) if min(a.size, b.size) else math.nan
        few = f"{a.size} and {b.size} repeats; {FEWEST} of each are the fewest for a verdict"
        return Verdict("AMBIGUOUS", value, -math.inf, math.inf, few)
    found = ratio(a, b, level)
    if not math.isfinite(found.value):
        return Verdict("AMBIGUOUS", found.value, found.low, found.high, "A's median is 0: no ratio to it")
    word, reason = _word(found, better, threshold)
    return Verdict(word, found.value, found.low, found.high, reason)


def ratio(a: Array, b: Array, level: float = LEVEL) -> Interval:
    """The ratio of B's median to A's and its interval, from resamples of both sides."""
    value = _ratio(a, b)
    if not math.isfinite(value):
        return Interval(-math.inf, value, math.inf)
    positive = bool(a.min() > 0 and b.min() > 0)
    # A ratio's noise is symmetric on the logarithmic scale, which only positive numbers have.
    size = abs(float(np.median(a))) or 1.0
    scaled = (np.log(a), np.log(b)) if positive else (a / size, b / size)
    generator = np.random.default_rng(0)
    draws_a, draws_b = (_resampled(side, "median", generator) for side in scaled)
    middle = float(np.log(value)) if positive else value - 1
    freedom = _freedom(float(draws_a.var()), a.size, float(draws_b.var()), b.size)
    draws = draws_b - draws_a
    low, high = _ends(draws, middle, float(draws.std()), freedom, level)
    if positive:
        return Interval(math.exp(low), value, math.exp(high))
    return Interval(1 + low, value, 1 + high)


def _word(
    found: Interval, better: Better, threshold: float
) -> tuple[Literal["FAST", "SLOW", "SAME", "AMBIGUOUS"], str]:
    more, less = found.low > 1 + threshold, found.high < 1 - threshold
    if more or less:
        return ("FAST" if more == (better == "higher") else "SLOW"), ""
    if found.low >= 1 - threshold and found.high <= 1 + threshold:
        return "SAME", ""
    return "AMBIGUOUS", f"the interval crosses 1 ± {threshold:g}"


def _finite(values: Sequence[float] | Array) -> Array:
    found = np.asarray(values, np.float64)
    return found[np.isfinite(found)]


def _ratio(a: Array, b: Array) -> float:
    middle, other = float(np.median(a)), float(np.median(b))
    if middle == 0:
        return math.nan if a.any() or b.any() else 1.0
    return 1 + (other - middle) / abs(middle)


def _resampled(values: Array, statistic: Statistic, generator: np.random.Generator) -> Array:
    picks = generator.integers(0, values.size, (RESAMPLES, values.size))
    drawn: Array = OF[statistic](values[picks], axis=1)
    return drawn


def _ends(draws: Array, value: float, error: float, freedom: float, level: float) -> tuple[float, float]:
    """The wider of the percentile and the t interval, on each side."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    half = student((1 + level) / 2, round(freedom, 1)) * error
    return min(float(low), value - half), max(float(high), value + half)


def _freedom(a: float, a_count: int, b: float, b_count: int) -> float:
    """Welch's degrees of freedom of a difference of two sides with their own variances."""
    if a + b == 0:
        return float(min(a_count, b_count) - 1)
    return (a + b) ** 2 / (a * a / (a_count - 1) + b * b / (b_count - 1))


@lru_cache
def student(share: float, freedom: float) -> float:
    """The quantile of Student's t for a share above one half, by integrating its density in the angle."""
    angles = np.linspace(0, math.pi / 2, 20001)
    density = np.cos(angles) ** (freedom - 1)
    total = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = float(np.interp(2 * share - 1, total / total[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)
