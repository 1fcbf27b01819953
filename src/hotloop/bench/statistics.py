"""How sure a number is: the interval of a median from few repeats, and of the ratio of two programs' values.

Every value is one whole run of a program. The ratio of runs that have nothing to do with each other has the interval
of Mann and Whitney's rank test: it asks nothing of the noise but that it is the same on both sides, and for a program
against itself it misses 1 no more often than its level says.

Two programs that ran in turns, pair after pair, in an order drawn by lot: under one program against itself the lot
alone decides which run of a pair is called B, whatever the machine did meanwhile. So where the machine drifted (which
the order of the pairs' means tells, and that knows neither A from B nor how far apart they are), the differences
within pairs are taken, freed of the drift; where it did not, all runs of A against all of B say more. Too few runs for
either test have Student's t instead.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Numbers = Sequence[float] | Array
MEDIAN_LEVEL = 0.95
RESAMPLES = 2000
MOST_EXACT = 2500  # differences or averages above which the normal approximation counts them
STEADY = 1.5  # of von Neumann's ratio, which is 2 for means in no order at all, and near 0 for a drift
NEAR = 2  # steps between pairs on either side of a pair that tell its drift


class Interval(NamedTuple):
    """A statistic and the ends between which it lies with the level asked for; as wide as it is unsure."""

    low: float
    value: float
    high: float


def median(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN where there are none."""
    found = finite(values)
    return float(np.median(found)) if found.size else math.nan


def median_interval(values: Sequence[float]) -> Interval:
    """The interval of a median of repeats; infinitely wide for fewer than two."""
    found, value = finite(values), median(values)
    if found.size < 2:
        return Interval(-math.inf, value, math.inf)
    picks = np.random.default_rng(0).integers(0, found.size, (RESAMPLES, found.size))
    draws: Array = np.median(found[picks], axis=1)
    low, high = np.quantile(draws, [(1 - MEDIAN_LEVEL) / 2, (1 + MEDIAN_LEVEL) / 2])
    # A percentile bootstrap of few values is too narrow: the interval is also at least as wide as its own standard
    # error times the quantile of Student's t.
    half = student((1 + MEDIAN_LEVEL) / 2, found.size - 1) * float(draws.std())
    low, high = min(float(low), value - half), max(float(high), value + half)
    # Times and rates that are all above zero have no median below it, however few they are.
    return Interval(max(low, 0.0) if found.min() > 0 else low, value, high)


def spread(values: Sequence[float]) -> float:
    """The repeats' standard deviation as a share of their mean; NaN for fewer than two."""
    found = finite(values)
    if found.size < 2 or found.mean() == 0:
        return math.nan
    return float(found.std(ddof=1) / abs(found.mean()))


def finite(values: Numbers) -> Array:
    found = np.asarray(values, np.float64)
    return found[np.isfinite(found)]


def student(share: float, freedom: float) -> float:
    # What scipy.stats.t.ppf calls; scipy.stats itself takes half a second to import.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, share))


def ratio_interval(a_values: Numbers, b_values: Numbers, level: float) -> Interval:
    """B's median over A's, from runs that have nothing to do with each other."""
    a, b = finite(a_values), finite(b_values)
    # A median of A below zero counts by its size, so that a ratio above 1 always means more.
    size, other = float(np.median(a)), float(np.median(b))
    none = math.nan if a.any() or b.any() else 1.0
    middle = 1 + (other - size) / abs(size) if size else none
    if not math.isfinite(middle):
        return Interval(-math.inf, middle, math.inf)
    scale = RatioScale(a, b)
    a, b = scale.put(a), scale.put(b)
    cut = rank_sum_outside(a.size, b.size, level)
    ends = cut_ends((b[:, None] - a).ravel(), cut) if cut else welch_interval(a, b, level)
    return scale.interval(*ends, middle)


class RatioScale:
    """Where differences are ratios: logarithms of what is above 0, else multiples of A's median."""

    def __init__(self, a: Array, b: Array):
        self.positive = bool(a.min() > 0 and b.min() > 0)
        self.size = abs(float(np.median(a))) or 1.0

    def put(self, values: Array) -> Array:
        placed: Array = np.log(values) if self.positive else values / self.size
        return placed

    def back(self, difference: float) -> float:
        return math.exp(difference) if self.positive else 1 + difference

    def interval(self, low: float, high: float, middle: float) -> Interval:
        """The ratio's interval; it holds the median, which is not the estimate that the ends belong to."""
        return Interval(min(self.back(low), middle), middle, max(self.back(high), middle))


def cut_ends(numbers: Array, cut: int) -> tuple[float, float]:
    """The ends of what is left after so many are cut off on each side, the last of them included."""
    ordered = np.sort(numbers)
    return float(ordered[cut - 1]), float(ordered[-cut])


