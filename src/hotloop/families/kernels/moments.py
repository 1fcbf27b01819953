"""Means of a Markov chain with their standard errors, from the means of consecutive blocks of steps.

Blocks much longer than the chain's memory are nearly independent, so the spread of their means tells the
error of the whole mean, correlation included. It knows no sampler.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

FEWEST_BLOCKS = 20


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error (nan where there are too few blocks to tell)."""

    value: float
    error: float

    def distance(self, exact: float) -> float:
        """How many standard errors the value lies above the exact one."""
        return (self.value - exact) / self.error if self.error else float("inf")

    def __str__(self) -> str:
        return f"{self.value:.5f} +- {self.error:.5f}"


def mean(blocks: Any) -> Estimate:
    """The mean of block means."""
    values = np.asarray(blocks, np.float64)
    error = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size >= FEWEST_BLOCKS else float("nan")
    return Estimate(float(values.mean()), error)


def variance(firsts: Any, seconds: Any) -> Estimate:
    """The variance E[x^2] - m^2 from block means of x and x^2; its error is that of the mean of x^2 - 2 m x."""
    firsts, seconds = np.asarray(firsts, np.float64), np.asarray(seconds, np.float64)
    centre = float(firsts.mean())
    return Estimate(float(seconds.mean()) - centre**2, mean(seconds - 2 * centre * firsts).error)
