"""What has happened since the last log: sums of every update's metrics, updates, and seconds of device work.

A window is kept in checkpoints, so that the first log after a resume averages what it would have averaged.
It must not know what the metrics mean.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np


class Window:
    """Running sums of scalar metrics; those in `latest` (a learning rate, say) report their last value."""

    def __init__(self, latest: Collection[str] = (), saved: Mapping[str, Any] | None = None):
        self._latest = frozenset(latest)
        saved = saved or {"sums": {}, "updates": 0}
        # JSON has no NaN: a sum that was not finite comes back as nothing.
        self._sums = {name: math.nan if value is None else value for name, value in saved["sums"].items()}
        self.updates = int(saved["updates"])
        self._timed_updates, self._seconds = 0, 0.0

    @property
    def empty(self) -> bool:
        """Has nothing happened yet?"""
        return self.updates == 0

    def clear(self) -> None:
        """Begin a new window."""
        self._sums, self.updates = {}, 0
        self._timed_updates, self._seconds = 0, 0.0

    def add(self, metrics: Mapping[str, "np.ndarray[Any, Any]"], count: int, seconds: float) -> None:
        """Take in one call of `count` updates; metrics that are arrays for each update are left out."""
        for name, values in metrics.items():
            if values.ndim == 1 and name in self._latest:
                self._sums[name] = float(values[-1])
            elif values.ndim == 1:
                self._sums[name] = _added(self._sums.get(name, 0.0), values)
        self.updates += count
        self._timed_updates += count
        self._seconds += seconds

    def figures(self, batch_size: int) -> dict[str, float]:
        """Means since the last log, and samples a second of the calls that this process made."""
        speed = batch_size * self._timed_updates / self._seconds if self._seconds else 0.0
        return {**self.means(), "throughput": speed}

    def means(self) -> dict[str, float]:
        """Means since the window began."""
        return {
            name: value if name in self._latest else value / self.updates
            for name, value in self._sums.items()
        }

    def saved(self) -> dict[str, Any]:
        """The window as a checkpoint keeps it: without times, which belong to one process."""
        return {"sums": self._sums, "updates": self.updates}


def _added(total: float, values: "np.ndarray[Any, Any]") -> float:
    """One value after the other, so that no bit of the sum depends on how updates were cut into pieces."""
    return float(np.add.accumulate(np.append(np.float64(total), values.astype(np.float64)))[-1])
