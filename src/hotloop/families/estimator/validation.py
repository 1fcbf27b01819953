"""The evaluations of train_and_evaluate: one before each checkpoint, noted once the checkpoint is there."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from hotloop.families.estimator import step
from hotloop.families.estimator.hooks import Hook, Running


class Validation(Hook):
    """Measures states, `apart` seconds apart at least; `note` takes each result with its number of updates."""

    def __init__(
        self,
        measure: Callable[[Any], dict[str, Any]],
        note: Callable[[dict[str, Any]], dict[str, Any]],
        apart: float = 0,
    ):
        self._measure, self._note, self._apart = measure, note, apart
        self._since = -math.inf
        self._found: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        """The result that was noted last."""

    def __call__(self, state: Any) -> Mapping[str, Any]:
        """The figures of a state that is about to be saved; none when the last ones are too young."""
        if time.monotonic() - self._since < self._apart:
            return {}
        self._found = self._measure({name: state[name] for name in step.SERVED})
        self._since = time.monotonic()
        return self._found

    def on_checkpoint(self, run: Running, step: int) -> None:
        """Now the number of updates is known."""
        if self._found:
            self.last = self._note({**self._found, "global_step": step})
            self._found = {}
