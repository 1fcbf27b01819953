"""Drive a program through a plan: calls on the device, and between them the host logs, validates, saves and stops.

Every log averages every update since the last one, times are of calls that were compiled before, and a checkpoint holds
all that a resumed run needs. A run that is "one call" for its host events should still move a progress bar and hear
Ctrl-C, so a call is dispatched in pieces of about a second; results do not depend on it. Several processes dispatch
the same pieces and stop after the same update: process 0 decides (`_decide`). It knows no family: what a metric means,
and how to validate, comes from the caller.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from hotloop import startup
from hotloop.engine import processes
from hotloop.engine.batch_sources import InputEnded
from hotloop.engine.checkpoint import Checkpoints, Restored
from hotloop.engine.checkpoint_folder import STOPPED
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
    """What a caller may add to a run, by keyword."""

    validate: Callable[[State], Figures] | None
    """The figures to record at the plan's validations, if any."""
    on_log: Callable[[Event, Figures], Figures | None] | None
    """Sees the figures of a log, and may add to them."""
    on_call: Callable[[int, Figures], None] | None
    """Sees every update's metrics, piece by piece, with the number of the first update."""
    latest: Collection[str]
    """Metrics whose last value is logged, not the mean: a learning rate, say."""
    guard: str | None
    """A metric that must stay finite: else the run stops with `Diverged`, and no state that is not finite is saved."""
    enough: Callable[[], bool] | None
    """Asked after the events of a call; where it says so the run ends there, saved, as if that had been the plan."""
    waits_for_logs: bool
    """A log is made before the next call is sent, so that one after which it is `enough` ends the run right there."""
    due: Callable[[int], Collection[Kind]] | None
    """Asked after every call of the plan which events should follow besides those planned: what goes by the clock."""


def drive(
    program: Program,
    plan: Plan,
    state: State,
    run: Run,
    checkpoints: Checkpoints | None = None,
    *,
    resumed: Restored | None = None,
    progress: Progress | None = None,
    report: str | Path | None = None,
    **callbacks: Unpack[Callbacks],
) -> State:
    """Make every call of the plan from `state`, or from where `resumed` stands, and return the last state.

    A log has the mean of every scalar metric and the throughput. A feed that ends (`InputEnded`) ends the run after its
    last batch, saved. `report` is a folder for the compiler's report and a profile of one piece. SIGINT and SIGTERM end
    in `Interrupted`: no validation begins any more, and a resumed run makes up for it.
    """
    driver = _Driver(program, plan, run, checkpoints, resumed, progress, report, **callbacks)
    if resumed is not None:
        program.feed.check_position(resumed.position["feed"])
    if resumed is not None or run.resumed:
        driver.note_resume()
    try:
        return driver.run_plan(state)
    finally:
        startup.start_again()


def check_position(position: Mapping[str, Any]) -> None:
    """A place to go on from: the feed's, and the sums of the log that was open. TypeError, KeyError if it is none."""
    LogWindow((), position["window"])
    figures = position["window"]["sums"].values()
    right = {*position.get(STOPPED, {"left": ()})["left"]} <= {*KINDS} and isinstance(position["feed"], dict)
    if not right or not all(isinstance(x, int | float | None) for x in figures):
        raise TypeError


class LogWindow:
    """What has happened since the last log: sums of every update's metrics, updates, and seconds of device work. It is
    kept in checkpoints, so that the first log after a resume averages what it would have averaged."""

    def __init__(self, latest: Collection[str] = (), saved: Mapping[str, Any] | None = None):
        self._latest = frozenset(latest)
        saved = saved or {"sums": {}, "updates": 0}
        # JSON has no NaN: a sum that was not finite comes back as nothing.
        self._sums = {name: math.nan if value is None else value for name, value in saved["sums"].items()}
        self.updates = int(saved["updates"])
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


@processes.JitTogether
def _is_finite(state: State) -> Any:
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))