def welch_interval(a: Array, b: Array, level: float) -> tuple[float, float]:
    """Student's t interval of the difference of means of two sides with their own variances."""
    # By hand: scipy.stats.ttest_ind warns of runs that are equal, which counts and exit statuses are.
    if min(a.size, b.size) < 2:
        return -math.inf, math.inf
    errors = float(a.var(ddof=1)) / a.size, float(b.var(ddof=1)) / b.size
    total = sum(errors)
    freedom = float(min(a.size, b.size) - 1)
    if total > 0:
        freedom = total**2 / (errors[0] ** 2 / (a.size - 1) + errors[1] ** 2 / (b.size - 1))
    middle = float(b.mean() - a.mean())
    half = student((1 + level) / 2, freedom) * math.sqrt(total)
    return middle - half, middle + half


def ratio_in_turns(
    a_values: Numbers, b_values: Numbers, a_starts: Numbers, b_starts: Numbers, level: float
) -> Interval:
    """B over A from pairs in the order of time; `starts` are the seconds at which the runs began."""
    a, b = np.asarray(a_values, np.float64), np.asarray(b_values, np.float64)
    if a.size < 2 or not np.median(a):
        return ratio_interval(a, b, level)
    scale = RatioScale(a, b)
    times = np.array([a_starts, b_starts], np.float64)
    means = (scale.put(a) + scale.put(b)) / 2
    if is_steady(means):
        return ratio_interval(a, b, level)
    drift = estimate_drift(means, times.mean(0))
    differences = scale.put(b) - scale.put(a) - drift * (times[1] - times[0])
    return scale.interval(*paired_interval(differences, level), scale.back(float(np.median(differences))))


def is_steady(means: Array) -> bool:
    """Whether the pairs' means come in no order: their steps are as large as they would be shuffled."""
    around = float(((means - means.mean()) ** 2).sum())
    return float((np.diff(means) ** 2).sum()) >= STEADY * around * (1 - 1 / means.size)


def estimate_drift(means: Array, times: Array) -> Array:
    """How fast the machine changed at each pair: the median of the steps around it, a second."""
    steps = (np.diff(means) / np.maximum(np.diff(times), 1e-9)).tolist()
    near = [steps[max(0, place - NEAR) : place + NEAR] for place in range(means.size)]
    return np.array([statistics.median(each) for each in near])  # of so few, numpy's takes ten times as long


def paired_interval(differences: Array, level: float) -> tuple[float, float]:
    """The ends of Wilcoxon's signed-rank test, or of Student's t where pairs are too few for the level."""
    cut = signed_rank_outside(differences.size, level)
    if cut:
        firsts, seconds = np.triu_indices(differences.size)
        return cut_ends((differences[firsts] + differences[seconds]) / 2, cut)
    middle, deviation = float(differences.mean()), float(differences.std(ddof=1))
    half = student((1 + level) / 2, differences.size - 1) * deviation / math.sqrt(differences.size)
    return middle - half, middle + half


# The exact distributions of both rank tests are counted here: scipy has them, but hides them behind p-values.


@lru_cache
def rank_sum_outside(a: int, b: int, level: float) -> int:
    """How many of the a x b differences lie outside the interval on each side; 0 for too few runs."""
    if a * b > MOST_EXACT:
        return _normal_outside(a * b / 2, a * b * (a + b + 1) / 12, level)
    # Of all ways to choose b places among a + b, how many have u values of A above values of B: the coefficients of
    # the Gaussian binomial, a product of (1 - q^(a+i)) / (1 - q^i).
    counts = [1] + [0] * (a * b)
    for step in range(1, b + 1):
        for place in range(a * b, a + step - 1, -1):
            counts[place] -= counts[place - a - step]
        for place in range(step, a * b + 1):
            counts[place] += counts[place - step]
    return _exact_outside(counts, level)


@lru_cache
def signed_rank_outside(pairs: int, level: float) -> int:
    """How many averages of two differences lie outside the interval on each side; 0 for too few pairs."""
    total = pairs * (pairs + 1) // 2
    if total > MOST_EXACT:
        return _normal_outside(total / 2, total * (2 * pairs + 1) / 12, level)
    counts = [1] + [0] * total  # subsets of 1 ... pairs by their sum
    for rank in range(1, pairs + 1):
        for place in range(total, rank - 1, -1):
            counts[place] += counts[place - rank]
    return _exact_outside(counts, level)


def _exact_outside(counts: Sequence[int], level: float) -> int:
    """The longest run of counts from 0 on that is at most half of what the level leaves."""
    return bisect_right(list(accumulate(counts)), (1 - level) / 2 * sum(counts) * (1 + 1e-9))


def _normal_outside(mean: float, variance: float, level: float) -> int:
    return math.floor(mean + statistics.NormalDist().inv_cdf((1 - level) / 2) * math.sqrt(variance))
