"""Drive a program through a plan: calls on the device, and between them the host logs, validates, saves and stops.

Every log averages every update since the last one, times are of calls that were compiled before, a checkpoint holds
all that a resumed run needs, and a run that is asked to stop does so at the end of a piece, saved. A run that is "one
call" for its host events should still move a progress bar and hear Ctrl-C, so a call is dispatched in pieces of about
a second; results do not depend on it. It knows no family: what a metric means, and how to validate, comes from the
caller.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.engine.batch_sources import InputEnded
from hotloop.engine.checkpoint import STOPPED, Checkpoints, Restored
from hotloop.engine.feed import Feed
from hotloop.engine.interrupt import Interrupted, StopRequest, note_stops
from hotloop.engine.loop import CallMetrics, Program, State, copy_state
from hotloop.engine.measure import trace_program, write_program_report
from hotloop.engine.plan import KINDS, Event, Kind, Plan, closest_divisor
from hotloop.engine.progress import Progress
from hotloop.engine.run import Run, current_records, read_events
from hotloop.errors import HotloopError

__all__ = ["Callbacks", "Diverged", "Interrupted", "drive"]

Figures = Mapping[str, Any]
TARGET_SECONDS = 1.0
FIRST_PIECE = 16
"""Updates in the first piece of a program that compiles each number of updates: long enough to learn the pace from."""


class Diverged(HotloopError):
    """The watched metric, or the state, is not finite any more; the message says where and what to do."""

    def __init__(self, message: str, update: int | None = None):
        super().__init__(message)
        self.update = update
        """The number of the update whose metric is not finite, from 1, where one is known."""


class Callbacks(TypedDict, total=False):
    """What a caller may add to a run, by keyword; `drive` says what each of them does."""

    validate: Callable[[State], Figures] | None
    on_log: Callable[[Event, Figures], Figures | None] | None
    on_call: Callable[[int, Figures], None] | None
    latest: Collection[str]
    guard: str | None
    enough: Callable[[], bool] | None
    due: Callable[[int], Collection[Kind]] | None


def drive(
    program: Program,
    plan: Plan,
    state: State,
    run: Run,
    checkpoints: Checkpoints | None = None,
    *,
    resumed: Restored | None = None,
    validate: Callable[[State], Figures] | None = None,
    on_log: Callable[[Event, Figures], Figures | None] | None = None,
    on_call: Callable[[int, Figures], None] | None = None,
    latest: Collection[str] = (),
    guard: str | None = None,
    enough: Callable[[], bool] | None = None,
    due: Callable[[int], Collection[Kind]] | None = None,
    progress: Progress | None = None,
    report: str | Path | None = None,
    how_to_resume: str = "give the same command again with --resume",
) -> State:
    """Make every call of the plan from `state`, or from where `resumed` stands, and return the last state.

    After the updates that the plan names: `log` records the mean of every scalar metric (the last value of
    those in `latest`), the throughput, and whatever `on_log` adds; `validate` records what `validate(state)`
    returns, if anything; `checkpoint` saves. `on_call` sees every update's metrics, piece by piece. `guard` names a
    metric that must stay finite: if it does not the run stops with `Diverged`, and no state that is not
    finite is saved. `enough` is asked after the events of a call; where it says so the run ends there, saved, as if
    that had been the plan. `due` is asked after every call of the plan which events should follow besides those
    planned: for what goes by the clock. A feed that ends (`InputEnded`) ends the run after its last batch, saved.
    `report` is a folder for the compiler's report and a profile of one piece. SIGINT and SIGTERM end in `Interrupted`:
    no validation begins any more, and a resumed run makes up for it.
    """
    update = resumed.step if resumed else 0
    window = LogWindow(latest, resumed.position["window"] if resumed else None)
    run.how_to_resume = how_to_resume
    host = HostEvents(run, plan, checkpoints, program.feed, window, validate, on_log, guard)
    if resumed is not None:
        program.feed.check_position(resumed.position["feed"])
    if resumed is not None or run.resumed:
        host.note_resume(resumed)
    with note_stops() as request:
        driver = _Driver(program, plan, host, request, on_call, progress, enough, due, report)
        return driver.run(copy_state(resumed.state if resumed else state), update)


def check_position(position: Mapping[str, Any]) -> None:
    """A place to go on from: the feed's, and the sums of the log that was open. TypeError, KeyError if it is none."""
    LogWindow((), position["window"])
    figures = position["window"]["sums"].values()
    if not {*position.get(STOPPED, {"left": ()})["left"]} <= {*KINDS}:
        raise TypeError
    if not isinstance(position["feed"], dict) or not all(isinstance(x, int | float | None) for x in figures):
        raise TypeError


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

    def take_piece(self, first: int, metrics: Figures, count: int, seconds: float) -> None:
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
                logged: dict[str, Any] = self.window.figures(self.feed.batch_size)
                logged |= (self.on_log(event, logged) if self.on_log else None) or {}
                self.record("log", event.update, **logged)
                self._fresh |= logged
                self.window.clear()
            case "validate" if self.validate:
                if figures := dict(self.validate(state)):
                    self._fresh |= figures
                    self.record("validation", event.update, **figures)
            case "checkpoint":
                self._save(state, event.update)

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
        if self._saved_at != update:
            self._save(state, update)

    def wait(self) -> None:
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


