"""What users may do between calls, and how the pieces of a call come together for them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.drive import LogWindow
from hotloop.engine.plan import Event, Kind, Plan
from hotloop.families.estimator.config import RunConfig

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


class HookRunner:
    """What happens between the calls of one training: hooks, summaries, events by the clock, and how fast it was.

    Its methods are callbacks of `engine.drive`. A call comes in pieces: the hooks are handed the whole of it, while a
    summary takes pieces, so that what it holds can be saved where a call is cut.
    """

    def __init__(
        self, run: RunHandle, hooks: Sequence[Hook], config: RunConfig, plan: Plan, record: Any, saved: Any
    ):
        """`saved` is the summary that was open in the checkpoint from which the training goes on."""
        self.run, self.hooks, self.config, self.plan, self.record = run, hooks, config, plan, record
        self.ends = frozenset(plan.ends)
        self.summary = LogWindow(saved=saved)
        self.pieces: list[CallFigures] = []
        self.first = self.done = self.logged = run.step
        self.updates, self.seconds = 0, 0.0  # of the logs so far
        self.log_since = self.saved_since = time.monotonic()

    def on_call(self, first: int, metrics: CallFigures) -> None:
        count = len(next(iter(metrics.values())))
        self.done = first + count
        if self.config.summary_steps:
            self.summary.add(metrics, count, 0.0)
        if self.hooks:
            self.first = self.first if self.pieces else first
            self.pieces.append({name: metrics[name] for name in metrics})
        if self.done in self.ends:
            self.record_summary()
            self.hand_over()

    def record_summary(self) -> None:
        """The mean of each metric since the last one, if enough updates have come."""
        every = self.config.summary_steps
        if every and self.summary.updates >= every:
            epoch = float(self.done / self.plan.updates_per_epoch)
            self.record.event("summary", update=self.done, epoch=epoch, **self.summary.means())
            self.summary = LogWindow()

    def hand_over(self) -> None:
        """What is there of a call, to the hooks."""
        if self.pieces:
            pieces, self.pieces = self.pieces, []
            whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
            self.run.step = self.first + len(next(iter(whole.values())))
            for hook in self.hooks:
                hook.after_call(self.run, self.first, whole)

    def on_log(self, event: Event, figures: Mapping[str, Any]) -> None:
        updates, self.logged = event.update - self.logged, event.update
        if speed := figures.get("throughput"):
            self.seconds += updates * self.plan.batch.global_ / speed
            self.updates += updates

    def speed(self) -> dict[str, Any]:
        """Updates and seconds of all logs, and samples a second."""
        speed = self.plan.batch.global_ * self.updates / self.seconds if self.seconds else None
        return {"updates": self.updates, "training_seconds": self.seconds, "images_per_second": speed}

    def due(self, update: int) -> list[Kind]:
        """Events by the clock; where the plan evaluates, that comes before each checkpoint."""
        now, due = time.monotonic(), list[Kind]()
        every, save_every = self.config.log_seconds, self.config.checkpoint_seconds
        if every is not None and now - self.log_since >= every:
            self.log_since = now
            due.append("log")
        if save_every is not None and now - self.saved_since >= save_every:
            self.saved_since = now
            due += ["validate", "checkpoint"] if self.plan.has("validate") else ["checkpoint"]
        return due


class HookedCheckpoints(Checkpoints):
    """Checkpoints that tell the hooks, and are whole on disk before the next call: a kill costs that call alone."""

    runner: HookRunner
    hooks: Sequence[Hook]

    def save(
        self, step: int, state: Any, *, position: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> None:
        if self.runner.config.summary_steps:
            position = {**position, SUMMARIES: self.runner.summary.as_saved()}
        super().save(step, state, position=position, metrics=metrics)
        self.wait()
        for hook in self.hooks:
            hook.on_checkpoint(self.runner.run, step)
