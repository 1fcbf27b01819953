"""Which checkpoint steps stay on disk: the last few, the best few, all, or any of these together.

A policy is a pure choice over the steps and their metrics; it deletes nothing itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hotloop.errors import OptionError

Metrics = Mapping[int, Mapping[str, Any]]


def _check_count(n: int) -> None:
    if n < 1:
        raise OptionError(f"cannot keep {n} checkpoints: keep at least 1")


class Keep:
    """A rule that chooses steps; `a | b` keeps what either keeps."""

    def kept(self, metrics: Metrics) -> set[int]:
        """The steps to keep, given the metrics of every complete step."""
        raise NotImplementedError

    def best(self, metrics: Metrics) -> int | None:
        """The best step by this rule's metric; None if it has none or no step reports it."""
        return None

    def __or__(self, other: "Keep") -> "Keep":
        return Either(self, other)


@dataclass(frozen=True)
class KeepAll(Keep):
    """Every step stays."""

    def kept(self, metrics: Metrics) -> set[int]:
        """All of them."""
        return set(metrics)


@dataclass(frozen=True)
class KeepLast(Keep):
    """The `n` newest steps stay."""

    n: int = 3

    def __post_init__(self) -> None:
        _check_count(self.n)

    def kept(self, metrics: Metrics) -> set[int]:
        """The `n` largest step numbers."""
        return set(sorted(metrics)[-self.n :])


@dataclass(frozen=True)
class KeepBest(Keep):
    """The `n` steps with the best value of a metric stay; those without it, or with NaN, do not count."""

    metric: str
    mode: Literal["max", "min"] = "max"
    n: int = 1

    def __post_init__(self) -> None:
        _check_count(self.n)

    def kept(self, metrics: Metrics) -> set[int]:
        """The `n` best steps; of equals the newest."""
        return set(self.ranked(metrics)[: self.n])

    def best(self, metrics: Metrics) -> int | None:
        """The best of all."""
        return next(iter(self.ranked(metrics)), None)

    def ranked(self, metrics: Metrics) -> list[int]:
        """Steps that have the metric, best first."""
        sign = 1 if self.mode == "max" else -1
        values = {step: m.get(self.metric) for step, m in metrics.items()}
        finite = {s: v for s, v in values.items() if isinstance(v, int | float) and not math.isnan(v)}
        return sorted(finite, key=lambda step: (sign * finite[step], step), reverse=True)


@dataclass(frozen=True)
class Either(Keep):
    """What either of two rules keeps."""

    first: Keep
    second: Keep

    def kept(self, metrics: Metrics) -> set[int]:
        """The union."""
        return self.first.kept(metrics) | self.second.kept(metrics)

    def best(self, metrics: Metrics) -> int | None:
        """The first rule's best, else the second's."""
        first = self.first.best(metrics)
        return self.second.best(metrics) if first is None else first
