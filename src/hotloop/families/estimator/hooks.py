"""What users may do between calls, and how the pieces of a call come together for them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.calls import Plan
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.loop import CallMetrics

CallFigures = Mapping[str, NDArray[Any]]


@dataclass
class Running:
    """The training that hooks are part of."""

    estimator: Any
    step: int
    """Weight updates made so far, in all runs of this model_dir."""
    target: int
    stopped: bool = False

    def stop(self) -> None:
        """End the training, saved, with the call that the device is at by now."""
        self.stopped = True


class Hook:
    """Override what you need; an exception ends the training."""

    def begin(self, run: Running) -> None:
        """Before the first call."""

    def after_call(self, run: Running, first: int, metrics: CallFigures) -> None:
        """After each call: every metric of each of its updates, the first of which was number `first`."""

    def on_checkpoint(self, run: Running, step: int) -> None:
        """A checkpoint of `step` updates is on disk."""

    def end(self, run: Running) -> None:
        """After the last call, everything saved."""


class Calls:
    """Joins the pieces in which a call was dispatched, and hands the whole call to the hooks."""

    def __init__(self, run: Running, hooks: Sequence[Hook], plan: Plan):
        self._run, self._hooks, self._ends = run, hooks, plan.ends
        self._first = run.step
        self._pieces: list[CallFigures] = []

    def __call__(self, first: int, metrics: CallMetrics) -> None:
        """Take a piece."""
        if not self._pieces:
            self._first = first
        self._pieces.append({name: metrics[name] for name in metrics})
        done = first + len(next(iter(self._pieces[-1].values())))
        place = bisect_left(self._ends, done)
        if place < len(self._ends) and self._ends[place] == done:
            self.flush()

    def flush(self) -> None:
        """Hand over what is there, if anything."""
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        self._run.step = self._first + len(next(iter(whole.values())))
        for hook in self._hooks:
            hook.after_call(self._run, self._first, whole)


class Summaries(Hook):
    """A record of the mean of each metric since the last one, at most one a call."""

    def __init__(self, records: Any, every: int, per_epoch: Any):
        self._records, self._every, self._per_epoch = records, every, per_epoch
        self._sums: dict[str, float] = {}
        self._updates = 0

    def after_call(self, run: Running, first: int, metrics: CallFigures) -> None:
        """Add up, and record when it is time."""
        for name, values in metrics.items():
            if values.ndim == 1:
                self._sums[name] = self._sums.get(name, 0.0) + float(np.sum(values, dtype=np.float64))
        self._updates += len(next(iter(metrics.values())))
        if self._updates >= self._every:
            figures = {name: total / self._updates for name, total in self._sums.items()}
            self._records.event(
                "summary", update=run.step, epoch=float(run.step / self._per_epoch), **figures
            )
            self._sums, self._updates = {}, 0


class Watched(Checkpoints):
    """Checkpoints that tell the hooks, and are whole on disk before the next call: a kill costs that call alone."""

    def __enter__(self) -> "Watched":
        return self

    def tell(self, run: Running, hooks: Sequence[Hook]) -> None:
        """Whom to tell."""
        self._told = (run, hooks)

    def save(
        self, step: int, state: Any, *, position: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Save, then say so."""
        super().save(step, state, position=position, metrics=metrics)
        self.wait()
        run, hooks = self._told
        for hook in hooks:
            hook.on_checkpoint(run, step)