class FreePieces:
    """For programs that run any number of updates without compiling again: pieces follow the pace."""

    def __init__(self, longest: int):
        self._longest = longest
        self._size = 1

    def next(self, remaining: int) -> int:
        """The updates to dispatch now, of `remaining` ones in the call."""
        return min(self._size, remaining)

    def learn(self, count: int, seconds: float) -> None:
        self._size = _fit_size(count, seconds, self._longest)


class CompiledPieces:
    """For programs that compile each number of updates: few sizes, each a multiple of the one before.

    The first divides the usual call if a fitting divisor exists. A longer size is added only when pieces
    prove far too short, and what it leaves of a call is made in pieces of the sizes that are compiled
    already.
    """

    def __init__(self, longest: int, usual_call: int):
        self._longest = longest
        first = min(FIRST_PIECE, longest, usual_call)
        divisor = closest_divisor(usual_call, first)
        self._sizes = [divisor if first / 2 <= divisor <= min(2 * first, longest) else first]

    def next(self, remaining: int) -> int:
        """The updates to dispatch now, of `remaining` ones in the call."""
        return max((size for size in self._sizes if size <= remaining), default=remaining)

    def learn(self, count: int, seconds: float) -> None:
        """Add a longer size, or go back to a shorter one, where a piece was far from a second."""
        longest = self._sizes[-1]
        if count != longest:
            return
        fitting = _fit_size(count, seconds, self._longest)
        if fitting >= 4 * longest:
            self._sizes.append(fitting // longest * longest)
        elif 4 * fitting <= longest:
            self._sizes = [closest_divisor(longest, fitting)]


def _fit_size(count: int, seconds: float, longest: int) -> int:
    return min(longest, max(1, round(count * TARGET_SECONDS / max(seconds, 1e-9))))


class _Piece(NamedTuple):
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    metrics: CallMetrics
    began: float


class _Driver:
    """Keeps the device busy: the next piece is dispatched before the last one is waited for, and logged."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        host: HostEvents,
        request: StopRequest,
        on_call: Callable[[int, Figures], None] | None,
        progress: Progress | None,
        enough: Callable[[], bool] | None,
        due: Callable[[int], Collection[Kind]] | None,
        report: str | Path | None,
    ):
        self.program, self.plan, self.host, self.request = program, plan, host, request
        self.on_call, self.progress, self.enough, self.due = on_call, progress, enough, due
        self.report = self.to_profile = report
        longest = program.updates_per_call
        self.pieces = (
            FreePieces(longest)
            if program.any_count
            else CompiledPieces(longest, min(plan.updates_per_call, longest))
        )
        self.flight: deque[_Piece] = deque()
        self.logs: deque[Event] = deque()  # for when the piece before them has landed: they need no state
        self.free_since = 0.0

    def run(self, state: State, start: int) -> State:
        done = start
        over = start in self.plan.ends and self._follow(state, start, self.host.left)
        while not over and (span := next(self.plan.spans(done), None)):
            count = self.pieces.next(span.count)
            last = done + count == self.plan.total_updates
            try:
                state = self._dispatch(state, done, count, profile=done > start or last)
            except InputEnded as end:
                if end.left:
                    state = self._dispatch(state, done, end.left, profile=True)
                self._close(state, done + end.left, ())
                break
            done += count
            events = span.events if count == span.count else ()
            if self.due and count == span.count:  # beside what is planned, what goes by the clock
                kinds = {event.kind for event in events} | set(self.due(done))
                epoch = self.plan.epoch_at(done)
                events = tuple(Event(kind, done, epoch, span.call) for kind in KINDS if kind in kinds)
            self.logs += [event for event in events if event.kind == "log"]
            others = [event for event in events if event.kind != "log"]
            self._collect(leave=0 if self.request.made or others else 1)
            over = count == span.count and self._follow(state, done, others)
        self._collect(leave=0)
        self.host.wait()
        self._stop_if_asked(state, done)
        return state

    def _follow(self, state: State, done: int, events: Sequence[Event]) -> bool:
        """What comes after a call; whether the run ends here because it is enough."""
        for place, event in enumerate(events):
            if event.kind == "validate":
                self._stop_if_asked(state, done, events[place:])
            self.host.handle(event, state)
        if not (self.enough and self.enough()):
            return False
        planned = {mark.kind for mark in self.plan.marks if done in mark.updates}
        self._close(state, done, planned.union(event.kind for event in events))
        return True

    def _stop_if_asked(self, state: State, done: int, left: Sequence[Event] = ()) -> None:
        """Where a stop was asked for: take in what is in flight, log what is due, save and leave."""
        if self.request.made:
            self._collect(leave=0)
            self.host.stop(state, done, left, self.request.number)

    def _dispatch(self, state: State, done: int, count: int, *, profile: bool) -> State:
        """Compile and send a piece; the second one of a run, or the only one, is profiled where that was asked for."""
        self._stop_if_asked(state, done)
        if not self.program.is_compiled(count):
            self._collect(leave=0)  # or the piece in flight would be timed together with the compiler
            before = self.program.lower_seconds, self.program.compile_seconds
            self.program.compile(state, count)
            lowering = self.program.lower_seconds - before[0]
            compiling = self.program.compile_seconds - before[1]
            longest = self.program.updates_per_call if self.program.any_count else count
            seconds = {"lower_seconds": lowering, "compile_seconds": compiling}
            self.host.record("compile", done, updates_per_call=longest, **seconds)
            if self.report is not None:
                write_program_report(self.report, self.program.compiled, lowering + compiling, "training")
            self._stop_if_asked(state, done)
        profiled = self.to_profile if profile else None
        if profiled:
            self._collect(leave=0)
        with trace_program(profiled, "training") if profiled else nullcontext() as trace:
            began = time.perf_counter()
            ahead = next(self.plan.spans(done + count), None)
            following = self.pieces.next(ahead.count) if ahead else 0
            state, metrics = self.program(state, done, count, following)
            self.flight.append(_Piece(done, count, metrics, began))
            if profiled:
                self._collect(leave=0)
        if profiled:
            self.to_profile = None
            self.host.record("profile", done + count, updates=count, folder=str(trace))
        return state

    def _close(self, state: State, done: int, handled: Collection[Kind]) -> None:
        """End before the plan does: what its last update would have been followed by, less what already has."""
        epoch = self.plan.epoch_at(done)
        self._collect(leave=0)
        if not self.host.window.empty:
            self.host.handle(Event("log", done, epoch, 0), state)
        if "validate" not in handled:
            left = Event("validate", done, epoch, 0), Event("checkpoint", done, epoch, 0)
            self._stop_if_asked(state, done, left)
            self.host.handle(left[0], state)
        self.host.save_once(state, done)

    def _collect(self, leave: int) -> None:
        """Wait until no more than `leave` pieces are in flight, and take in what the others bring."""
        while len(self.flight) > leave:
            piece = self.flight.popleft()
            piece.metrics.wait()
            now = time.perf_counter()
            metrics = piece.metrics.fetch()
            # A piece that was sent while the one before it ran began when that one ended.
            seconds = now - max(piece.began, self.free_since)
            self.free_since = now
            self.pieces.learn(piece.count, seconds)
            self.host.take_piece(piece.first, metrics, piece.count, seconds)
            if self.on_call:
                self.on_call(piece.first, metrics)
            if self.progress:
                self.progress.advance(piece.count)
            self._log(piece.first + piece.count)
        if not self.flight:
            self._log(self.plan.total_updates)

    def _log(self, done: int) -> None:
        while self.logs and self.logs[0].update <= done:
            self.host.handle(self.logs.popleft(), None)
