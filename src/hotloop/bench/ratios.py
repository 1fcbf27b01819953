"""The ratio of two programs' values and the interval that holds it, from runs of each.

Every value is one whole run. The interval is that of Mann and Whitney's rank test: it asks nothing of the noise but
that it is the same on both sides, few runs that went wrong do not move it, and for a program against itself it misses
1 no more often than its level says. Too few runs for such a level have Student's t instead. `turns.py` has the ratio
from programs that ran in turns. It knows no benchmark.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from hotloop.bench.statistics import Array, Interval, finite, student

MOST_EXACT = 2500  # differences or averages above which the normal approximation counts them


def ratio(a_values: Sequence[float] | Array, b_values: Sequence[float] | Array, level: float) -> Interval:
    """B's median over A's, from runs that have nothing to do with each other."""
    a, b = finite(a_values), finite(b_values)
    middle = median_ratio(a, b)
    if not math.isfinite(middle):
        return Interval(-math.inf, middle, math.inf)
    scale = Scale(a, b)
    a, b = scale.put(a), scale.put(b)
    differences = np.sort((b[:, None] - a).ravel())
    cut = rank_sum_outside(a.size, b.size, level)
    ends = kept(differences, cut) if cut else welch(a, b, level)
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


def kept(ordered: Array, cut: int) -> tuple[float, float]:
    """The ends of what is left of ordered numbers after so many are cut off on each side, the last of them included."""
    return float(ordered[cut - 1]), float(ordered[-cut])


def welch(a: Array, b: Array, level: float) -> tuple[float, float]:
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
