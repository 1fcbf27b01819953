"""How sure a number is: the interval of a median or mean from few repeats, and their spread.

Every value is one whole run of a program. A percentile bootstrap of three to ten values is too narrow, so an
interval is also at least as wide as the bootstrap's own standard error times the quantile of Student's t. It knows
no benchmark.

The ratio of two programs' values and the interval that holds it, from runs of each.
The ratio of two programs that ran in turns, pair after pair, in an order drawn by lot.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Statistic = Literal["median", "mean"]

LEVEL = 0.95
RESAMPLES = 2000

OF: dict[Statistic, Callable[..., Any]] = {"median": np.median, "mean": np.mean}


@dataclass(frozen=True)
class Interval:
    """A statistic and the ends between which it lies with the level asked for; as wide as it is unsure."""

    low: float
    value: float
    high: float


def median_interval(
    values: Sequence[float], statistic: Statistic = "median", level: float = LEVEL
) -> Interval:
    """The interval of a median or mean of repeats; infinitely wide for fewer than two."""
    found = finite(values)
    value = float(OF[statistic](found)) if found.size else math.nan
    if found.size < 2:
        return Interval(-math.inf, value, math.inf)
    draws = _resampled(found, statistic, np.random.default_rng(0))
    low, high = _ends(draws, value, float(draws.std()), found.size - 1, level)
    # Times and rates that are all above zero have no median below it, however few they are.
    return Interval(max(low, 0.0) if found.min() > 0 else low, value, high)


def spread(values: Sequence[float]) -> float:
    """The repeats' standard deviation as a share of their mean; NaN for fewer than two."""
    found = finite(values)
    if found.size < 2 or found.mean() == 0:
        return math.nan
    return float(found.std(ddof=1) / abs(found.mean()))


def finite(values: Sequence[float] | Array) -> Array:
    """Those of the values that are numbers."""
    found = np.asarray(values, np.float64)
    return found[np.isfinite(found)]


def _resampled(values: Array, statistic: Statistic, generator: np.random.Generator) -> Array:
    picks = generator.integers(0, values.size, (RESAMPLES, values.size))
    drawn: Array = OF[statistic](values[picks], axis=1)
    return drawn


