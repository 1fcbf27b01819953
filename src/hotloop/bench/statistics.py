"""How sure a number is: the interval of a median or mean from few repeats, and their spread.

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

LEVEL = 0.95
RESAMPLES = 2000

OF: dict[Statistic, Callable[..., Any]] = {"median": np.median, "mean": np.mean}


@dataclass(frozen=True)
class Interval:
    """A statistic and the ends between which it lies with the level asked for; as wide as it is unsure."""

    low: float
    value: float
    high: float


def bootstrap(values: Sequence[float], statistic: Statistic = "median", level: float = LEVEL) -> Interval:
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
