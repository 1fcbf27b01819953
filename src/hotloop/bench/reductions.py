"""How the values that a program printed become one number. It knows numbers alone, not where they came from.

Every reduction refuses NaN and infinity: a mean over a diverged run is worse than no number at all.
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence

IN_ORDER = ("first", "value", "final")
"""Reductions that ask for a place in the order of printing."""
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?|100)")
LARGEST = 1e150  # so that squares, for a spread, are still numbers


class ReductionError(ValueError):
    """Values that have no such reduction; the message says why."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _stdev(values: Sequence[float]) -> float:
    if len(values) < 2:
        raise ReductionError("a standard deviation needs two values or more")
    centre = _mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": _mean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "final": lambda values: values[-1],
    "first": lambda values: values[0],
    "value": lambda values: values[0],
    "stdev": _stdev,
}


def known(kind: str) -> bool:
    """Whether there is such a reduction: one of REDUCTIONS, or p0 ... p100 (p99.9 too)."""
    return kind in REDUCTIONS or PERCENTILE.fullmatch(kind) is not None


def reduce(kind: str, values: Sequence[float]) -> float:
    """One finite number out of one or more finite values, or a ReductionError."""
    if not values:
        raise ReductionError("there are no values")
    for place, value in enumerate(values, 1):
        if not math.isfinite(value):
            raise ReductionError(f"value {place} of {len(values)} is {value}")
    try:
        if wanted := PERCENTILE.fullmatch(kind):
            result = percentile(values, float(wanted[1]))
        elif kind in REDUCTIONS:
            result = REDUCTIONS[kind](values)
        else:
            raise ReductionError(f"there is no reduction '{kind}'; known: {', '.join(REDUCTIONS)}, pNN")
    except OverflowError:
        result = math.inf
    if not abs(result) < LARGEST:
        raise ReductionError(f"the {kind} of {len(values)} values is too large for a number")
    return float(result)


def warmed_up(values: Sequence[float], skip: int) -> Sequence[float]:
    """The values after the first `skip`, in the order of printing."""
    _enough(values, skip)
    return values[skip:]


def without_worst(values: Sequence[float], skip: int, *, lower_is_better: bool) -> Sequence[float]:
    """The old rule: the values in order of size without the `skip` worst, wherever they were printed."""
    _enough(values, skip)
    return sorted(values, reverse=lower_is_better)[skip:]


def _enough(values: Sequence[float], skip: int) -> None:
    if 0 < skip >= len(values):
        raise ReductionError(f"{len(values)} values were found and the first {skip} are skipped")
