"""What the host does between calls: log, validate, save, and stop when asked or when the numbers go wrong.

Everything goes into the run's records first. It must not know how calls are dispatched or timed, nor what a metric
means.
"""

import math
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.engine.checkpoint import STOPPED, Checkpoints, Restored
from hotloop.engine.feed import Feed
from hotloop.engine.interrupt import Interrupted
from hotloop.engine.loop import CallMetrics, State
from hotloop.engine.plan import Event, Plan
from hotloop.engine.records import current_records, read_events
from hotloop.engine.run import Run
from hotloop.errors import HotloopError

Figures = Mapping[str, Any]


class Diverged(HotloopError):
    """The watched metric, or the state, is not finite any more; the message says where and what to do."""

    def __init__(self, message: str, update: int | None = None):
        super().__init__(message)
        self.update = update
        """The number of the update whose metric is not finite, from 1, where one is known."""


class LogWindow:
    """What has happened since the last log: sums of every update's metrics, updates, and seconds of device work.

    Metrics in `latest` (a learning rate, say) report their last value. A window is kept in checkpoints, so that the
    first log after a resume averages what it would have averaged.
    """

    def __init__(self, latest: Collection[str] = (), saved: Mapping[str, Any] | None = None):
        self._latest = frozenset(latest)
        saved = saved or {"sums": {}, "updates": 0}
        # JSON has no NaN: a sum that was not finite comes back as nothing.
        self._sums = {name: math.nan if value is None else value for name, value in saved["sums"].items()}
        self.updates = int(saved["updates"])
        self._timed_updates, self._seconds = 0, 0.0

    @property
    def empty(self) -> bool:
        return self.updates == 0

    def clear(self) -> None:
        self._sums, self.updates = {}, 0
        self._timed_updates, self._seconds = 0, 0.0

    def add(self, metrics: Mapping[str, "np.ndarray[Any, Any]"], count: int, seconds: float) -> None:
        """Take in one call of `count` updates; metrics that are arrays for each update are left out."""
        for name, values in metrics.items():
            if values.ndim == 1 and name in self._latest:
                self._sums[name] = float(values[-1])
            elif values.ndim == 1:
                # One value after the other, so that no bit depends on how updates were cut into pieces.
                together = np.append(self._sums.get(name, 0.0), values.astype(np.float64))
                self._sums[name] = float(np.add.accumulate(together)[-1])
        self.updates += count
        self._timed_updates += count
        self._seconds += seconds

    def figures(self, batch_size: int) -> dict[str, float]:
        """Means since the last log, and samples a second of the calls that this process made."""
        # Not `updates`: those that an earlier process made and saved in the window have no seconds here.
        speed = batch_size * self._timed_updates / self._seconds if self._seconds else 0.0
        return {**self.means(), "throughput": speed}

    def means(self) -> dict[str, float]:
        return {
            name: value if name in self._latest else value / self.updates
            for name, value in self._sums.items()
        }

    def as_saved(self) -> dict[str, Any]:
        """The window as a checkpoint keeps it: without times, which belong to one process."""
        return {"sums": self._sums, "updates": self.updates}


