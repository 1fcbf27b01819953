"""What happens between the compiled calls of one training: evaluations at its checkpoints, summaries, and the hooks,
which hear of calls, logs, evaluations and checkpoints, in that order. Checkpoints keep what hooks count, and the step
that an EarlyStopping would return to. Where the training comes from and how far it goes is `training.py`'s."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotloop.engine import processes
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import Keep, Metrics
from hotloop.engine.drive import LogWindow
from hotloop.engine.plan import Event, Kind, Plan
from hotloop.families.estimator.config import RunConfig
from hotloop.families.estimator.hooks import (
    CallFigures,
    EarlyStopping,
    Hook,
    RunHandle,
    collect_saved,
    overrides,
    tell,
)
from hotloop.families.estimator.model import INFERENCE_PARTS, State

SUMMARIES = "summaries"  # in a step's position: the sums of the summary that was open
HOOKS = "hooks"  # there as well: what the hooks keep


@dataclass
class CheckpointEvaluation:
    """The evaluations of train_and_evaluate: one before each checkpoint, noted once the checkpoint is there."""

    measure: Callable[[State], dict[str, Any]]
    note: Callable[[dict[str, Any]], dict[str, Any]]  # takes each result with its number of updates
    throttle_seconds: float
    figures: Sequence[str] = ()  # the names of what it measures
    since: float = -math.inf
    found: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def __call__(self, state: State) -> Mapping[str, Any]:
        """The figures of a state that is about to be saved; none when the last ones are too young."""
        if processes.agreed(time.monotonic() - self.since < self.throttle_seconds):
            return {}
        self.found = self.measure({name: state[name] for name in INFERENCE_PARTS})
        self.since = time.monotonic()
        return self.found

    def note_checkpoint(self, step: int) -> None:
        if self.found:
            self.last, self.found = self.note({**self.found, "global_step": step}), {}


class HookRunner:
    """What happens between the calls of one training, as callbacks of `engine.drive`. A call comes in pieces: the hooks
    are handed the whole of it, while a summary takes pieces, so that what it holds can be saved where a call is cut."""

    def __init__(
        self, run: RunHandle, hooks: tuple[Hook, ...], config: RunConfig, plan: Plan, record: Any, saved: Any
    ):
        self.run, self.hooks, self.config, self.plan, self.record = run, hooks, config, plan, record
        self.ends = frozenset(plan.ends)
        self.summary = LogWindow(
            saved=saved
        )  # as it was open in the checkpoint that the training goes on from
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
        if self.pieces:
            pieces, self.pieces = self.pieces, []
            whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
            self.run.step = self.first + len(next(iter(whole.values())))
            tell(self.hooks, "after_call", self.run, self.first, whole)

    def after_evaluation(self, figures: Mapping[str, Any]) -> None:
        """Hand over the figures of process 0, so that the hooks of all agree; none where nothing was evaluated."""
        if self.hooks and (agreed := processes.agreed(dict(figures))):
            self.run.step = self.done
            tell(self.hooks, "after_evaluation", self.run, self.done, agreed)

    def note(self, event: str, **figures: Any) -> None:
        epoch = float(self.run.step / self.plan.updates_per_epoch)
        self.record.event(event, update=self.run.step, epoch=epoch, **figures)

    def on_log(self, event: Event, figures: Mapping[str, Any]) -> None:
        updates, self.logged = event.update - self.logged, event.update
        if speed := figures.get("throughput"):
            self.seconds += updates * self.plan.batch.global_ / speed
            self.updates += updates
        if self.waits_for_logs:
            self.run.step = event.update
            tell(self.hooks, "after_log", self.run, event.update, processes.agreed(dict(figures)))

    @property
    def waits_for_logs(self) -> bool:
        early = [hook for hook in self.hooks if isinstance(hook, EarlyStopping)]
        others = [hook for hook in self.hooks if hook not in early]
        return bool(early and not self.run.evaluates) or any(overrides(hook, "after_log") for hook in others)

    @property
    def returning(self) -> EarlyStopping | None:
        """The hook that has the training end with the best weights, if there is one."""
        return find_returning(self.hooks)

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


def find_returning(hooks: tuple[Hook, ...]) -> EarlyStopping | None:
    return next((hook for hook in hooks if isinstance(hook, EarlyStopping) and hook.restore_best), None)


@dataclass(frozen=True)
class KeepBestOf(Keep):
    """The step that an EarlyStopping would return to stays."""

    hook: EarlyStopping

    def choose(self, metrics: Metrics) -> set[int]:
        return {self.hook.best_step} & set(metrics) if self.hook.best_step is not None else set()


class HookedCheckpoints(Checkpoints):
    """Checkpoints that tell the hooks, and are whole on disk before the next call: a kill costs that call alone."""

    runner: HookRunner
    evaluation: CheckpointEvaluation | None
    last: tuple[int, Mapping[str, Any]]  # the newest step and its position

    def save(self, step: int, state: Any, *, position: Mapping[str, Any], **more: Any) -> None:
        if self.runner.config.summary_steps:
            position = {**position, SUMMARIES: self.runner.summary.as_saved()}
        if kept := collect_saved(self.runner.hooks):
            position = {**position, HOOKS: kept}
        self.last = step, position
        super().save(step, state, position=position, **more)
        self.wait()
        if self.evaluation is not None:
            self.evaluation.note_checkpoint(step)
        tell(self.runner.hooks, "on_checkpoint", self.runner.run, step)

    def return_to_best(self, state: State) -> None:
        """Give the newest step, whose state is `state`, the weights of the best one, where that is another."""
        hook, (step, position) = self.runner.returning, self.last
        if hook is None or hook.restored or hook.best_step in (None, step):
            return
        found = self.restore({name: state[name] for name in INFERENCE_PARTS}, hook.best_step, in_part=True)
        hook.restored = True
        position = {**position, HOOKS: collect_saved(self.runner.hooks)}
        super().save(step, {**state, **found.state}, position=position, metrics=found.metrics)
        self.wait()
        self.runner.run.step = step
        self.runner.note("best_restored", metric=hook.monitor, best=hook.best, best_update=hook.best_step)
        if self.evaluation is not None:
            self.evaluation.last = {}  # it was of the weights that are gone