def _ends(draws: Array, value: float, error: float, freedom: float, level: float) -> tuple[float, float]:
    """The wider of the percentile and the t interval, on each side."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    half = student((1 + level) / 2, round(freedom, 1)) * error
    return min(float(low), value - half), max(float(high), value + half)


@lru_cache
def student(share: float, freedom: float) -> float:
    """The quantile of Student's t for a share above one half, by integrating its density in the angle."""
    angles = np.linspace(0, math.pi / 2, 20001)
    density = np.cos(angles) ** (freedom - 1)
    total = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = float(np.interp(2 * share - 1, total / total[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


MOST_EXACT = 2500  # differences or averages above which the normal approximation counts them


def ratio_interval(
    a_values: Sequence[float] | Array, b_values: Sequence[float] | Array, level: float
) -> Interval:
    """B's median over A's, from runs that have nothing to do with each other."""
    a, b = finite(a_values), finite(b_values)
    middle = median_ratio(a, b)
    if not math.isfinite(middle):
        return Interval(-math.inf, middle, math.inf)
    scale = Scale(a, b)
    a, b = scale.put(a), scale.put(b)
    differences = np.sort((b[:, None] - a).ravel())
    cut = rank_sum_outside(a.size, b.size, level)
    ends = cut_ends(differences, cut) if cut else welch_interval(a, b, level)
    return scale.interval(*ends, middle)


class Scale:
    """Where differences are ratios: logarithms of what is above 0, else multiples of A's median."""

    def __init__(self, a: Array, b: Array):
        self.positive = bool(a.min() > 0 and b.min() > 0)
        self.size = abs(float(np.median(a))) or 1.0

    def put(self, values: Array) -> Array:
        """Values on this scale."""
        placed: Array = np.log(values) if self.positive else values / self.size
        return placed

    def back(self, difference: float) -> float:
        """The ratio that a difference on this scale means."""
        return math.exp(difference) if self.positive else 1 + difference

    def interval(self, low: float, high: float, middle: float) -> Interval:
        """The ratio's interval; it holds the median, which is not the estimate that the ends belong to."""
        return Interval(min(self.back(low), middle), middle, max(self.back(high), middle))


def median_ratio(a: Array, b: Array) -> float:
    """B's median as a multiple of A's; one below zero counts by its size, so that above 1 always means more."""
    middle, other = float(np.median(a)), float(np.median(b))
    if middle == 0:
        return math.nan if a.any() or b.any() else 1.0
    return 1 + (other - middle) / abs(middle)


def cut_ends(ordered: Array, cut: int) -> tuple[float, float]:
    """The ends of what is left of ordered numbers after so many are cut off on each side, the last of them included."""
    return float(ordered[cut - 1]), float(ordered[-cut])


def welch_interval(a: Array, b: Array, level: float) -> tuple[float, float]:
    """Student's t interval of the difference of means of two sides with their own variances."""
    if min(a.size, b.size) < 2:
        return -math.inf, math.inf
    errors = float(a.var(ddof=1)) / a.size, float(b.var(ddof=1)) / b.size
    total = sum(errors)
    freedom = float(min(a.size, b.size) - 1)
    if total > 0:
        freedom = total**2 / (errors[0] ** 2 / (a.size - 1) + errors[1] ** 2 / (b.size - 1))
    middle = float(b.mean() - a.mean())
    half = student((1 + level) / 2, round(freedom, 1)) * math.sqrt(total)
    return middle - half, middle + half


@lru_cache
def rank_sum_outside(a: int, b: int, level: float) -> int:
    """How many of the a x b differences lie outside the interval on each side; 0 for too few runs."""
    if a * b > MOST_EXACT:
        return normal_outside(a * b / 2, a * b * (a + b + 1) / 12, level)
    # Of all ways to choose b places among a + b, how many have u values of A above values of B: the coefficients of
    # the Gaussian binomial, a product of (1 - q^(a+i)) / (1 - q^i).
    counts = [1] + [0] * (a * b)
    for step in range(1, b + 1):
        for place in range(a * b, a + step - 1, -1):
            counts[place] -= counts[place - a - step]
        for place in range(step, a * b + 1):
            counts[place] += counts[place - step]
    return outside(counts, math.comb(a + b, b), level)


def outside(counts: Sequence[int], total: int, level: float) -> int:
    """The longest run of counts from 0 on that is at most half of what the level leaves."""
    allowed, reached = (1 - level) / 2 * total, 0
    for place, count in enumerate(counts):
        reached += count
        if reached > allowed * (1 + 1e-9):
            return place
    return len(counts)


def normal_outside(mean: float, variance: float, level: float) -> int:
    """The same for so many that their distribution is a normal one."""
    return math.floor(mean + NormalDist().inv_cdf((1 - level) / 2) * math.sqrt(variance))


STEADY = 1.5  # of von Neumann's ratio, which is 2 for means in no order at all, and near 0 for a drift
NEAR = 2  # steps between pairs on either side of a pair that tell its drift


def ratio_in_turns(
    a_values: Sequence[float],
    b_values: Sequence[float],
    a_starts: Sequence[float],
    b_starts: Sequence[float],
    level: float,
) -> Interval:
    """B over A from pairs in the order of time; `starts` are the seconds at which the runs began."""
    a, b = np.asarray(a_values, np.float64), np.asarray(b_values, np.float64)
    if a.size < 2 or not np.median(a):
        return ratio_interval(a, b, level)
    scale = Scale(a, b)
    times = np.stack([np.asarray(a_starts, np.float64), np.asarray(b_starts, np.float64)])
    means = (scale.put(a) + scale.put(b)) / 2
    if is_steady(means):
        return ratio_interval(a, b, level)
    differences = scale.put(b) - scale.put(a) - estimate_drift(means, times.mean(0)) * (times[1] - times[0])
    return scale.interval(*paired_interval(differences, level), scale.back(float(np.median(differences))))


def is_steady(means: Array) -> bool:
    """Whether the pairs' means come in no order: their steps are as large as they would be shuffled."""
    around = float(((means - means.mean()) ** 2).sum())
    return float((np.diff(means) ** 2).sum()) >= STEADY * around * (1 - 1 / means.size)


def estimate_drift(means: Array, times: Array) -> Array:
    """How fast the machine changed at each pair: the median of the steps around it, a second."""
    steps = np.diff(means) / np.maximum(np.diff(times), 1e-9)
    places = range(means.size)
    return np.array([np.median(steps[max(0, place - NEAR) : place + NEAR]) for place in places])


def paired_interval(differences: Array, level: float) -> tuple[float, float]:
    """The ends of Wilcoxon's signed-rank test, or of Student's t where pairs are too few for the level."""
    cut = signed_rank_outside(differences.size, level)
    if cut:
        firsts, seconds = np.triu_indices(differences.size)
        return cut_ends(np.sort((differences[firsts] + differences[seconds]) / 2), cut)
    middle, spread = float(differences.mean()), float(differences.std(ddof=1))
    half = student((1 + level) / 2, differences.size - 1) * spread / math.sqrt(differences.size)
    return middle - half, middle + half


@lru_cache
def signed_rank_outside(pairs: int, level: float) -> int:
    """How many averages of two differences lie outside the interval on each side; 0 for too few pairs."""
    total = pairs * (pairs + 1) // 2
    if total > MOST_EXACT:
        return normal_outside(total / 2, total * (2 * pairs + 1) / 12, level)
    counts = [1] + [0] * total  # subsets of 1 ... pairs by their sum
    for rank in range(1, pairs + 1):
        for place in range(total, rank - 1, -1):
            counts[place] += counts[place - rank]
    return outside(counts, 2**pairs, level)