class Pieces:
    """How many updates to dispatch at once: about a second of them.

    A program that runs any number of updates (no `usual_call`) follows the pace, in whole blocks of `block` updates;
    what they leave of a call is a piece of its own. One that compiles each number has few sizes, each a multiple of the
    one before: the first divides the usual call if a fitting divisor exists, a longer one is added only when pieces
    prove far too short, and what it leaves of a call is made in the sizes there are.
    """

    def __init__(self, longest: int, usual_call: int | None = None, block: int = 1):
        self._longest, self._free, self._block, self.sizes = longest, usual_call is None, block, [block]
        if usual_call is not None:
            first = min(FIRST_PIECE, longest, usual_call)
            divisor = closest_divisor(usual_call, first)
            self.sizes = [divisor if first / 2 <= divisor <= min(2 * first, longest) else first]

    def next(self, remaining: int) -> int:
        """The updates to dispatch now, of `remaining` ones in the call."""
        if self._free:
            count = min(self.sizes[-1], remaining)
            return count // self._block * self._block or count
        return max((size for size in self.sizes if size <= remaining), default=remaining)

    def learn(self, count: int, seconds: float) -> None:
        fitting = min(self._longest, max(1, round(count * TARGET_SECONDS / max(seconds, 1e-9))))
        longest = self.sizes[-1]
        if self._free:
            # A block that is somewhat too long is still sent whole: what is no block takes another program.
            self.sizes = [fitting if 4 * fitting <= self._block else max(fitting, self._block)]
        elif count == longest and fitting >= 4 * longest:
            self.sizes.append(fitting // longest * longest)
        elif count == longest and 4 * fitting <= longest:
            self.sizes = [closest_divisor(longest, fitting)]


def choose_pieces(program: Program, plan: Plan, state: State, start: int) -> Pieces:
    """Let the program know the calls that there will be, and cut them into pieces that it makes well; of the state its
    forms are enough."""
    longest, lengths = program.updates_per_call, plan.count_lengths(start)
    if lengths:
        program.fit(state, lengths)
    usual = None if program.any_count else min(plan.updates_per_call, longest)
    return Pieces(longest, usual, program.form.block if program.form else 1)


def compile_first_piece(program: Program, plan: Plan, forms: Any, start: int) -> None:
    """Trace what the first piece after `start` updates needs from the forms of a state, and let a thread compile it."""
    pieces = choose_pieces(program, plan, forms, start)
    if (span := next(plan.spans(start), None)) is not None:
        program.compile_ahead(forms, pieces.next(span.count))


class Landing:
    """When a piece was done, by the clock of a thread that waits for nothing else: to send the next piece may keep the
    sender until most of that has run, as a GPU's queue is short, and the end of this one would be seen late."""

    def __init__(self, metrics: CallMetrics, watcher: Executor):
        self._landed = watcher.submit(self._watch, metrics)

    @staticmethod
    def _watch(metrics: CallMetrics) -> float:
        metrics.wait()
        return time.perf_counter()

    def wait(self) -> float:
        """The time at which it was done; what went wrong on the device is raised here."""
        return self._landed.result()


@dataclass
class _Driver:
    """Keeps the device busy: the next piece is dispatched before the last one is waited for, and logged."""

    program: Program
    plan: Plan
    run: Run
    checkpoints: Checkpoints | None
    resumed: Restored | None
    progress: Progress | None
    report: str | Path | None
    validate: Callable[[State], Figures] | None = None
    on_log: Callable[[Event, Figures], Figures | None] | None = None
    on_call: Callable[[int, Figures], None] | None = None
    latest: Collection[str] = ()
    guard: str | None = None
    enough: Callable[[], bool] | None = None
    waits_for_logs: bool = False
    due: Callable[[int], Collection[Kind]] | None = None
    request: StopRequest = field(default_factory=StopRequest)
    stop: int | None = None
    """The signal that all processes stop for; None: they go on."""
    left: Sequence[Event] = ()
    """What a stop kept from being done after the update from which the run goes on."""
    flight: deque[tuple[int, int, CallMetrics, float, Landing]] = field(default_factory=deque)
    """First update, number, metrics, beginning and landing of each piece that is on its way."""
    logs: deque[Event] = field(default_factory=deque)
    """For when the piece before them has landed: they need no state."""
    fresh: dict[str, Any] = field(default_factory=dict)
    """Figures that describe the state as it now is."""
    saved_at: int | None = None
    free_since: float = 0.0
    lengths: list[int] = field(default_factory=list)
    """Calls that are still to be looked at for what they leave over."""
    watcher: Executor = field(init=False)
    """Sees pieces land."""
    first_compiled: dict[str, float] | None = None
    """What the run's first compilation kept it waiting for; nothing any more once its first update is on record."""

    def __post_init__(self) -> None:
        self.window = LogWindow(self.latest, self.resumed.position["window"] if self.resumed else None)
        # All processes wait for the piece that the first one profiles, so that they log after the same pieces.
        self.to_profile = bool(processes.agreed(self.report is not None))

    def note_resume(self) -> None:
        """Record where the run goes on, if it does not start over, and which checkpoints could not be used."""
        restored = self.resumed
        at = self._place(restored.step if restored else 0)
        self.run.event("resume", **at)  # readers drop what an earlier process got to beyond it
        if restored is None:
            message = "the run has no checkpoint yet, so it starts over"
            self.run.event("warning", **at, message=message, resumed=True)
            return
        for line in restored.skipped:
            self.run.event("warning", **at, message=line, resumed=True)
        stopped = restored.position.get(STOPPED)
        if stopped is not None:
            self.left = [Event(kind, **at, call=0) for kind in stopped["left"]]
            self.fresh = dict(restored.metrics)
            return
        self.saved_at = restored.step
        if not processes.is_writer():
            return
        records = current_records(read_events(self.run.path))
        if ("checkpoint", restored.step) not in [(record["event"], record["update"]) for record in records]:
            self.run.event("checkpoint", **at, seconds=0.0)  # a kill came right before this record

    def _place(self, update: int) -> dict[str, Any]:
        return {"update": update, "epoch": self.plan.epoch_at(update)}

    def run_plan(self, state: State) -> State:
        start = done = self.resumed.step if self.resumed else 0
        state = copy_state(self.resumed.state if self.resumed else state)
        self.pieces = choose_pieces(self.program, self.plan, state, start)
        self.lengths = [min(each, self.program.updates_per_call) for each in self.plan.count_lengths(start)]
        with (
            note_stops() as self.request,
            ThreadPoolExecutor(1, thread_name_prefix="hotloop-landings") as self.watcher,
        ):
            over = start in self.plan.ends and self._follow(state, start, self.left)
            while not over and (span := next(self.plan.spans(done), None)):
                self._decide()
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
                    kinds = {event.kind for event in events} | set(processes.agreed([*self.due(done)]))
                    at = self._place(done)
                    events = tuple(Event(kind, **at, call=span.call) for kind in KINDS if kind in kinds)
                self.logs += [event for event in events if event.kind == "log"]
                others = [event for event in events if event.kind != "log"]
                waits = others or (events and self.waits_for_logs) or self._asked() is not None
                self._collect(leave=0 if waits else 1)
                over = count == span.count and self._follow(state, done, others)
            self._collect(leave=0)
            if self.checkpoints is not None:
                self.checkpoints.wait()
            self._decide()
            self._stop_if_asked(state, done)
            return state

    def _decide(self) -> None:
        """Of several processes the first decides for all whether they stop here, and how long the next pieces are."""
        if processes.count() > 1:
            self.stop, self.pieces.sizes = processes.agreed([self.request.number, self.pieces.sizes])
            if self.stop is not None:
                processes.agree_to_stop()
                self.request.number = self.request.number or self.stop  # or it is passed on once more later

    def _asked(self) -> int | None:
        """The signal to stop for: one process hears it at once, several when the first has said so."""
        return self.request.number if processes.count() == 1 else self.stop

    def _dispatch(self, state: State, done: int, count: int, *, profile: bool) -> State:
        """Compile and send a piece; the second one of a run, or the only one, is profiled where that was asked for."""
        self._stop_if_asked(state, done)
        program = self.program
        if program.missing(count):
            self._compile(state, done, count)
            self._decide()
            self._stop_if_asked(state, done)
        elif self.lengths:
            self._compile_rests(state)
        profiled = self.to_profile and profile
        if profiled:
            self._collect(leave=0)
        traced = self.report if profiled else None
        with nullcontext() if traced is None else trace_program(traced, "training") as trace:
            began = time.perf_counter()
            ahead = next(self.plan.spans(done + count), None)
            following = self.pieces.next(ahead.count) if ahead else 0
            state, metrics = program(state, done, count, following)
            self.flight.append((done, count, metrics, began, Landing(metrics, self.watcher)))
            if profiled:
                self._collect(leave=0)
        if profiled:
            self.to_profile = False
        if traced is not None:
            self.run.event("profile", **self._place(done + count), updates=count, folder=str(trace))
        return state

    def _compile(self, state: State, done: int, count: int) -> None:
        """Have what the next piece needs, and record how long that took."""
        program, at = self.program, self._place(done)
        self._collect(leave=0)  # or the piece in flight would be timed together with the compiler
        before = program.lower_seconds, program.compile_seconds
        capacity, ahead = max(form.capacity for form in program.missing(count)), program.is_ahead(count)
        began = time.perf_counter()
        program.compile(state, count)
        waited = time.perf_counter() - began
        spent = {
            "lower_seconds": program.lower_seconds - before[0],
            "compile_seconds": program.compile_seconds - before[1],
        }
        if self.first_compiled is None:
            self.first_compiled = {**spent, "compile_seconds": waited} if ahead else spent
        at |= {"updates_per_call": capacity, **spent}
        if ahead:
            at["ahead"] = True
        if program.native_calls:
            at["native_calls"] = program.native_calls
        if program.compiler_options:
            at["compiler_options"] = program.compiler_options
        self.run.event("compile", **at)
        if self.report is not None:
            write_program_report(self.report, program.compiled, sum(spent.values()), "training")

    def _compile_rests(self, state: State) -> None:
        """Now that the first piece is made: what calls of the plan leave over may be compiled while others run."""
        lengths, self.lengths = self.lengths, []
        if any(map(self.program.missing, lengths)) and self.program.any_count:
            self._collect(leave=0)  # or the piece in flight would be timed together with the tracing
            for length in lengths:
                self.program.compile_ahead(state, length)

    def _collect(self, leave: int) -> None:
        """Wait until no more than `leave` pieces are in flight, and take in what the others bring."""
        while len(self.flight) > leave:
            first, count, waiting, began, landing = self.flight.popleft()
            now = landing.wait()
            metrics = dict(waiting)
            # A piece that was sent while the one before it ran began when that one ended.
            seconds, self.free_since = now - max(began, self.free_since), now
            if processes.is_writer():
                self.pieces.learn(count, seconds)
            if self.guard is not None:
                bad = np.flatnonzero(~np.isfinite(metrics[self.guard]))
                if bad.size:
                    update, value = first + int(bad[0]) + 1, metrics[self.guard][bad[0]]
                    raise Diverged(f"{self.guard} is {value} at update {update}: {self._advise()}", update)
            self.window.add(metrics, count, seconds)
            self.run.reach(**self._place(first + count))
            processes.note("training", first + count)
            if self.first_compiled:
                self._record_first(first + count, count, now - began)
            self.fresh = {}
            if self.on_call:
                self.on_call(first, metrics)
            if self.progress:
                self.progress.advance(count)
            self._log(first + count)
        if not self.flight:
            self._log(self.plan.total_updates)

    def _record_first(self, done: int, count: int, seconds: float) -> None:
        """What it took from the command to the end of the first piece."""
        figures: dict[str, Any] = {"updates": count, "seconds": startup.seconds(), "call_seconds": seconds}
        figures |= {**(self.first_compiled or {}), "parts": startup.parts()}
        self.run.event("first_update", **self._place(done), **figures)
        self.first_compiled = {}

    def _log(self, done: int) -> None:
        while self.logs and self.logs[0].update <= done:
            self._handle(self.logs.popleft(), None)

    def _handle(self, event: Event, state: State) -> None:
        """Do what the plan asks for here; a log needs no state."""
        match event.kind:
            case "log":
                logged: dict[str, Any] = self.window.figures(self.program.feed.batch_size)
                self.window = LogWindow(self.latest)
                logged |= (self.on_log(event, logged) if self.on_log else None) or {}
                self.run.event("log", **self._place(event.update), **logged)
                self.fresh |= logged
            case "validate" if self.validate:
                if figures := dict(self.validate(state)):
                    self.fresh |= figures
                    self.run.event("validation", **self._place(event.update), **figures)
            case "checkpoint":
                self._save(state, event.update)

    def _follow(self, state: State, done: int, events: Sequence[Event]) -> bool:
        """What comes after a call; whether the run ends here because it is enough."""
        for place, event in enumerate(events):
            if event.kind == "validate":
                self._decide()
                self._stop_if_asked(state, done, events[place:])
            self._handle(event, state)
        if not (self.enough and processes.agreed(bool(self.enough()))):
            return False
        planned = {mark.kind for mark in self.plan.marks if done in mark.updates}
        self._close(state, done, planned.union(event.kind for event in events))
        return True

    def _close(self, state: State, done: int, handled: Collection[Kind]) -> None:
        """End before the plan does: what its last update would have been followed by, less what already has."""
        at = self._place(done)
        self._collect(leave=0)
        if self.window.updates:
            self._handle(Event("log", **at, call=0), state)
        if "validate" not in handled:
            left = Event("validate", **at, call=0), Event("checkpoint", **at, call=0)
            self._decide()
            self._stop_if_asked(state, done, left)
            self._handle(left[0], state)
        if self.saved_at != done:
            self._save(state, done)

    def _save(self, state: State, update: int, event: str = "checkpoint", **more: Any) -> None:
        """Start writing a state; its metrics are the figures of the log and the validation right before it."""
        if self.checkpoints is None:
            return
        if self.guard is not None and not _is_finite(state):
            raise Diverged(f"the state is not finite after update {update}: {self._advise()}")
        started = time.perf_counter()
        processes.note("saving", update)
        position = {"window": self.window.as_saved(), "feed": self.program.feed.position(update), **more}
        self.checkpoints.save(update, state, position=position, metrics=self.fresh)
        self.saved_at = update
        self.run.event(event, **self._place(update), seconds=time.perf_counter() - started)

    def _stop_if_asked(self, state: State, done: int, left: Sequence[Event] = ()) -> None:
        """Where a stop was asked for: take in what is in flight, save it with what is left to do there, and leave."""
        number = self._asked()
        if number is None:
            return
        self._collect(leave=0)
        place = f"interrupted after update {done:,} of {self.plan.total_updates:,}"
        if self.checkpoints is None:
            text = f"{place}: nothing was saved, since this run keeps no checkpoints"
        elif done == 0:
            text = f"interrupted before the first update; to resume: {self.run.how_to_resume}"
        else:
            if self.saved_at != done:
                self._save(state, done, "stop", **{STOPPED: {"left": [event.kind for event in left]}})
            self.checkpoints.wait()
            text = f"{place}, saved in {self.checkpoints.folder}; to resume: {self.run.how_to_resume}"
        raise Interrupted(text, done, number)

    def _advise(self) -> str:
        kept = "no checkpoint was written before"
        if self.checkpoints is not None:
            self.checkpoints.wait()
            if steps := self.checkpoints.steps():
                kept = f"the last good checkpoint is step {steps[-1]}"
        return f"lower the learning rate or scale the loss; {kept}"
