"""What users may do between calls, and how the pieces of a call come together for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.host_events import LogWindow
from hotloop.engine.interrupt import Interrupted
from hotloop.engine.loop import CallMetrics
from hotloop.engine.plan import Plan

SUMMARIES = "summaries"
"""In a step's position: the sums of the summary that was open."""
CallFigures = Mapping[str, NDArray[Any]]


@dataclass
class RunHandle:
    """The training that hooks are part of."""

    estimator: Any
    step: int = 0
    """Weight updates made so far, in all runs of this model_dir."""
    target: int = 0
    stopped: bool = False

    def stop(self) -> None:
        """End the training, saved, with the call that the device is at by now."""
        self.stopped = True


class Hook:
    """Override what you need; an exception ends the training.

    >>> from hotloop import Hook
    >>> class Patience(Hook):
    ...     def after_call(self, run, first, metrics):
    ...         if metrics["loss"].mean() < 0.01:
    ...             run.stop()
    """

    def begin(self, run: RunHandle) -> None:
        """Before the first call."""

    def after_call(self, run: RunHandle, first: int, metrics: CallFigures) -> None:
        """After each call: every metric of each of its updates, the first of which was number `first`."""

    def on_checkpoint(self, run: RunHandle, step: int) -> None:
        """A checkpoint of `step` updates is on disk."""

    def end(self, run: RunHandle) -> None:
        """After the last call, everything saved."""


class CallCollector:
    """Joins the pieces in which a call was dispatched, and hands the whole call to the hooks.

    As a context it hands over, at the end or at a stop, what is there of a call that was cut.
    """

    def __init__(self, run: RunHandle, hooks: Sequence[Hook], plan: Plan):
        self._run, self._hooks, self._ends = run, hooks, frozenset(plan.ends)
        self._first = run.step
        self._pieces: list[CallFigures] = []

    def take(self, first: int, metrics: CallMetrics) -> None:
        if not self._pieces:
            self._first = first
        self._pieces.append({name: metrics[name] for name in metrics})
        if first + len(next(iter(metrics.values()))) in self._ends:
            self.flush()

    def __enter__(self) -> "CallCollector":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or issubclass(kind, Interrupted):
            self.flush()

    def flush(self) -> None:
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        self._run.step = self._first + len(next(iter(whole.values())))
        for hook in self._hooks:
            hook.after_call(self._run, self._first, whole)


class SummaryRecorder:
    """A record of the mean of each metric since the last one, at most one a call.

    It takes pieces, not calls, so that what it holds can be saved where a call is cut.
    """

    def __init__(self, records: Any, every: int, plan: Plan, saved: Mapping[str, Any] | None):
        self._records, self._every, self._plan = records, every, plan
        self._ends = frozenset(plan.ends)
        self._window = LogWindow(saved=saved)
        self._done = 0

    def take(self, first: int, metrics: CallMetrics) -> None:
        count = len(next(iter(metrics.values())))
        self._window.add(metrics, count, 0.0)
        self._done = first + count
        if self._done in self._ends:
            self.flush()

    def flush(self) -> None:
        """Record what is there, if it is enough."""
        if self._window.updates >= self._every:
            epoch = float(self._done / self._plan.updates_per_epoch)
            self._records.event("summary", update=self._done, epoch=epoch, **self._window.means())
            self._window.clear()

    def as_saved(self) -> dict[str, Any]:
        return self._window.as_saved()


class HookedCheckpoints(Checkpoints):
    """Checkpoints that tell the hooks, and are whole on disk before the next call: a kill costs that call alone."""

    run: RunHandle
    hooks: Sequence[Hook] = ()
    summaries: SummaryRecorder | None = None
    """What is open of them is saved besides."""

    def __enter__(self) -> "HookedCheckpoints":
        return self

    def save(
        self, step: int, state: Any, *, position: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> None:
        more = {SUMMARIES: self.summaries.as_saved()} if self.summaries else {}
        super().save(step, state, position={**position, **more}, metrics=metrics)
        self.wait()
        for hook in self.hooks:
            hook.on_checkpoint(self.run, step)
