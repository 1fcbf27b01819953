"""How often, exactly: frequencies as fractions, and the period in weight updates that comes closest to one.

Events happen between weight updates, so a frequency is only possible where it cuts a run (or an epoch) into
equal whole numbers of updates. This file knows nothing of batches, calls or plans.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from hotloop.errors import PlanError

Frequency = int | float | str | Fraction


def exact(argument: str, value: Frequency) -> Fraction:
    """A number of at least 0 as the fraction that was meant: 0.1 is 1/10 and the float 1/49 is 1/49."""
    try:
        fraction = _nearest_fraction(value) if isinstance(value, float) else Fraction(value)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise PlanError(f"{argument}={value}: not a number; write for example 2, 0.5 or 1/2") from None
    if fraction < 0:
        raise PlanError(f"{argument}={value}: must be at least 0")
    return fraction


def _nearest_fraction(value: float) -> Fraction:
    simple = Fraction(value).limit_denominator(10**6)
    return simple if float(simple) == value else Fraction(repr(value))


def closest_divisor(number: int, target: Fraction | int) -> int:
    """The divisor of `number` nearest to `target`.

    Divisors are tried in the order 1, n/1, 2, n/2, ... up to the square root, and of two equally near
    ones the first stays: (12, 5) gives 6 and not 4, (781, 41) gives 11 and not 71.
    """
    return min(divisors(number), key=lambda divisor: abs(Fraction(divisor - target)))


def divisors(number: int) -> Iterator[int]:
    """1, n/1, 2, n/2, ... as far as they divide; a square's root comes twice."""
    for n in range(1, math.isqrt(number) + 1):
        if number % n == 0:
            yield from (n, number // n)


def readable(number: int | Fraction) -> str:
    """A number as people write it: 1,100, 1/2, or four digits where the fraction is long."""
    if number.denominator == 1:
        return f"{int(number):,}"
    return str(number) if number.denominator < 100 else f"{float(number):.4g}"


@dataclass(frozen=True)
class Clock:
    """A run measured in weight updates: what epochs and frequencies are counted against."""

    updates_per_epoch: int | Fraction
    total: int

    @property
    def epochs(self) -> Fraction:
        """Length of the run in epochs."""
        return Fraction(self.total, self.updates_per_epoch)

    def log_period(self, argument: str, frequency: Fraction) -> int:
        """Updates between logs: an epoch, or for a frequency below 1 the run, is cut into equal parts."""
        if frequency >= 1:
            return self._cut(int(self.updates_per_epoch), frequency)
        if (self.epochs * frequency).denominator != 1:
            raise PlanError(self._impossible(argument, frequency))
        return self._cut(self.total, frequency)

    def save_period(self, frequency: Fraction, first: int) -> int:
        """Updates between checkpoints (or validations) of which the first falls after `first` updates."""
        if frequency >= 1:
            return self._cut(int(self.updates_per_epoch), frequency)
        period = self.updates_per_epoch / frequency
        if period.denominator == 1:
            return int(period)
        if first == self.total:
            return self.total
        return self._cut(self.total - first, frequency)

    def _cut(self, updates: int, frequency: Fraction) -> int:
        """Cut `updates` into equal parts so that the parts come nearest to `frequency` per epoch."""
        return updates // closest_divisor(updates, frequency * updates / self.updates_per_epoch)

    def _impossible(self, argument: str, frequency: Fraction) -> str:
        """Say why a frequency below one does not fit, in the words people know, and what would."""
        epochs = int(self.epochs)
        nearest = sorted(sorted(sorted({*divisors(epochs)}), key=lambda n: abs(n - 1 / frequency))[:2])
        advice = " or ".join(str(Fraction(1, n)) for n in nearest)
        return (
            f"It is not possible to log {float(1 / frequency)} epochs a time for {epochs} epochs"
            f" ({argument}={frequency}); {argument}={advice} would fit"
        )

    def adjustment(self, argument: str, wanted: Fraction, period: int) -> list[str]:
        """A warning when a period (0 for never) is not what the wanted frequency says."""
        got = Fraction(self.updates_per_epoch, period) if period else Fraction(0)
        if got == wanted:
            return []
        return [
            f"{argument}={wanted} would interrupt a weight update ({self.updates_per_epoch} updates an epoch): "
            f"adjusted to {readable(got)} an epoch, one every {period} updates"
        ]
