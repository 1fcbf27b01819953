"""What a training tells others between its compiled calls: `Hook`, for hooks of one's own, and `EarlyStopping`. Calls,
logs, evaluations and checkpoints are host events of the plan, so a hook hears of the same ones at the same updates in
every run; what it counts is kept in the checkpoints. It knows nothing of how a training is made, and imports no jax."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hotloop.errors import OptionError
from hotloop.families.estimator.config import (
    check_value,
    describe_kind,
    is_best_where_least,
    is_number,
    is_whole,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

CallFigures = Mapping[str, "NDArray[Any]"]
Figures = Mapping[str, Any]
NEEDED = ("begin", "after_call", "on_checkpoint", "end")


@dataclass
class RunHandle:
    """The training that hooks are part of."""

    estimator: Any
    step: int = 0  # weight updates made so far, in all runs of this model_dir
    target: int = 0
    stopped: bool = False
    evaluates: bool = False  # at its checkpoints: the training is part of train_and_evaluate
    by_steps: bool = False  # so many more updates were asked for, not so many in all
    note: Callable[..., object] = lambda event, **figures: None
    """`note("word", figure=1.5)` adds a record to events.jsonl, and a line for people."""

    def stop(self) -> None:
        """End the training, saved: after a log or an evaluation right there, else with the call that is under way."""
        self.stopped = True


class Hook:
    """What to do between calls: override what you need; an exception ends the training.

    >>> from hotloop import Hook
    >>> class Patience(Hook):
    ...     def after_call(self, run, first, metrics):
    ...         if metrics["loss"].mean() < 0.01:
    ...             run.stop()
    """

    def begin(self, run: RunHandle) -> None:
        """Before the first call."""

    def after_call(self, run: RunHandle, first: int, metrics: CallFigures) -> None:
        """After each call: every metric of each of its updates, the first of which was number `first`. The next call
        is under way by then, and `run.stop()` ends the training after that one."""

    def after_log(self, run: RunHandle, step: int, figures: Figures) -> None:
        """After each log: the mean of every metric since the last one, and the throughput. A training with a hook that
        overrides this waits for the log before it goes on, and `run.stop()` ends it at update `step`."""

    def after_evaluation(self, run: RunHandle, step: int, figures: Figures) -> None:
        """After each evaluation of train_and_evaluate: its loss and metrics; `run.stop()` ends it at update `step`."""

    def on_checkpoint(self, run: RunHandle, step: int) -> None:
        """A checkpoint of `step` updates is on disk."""

    def end(self, run: RunHandle) -> None:
        """After the last call, everything saved."""

    def to_save(self) -> Mapping[str, Any]:
        """What each checkpoint should keep of this hook: anything that JSON holds."""
        return {}

    def go_on_from(self, saved: Mapping[str, Any]) -> None:
        """Before `begin`: what the checkpoint kept that the training goes on from; nothing where it is a new one."""


class EarlyStopping(Hook):
    """End a training whose figure `monitor` has not become better, by more than `min_delta`, for `patience` evaluations
    in a row; in a `train` without evaluations, for so many logs.

    `mode` is "min" or "max", what is better; "auto" tells it from the name, as `keep_best` of a RunConfig does. With
    `restore_best` (which needs the evaluations of train_and_evaluate) the training ends with the weights of the best
    evaluation, however it ends; their checkpoint is kept. The counts are kept in the checkpoints: a training that goes
    on stops at the same update, and one that has been stopped stays so for `max_steps`; `steps=` begins to count anew.

    >>> from hotloop import EarlyStopping
    >>> EarlyStopping("accuracy", patience=3, restore_best=True).mode
    'max'
    """

    def __init__(
        self,
        monitor: str = "loss",
        *,
        patience: int = 1,
        min_delta: float = 0.0,
        mode: Literal["auto", "min", "max"] = "auto",
        restore_best: bool = False,
    ):
        for name, value, wanted, fits in (
            ("monitor", monitor, "the name of a metric", isinstance(monitor, str) and monitor != ""),
            ("patience", patience, "a whole number from 1", is_whole(patience) and patience > 0),
            (
                "min_delta",
                min_delta,
                "a number from 0",
                is_number(min_delta) and 0 <= min_delta < math.inf,
            ),
            ("mode", mode, "'auto' or 'min' or 'max'", mode in ("auto", "min", "max")),
            ("restore_best", restore_best, "True or False", isinstance(restore_best, bool)),
        ):
            check_value(f"EarlyStopping: {name}", value, wanted, bool(fits))
        self.monitor, self.patience, self.min_delta = monitor, int(patience), float(min_delta)
        least = is_best_where_least(monitor)
        self.mode = ("min" if least else "max") if mode == "auto" else mode
        self.restore_best = restore_best
        self._start_over()

    def _start_over(self) -> None:
        self.best: float | None = None
        self.best_step: int | None = None
        self.waited = 0  # evaluations, or logs, since the best one
        self.restored = False  # whether the newest checkpoint has the best weights in place of the last

    def check(self, known: Iterable[str], evaluates: bool) -> None:
        """Refuse a figure that the training will not have."""
        figures = list(known)
        if self.monitor not in figures:
            raise OptionError(
                f"EarlyStopping: monitor={self.monitor!r} is none of the model's figures: {', '.join(figures)}"
            )
        if self.restore_best and not evaluates:
            raise OptionError("EarlyStopping: restore_best needs the evaluations of train_and_evaluate")

    def begin(self, run: RunHandle) -> None:
        if self.waited >= self.patience and not run.by_steps:
            run.stop()
        elif self.waited >= self.patience:
            self._start_over()

    def after_log(self, run: RunHandle, step: int, figures: Figures) -> None:
        if not run.evaluates:
            self._look(run, step, figures)

    def after_evaluation(self, run: RunHandle, step: int, figures: Figures) -> None:
        self._look(run, step, figures)

    def _look(self, run: RunHandle, step: int, figures: Figures) -> None:
        value, self.restored = figures.get(self.monitor), False
        if self._is_better(value):
            self.best, self.best_step, self.waited = value, step, 0
            return
        self.waited += 1
        if self.waited == self.patience:
            run.note(
                "early_stop", metric=self.monitor, value=value, best=self.best, best_update=self.best_step
            )
        if self.waited >= self.patience:
            run.stop()

    def _is_better(self, value: Any) -> bool:
        if value is None or math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return bool(gain > self.min_delta)

    def to_save(self) -> Mapping[str, Any]:
        counts = {"best": self.best, "best_step": self.best_step, "waited": self.waited}
        return {"monitor": self.monitor, "mode": self.mode, "restored": self.restored, **counts}

    def go_on_from(self, saved: Mapping[str, Any]) -> None:
        self._start_over()
        if (saved.get("monitor"), saved.get("mode")) == (self.monitor, self.mode):
            self.best, self.best_step, self.waited = saved["best"], saved["best_step"], saved["waited"]
            self.restored = saved["restored"]


def check_hooks(hooks: Any) -> tuple[Hook, ...]:
    if not isinstance(hooks, Iterable):
        raise OptionError(f"hooks={describe_kind(hooks)}: must be a list of hooks, as hooks=[hook]")
    found = tuple(hooks)
    for hook in found:
        if isinstance(hook, type) or not all(hasattr(hook, name) for name in NEEDED):
            raise OptionError(
                f"hooks: {describe_kind(hook)} is no Hook: derive a class from Hook and give an object of it"
            )
    if len([hook for hook in found if isinstance(hook, EarlyStopping) and hook.restore_best]) > 1:
        raise OptionError("hooks: two EarlyStopping with restore_best: a training ends with one state")
    return found


def tell(hooks: Iterable[Any], word: str, *about: Any) -> None:
    """Call a method of each hook; those that are hooks by their methods alone may lack it."""
    for hook in hooks:
        if (method := getattr(hook, word, None)) is not None:
            method(*about)


def overrides(hook: Any, word: str) -> bool:
    return getattr(type(hook), word, None) not in (None, getattr(Hook, word))


def collect_saved(hooks: Iterable[Any]) -> dict[str, Any]:
    """What the hooks have to keep, each by its name."""
    return {name: dict(hook.to_save()) for name, hook in _by_name(hooks).items() if hasattr(hook, "to_save")}


def hand_back(hooks: Iterable[Any], saved: Mapping[str, Any]) -> None:
    for name, hook in _by_name(hooks).items():
        if hasattr(hook, "go_on_from"):
            hook.go_on_from(saved.get(name, {}))


def _by_name(hooks: Iterable[Any]) -> dict[str, Any]:
    """The kind of each, with a number where there are several of a kind."""
    found: dict[str, Any] = {}
    for hook in hooks:
        kind = type(hook).__qualname__
        found[f"{kind} {sum(name.startswith(f'{kind} ') for name in found)}"] = hook
    return found
