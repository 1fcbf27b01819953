"""The ratio of two programs that ran in turns, pair after pair, in an order drawn by lot.

Under one program against itself the lot alone decides which run of a pair is called B, whatever the machine did
meanwhile. So where the machine drifted, the differences within pairs are taken, freed of the drift that the pairs'
means show; where it did not, all runs of A against all of B say more. Which of the two it is comes from the order of
the pairs' means, which knows neither A from B nor how far apart they are. It knows no benchmark.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hotloop.bench.ratios import MOST_EXACT, Scale, kept, normal_outside, outside, ratio
from hotloop.bench.statistics import Array, Interval, student

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
        return ratio(a, b, level)
    scale = Scale(a, b)
    times = np.stack([np.asarray(a_starts, np.float64), np.asarray(b_starts, np.float64)])
    means = (scale.put(a) + scale.put(b)) / 2
    if is_steady(means):
        return ratio(a, b, level)
    differences = scale.put(b) - scale.put(a) - drift(means, times.mean(0)) * (times[1] - times[0])
    return scale.interval(*interval(differences, level), scale.back(float(np.median(differences))))


def is_steady(means: Array) -> bool:
    """Whether the pairs' means come in no order: their steps are as large as they would be shuffled."""
    around = float(((means - means.mean()) ** 2).sum())
    return float((np.diff(means) ** 2).sum()) >= STEADY * around * (1 - 1 / means.size)


def drift(means: Array, times: Array) -> Array:
    """How fast the machine changed at each pair: the median of the steps around it, a second."""
    steps = np.diff(means) / np.maximum(np.diff(times), 1e-9)
    places = range(means.size)
    return np.array([np.median(steps[max(0, place - NEAR) : place + NEAR]) for place in places])


def interval(differences: Array, level: float) -> tuple[float, float]:
    """The ends of Wilcoxon's signed-rank test, or of Student's t where pairs are too few for the level."""
    cut = signed_rank_outside(differences.size, level)
    if cut:
        firsts, seconds = np.triu_indices(differences.size)
        return kept(np.sort((differences[firsts] + differences[seconds]) / 2), cut)
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