@dataclass
class HostEvents:
    """The host's part of a run; `drive` says what each part means."""

    run: Run
    plan: Plan
    checkpoints: Checkpoints | None
    feed: Feed
    window: LogWindow
    validate: Callable[[State], Figures] | None
    on_log: Callable[[Event, Figures], Figures | None] | None
    guard: str | None
    left: list[Event] = field(default_factory=list)
    """What a stop kept from being done after the update from which the run goes on."""
    _fresh: dict[str, Any] = field(default_factory=dict)  # figures that describe the state as it now is
    _saved_at: int | None = None

    def record(self, event: str, update: int, **figures: Any) -> None:
        """Record something that happened after `update` updates."""
        self.run.event(event, update=update, epoch=self.plan.epoch_at(update), **figures)

    def note_resume(self, restored: Restored | None) -> None:
        """Record where the run goes on (None: it starts over), and which checkpoints could not be used."""
        if restored is None:  # readers drop what an earlier process got to, since it is now run again
            self.record("resume", 0)
            message = "the run has no checkpoint yet, so it starts over"
            self.record("warning", 0, message=message, resumed=True)
            return
        stopped = restored.position.get(STOPPED)
        if stopped is None:
            self._saved_at = restored.step
        else:
            epoch = self.plan.epoch_at(restored.step)
            self.left = [Event(kind, restored.step, epoch, 0) for kind in stopped["left"]]
            self._fresh = dict(restored.metrics)
        self.record("resume", restored.step)
        for line in restored.skipped:
            self.record("warning", restored.step, message=line, resumed=True)
        found = [
            (record["event"], record["update"]) for record in current_records(read_events(self.run.path))
        ]
        if stopped is None and ("checkpoint", restored.step) not in found:
            self.record("checkpoint", restored.step, seconds=0.0)  # a kill came right before this record

    def take_piece(self, first: int, metrics: CallMetrics, count: int, seconds: float) -> None:
        """Add a finished piece to the window, once the guard has seen it."""
        if self.guard is not None:
            bad = np.flatnonzero(~np.isfinite(metrics[self.guard]))
            if bad.size:
                update = first + int(bad[0]) + 1
                value = metrics[self.guard][bad[0]]
                raise Diverged(f"{self.guard} is {value} at update {update}: {self._advise()}", update)
        self.window.add(metrics, count, seconds)
        self.run.reach(first + count, self.plan.epoch_at(first + count))
        self._fresh = {}

    def handle(self, event: Event, state: State) -> None:
        """Do what the plan asks for here; a log needs no state."""
        match event.kind:
            case "log":
                self._log(event)
            case "validate" if self.validate:
                if figures := dict(self.validate(state)):
                    self._fresh |= figures
                    self.record("validation", event.update, **figures)
            case "checkpoint":
                self._save(state, event.update)

    def _log(self, event: Event) -> None:
        figures: dict[str, Any] = self.window.figures(self.feed.batch_size)
        figures |= (self.on_log(event, figures) if self.on_log else None) or {}
        self.record("log", event.update, **figures)
        self._fresh |= figures
        self.window.clear()

    def _save(self, state: State, update: int) -> None:
        if self.checkpoints is not None:
            self.record("checkpoint", update, seconds=self._write(self.checkpoints, state, update, {}))

    def _write(self, checkpoints: Checkpoints, state: State, update: int, more: Mapping[str, Any]) -> float:
        """Start writing a state with its position and `more`; the seconds that took.

        Its metrics are the figures of the log and the validation right before it.
        """
        if self.guard is not None and not _is_finite(state):
            raise Diverged(f"the state is not finite after update {update}: {self._advise()}")
        started = time.perf_counter()
        position = {"feed": self.feed.position(update), "window": self.window.as_saved(), **more}
        checkpoints.save(update, state, position=position, metrics=self._fresh)
        self._saved_at = update
        return time.perf_counter() - started

    def save_once(self, state: State, update: int) -> None:
        """Save, unless the last event did."""
        if self._saved_at != update:
            self._save(state, update)

    def wait(self) -> None:
        """Return when everything is on disk."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def stop(self, state: State, update: int, left: Sequence[Event], number: int | None) -> NoReturn:
        """Save where the run stands, and what is left to do there, and leave."""
        place = f"interrupted after update {update:,} of {self.plan.total_updates:,}"
        if self.checkpoints is None:
            text = f"{place}: nothing was saved, since this run keeps no checkpoints"
        elif update == 0:
            text = f"interrupted before the first update; to resume: {self.run.how_to_resume}"
        else:
            if self._saved_at != update:
                kinds = [event.kind for event in left]
                seconds = self._write(self.checkpoints, state, update, {STOPPED: {"left": kinds}})
                self.record("stop", update, seconds=seconds)
            self.wait()
            text = f"{place}, saved in {self.checkpoints.folder}; to resume: {self.run.how_to_resume}"
        raise Interrupted(text, update, signal.SIGINT if number is None else number)

    def _advise(self) -> str:
        self.wait()
        steps = self.checkpoints.steps() if self.checkpoints else []
        kept = (
            f"the last good checkpoint is step {steps[-1]}" if steps else "no checkpoint was written before"
        )
        return f"lower the learning rate or scale the loss; {kept}"


@jax.jit
def _is_finite(state: State) -> Any:
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))
