"""What kind of number a metric is, by its name and unit: which direction is better, and what may change it."""

import re
from typing import Literal

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


def direction(metric: str, unit: str = "") -> Better:
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
