"""The clock of a training: how fast its logs say it was, and which events are due by seconds.

The evaluations of train_and_evaluate: one before each checkpoint, noted once the checkpoint is there.
One `train` call of an estimator: resume, plan, drive, with hooks between the calls.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.engine import measure as reports
from hotloop.engine.batch import Batch
from hotloop.engine.checkpoint import Keep, KeepBest, KeepLast, Restored
from hotloop.engine.drive import drive
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import CallMetrics, Program
from hotloop.engine.plan import Event, Kind, Mark, Plan
from hotloop.engine.progress import Show, compiling
from hotloop.engine.records import read_events, read_json
from hotloop.engine.run import Run
from hotloop.engine.sinks import ConsoleSink, Sink, TensorBoardSink
from hotloop.errors import CheckpointError, DataError, MissingExtra
from hotloop.families.estimator import step
from hotloop.families.estimator.config import RunConfig
from hotloop.families.estimator.hooks import (
    SUMMARIES,
    CallCollector,
    Hook,
    HookedCheckpoints,
    RunHandle,
    SummaryRecorder,
)
from hotloop.families.estimator.inputs import Source
from hotloop.families.estimator.programs import FAMILY
from hotloop.families.estimator.step import Job, State
from hotloop.options import to_jsonable


@dataclass
class SpeedMeter:
    """What the logs said about speed."""

    batch_size: int
    seconds: float = 0.0
    updates: int = 0
    _last: int = 0

    def start(self, step: int) -> None:
        """Where this process begins."""
        self._last = step

    def __call__(self, event: Event, figures: Mapping[str, Any]) -> None:
        """Take a log in."""
        updates, self._last = event.update - self._last, event.update
        if speed := figures.get("throughput"):
            self.seconds += updates * self.batch_size / speed
            self.updates += updates

    def figures(self) -> dict[str, Any]:
        """Updates and seconds of all logs, and samples a second."""
        speed = self.batch_size * self.updates / self.seconds if self.seconds else None
        return {"updates": self.updates, "training_seconds": self.seconds, "images_per_second": speed}


@dataclass
class EventTimer:
    """Which events are due by the clock."""

    log: float | None
    checkpoint: float | None
    validates: bool
    _since: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since = {"log": time.monotonic(), "checkpoint": time.monotonic()}

    def __call__(self, update: int) -> list[Kind]:
        """Asked after each call."""
        now, due = time.monotonic(), list[Kind]()
        if self.log is not None and now - self._since["log"] >= self.log:
            self._since["log"] = now
            due.append("log")
        if self.checkpoint is not None and now - self._since["checkpoint"] >= self.checkpoint:
            self._since["checkpoint"] = now
            due += ["validate", "checkpoint"] if self.validates else ["checkpoint"]
        return due


class CheckpointEvaluation(Hook):
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
        self._found = self._measure({name: state[name] for name in step.INFERENCE_PARTS})
        self._since = time.monotonic()
        return self._found

    def on_checkpoint(self, run: RunHandle, step: int) -> None:
        """Now the number of updates is known."""
        if self._found:
            self.last = self._note({**self._found, "global_step": step})
            self._found = {}


WITHOUT_END = 10**6
"""Updates after which the training of an input of unknown length ends, when no number of steps is given."""


def make_plan(config: RunConfig, source: Source, target: int, validates: bool) -> Plan:
    """Calls and events up to `target` updates."""
    parts = config.replicas * config.accumulation
    batch = Batch(source.batch_size // parts, config.replicas, config.accumulation)
    ends: dict[Kind, int | None] = {"log": config.log_steps, "checkpoint": config.checkpoint_steps}
    if validates:
        ends["validate"] = config.checkpoint_steps
    marks = [Mark(kind, range(every, target, every)) for kind, every in ends.items() if every]
    marks += [Mark(kind, range(target, target + 1)) for kind in ends]
    length = (
        Fraction(source.samples, source.batch_size) if source.samples else getattr(source, "length", None)
    )
    epoch = Fraction(length or max(target, 1))
    longest = config.iterations_per_call
    return Plan(target, epoch, batch, tuple(marks), samples=source.samples, longest_call=longest)


def find_target(source: Source, step: int, steps: int | None, max_steps: int | None) -> int:
    """The number of updates to end at; without a number, where a pass over the input ends."""
    if max_steps is not None:
        return max_steps
    if steps is not None:
        return step + steps
    if source.samples is not None:
        raise DataError("arrays have no end: give steps or max_steps")
    length = getattr(source, "length", None)
    return step + (length - step % length if length else WITHOUT_END)


def is_closed(folder: Path) -> bool:
    """Whether the records of a model_dir, if there are any, end as those of a training that nothing disturbed."""
    records = read_events(folder) if (folder / "events.jsonl").exists() else ()
    frames = [record for record in records if record["event"] in ("start", "end")]
    return not frames or frames[-1].get("status") == "finished"


@dataclass
class TrainCall:
    """Everything that one train call needs besides the program."""

    estimator: Any
    config: RunConfig
    folder: Path
    about: Mapping[str, Any]
    say: Callable[[str], None]
    progress: Show
    hooks: Sequence[Hook]
    validate: CheckpointEvaluation | None
    pace: SpeedMeter

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the model_dir and its records; another process is refused meanwhile."""
        self.report = reports.requested(self.config.report, self.folder, programs=("training",))
        with self._records() as self.records, self._checkpoints() as self.checkpoints:
            yield

    def fresh(self, training: Job) -> State:
        """The first weights."""
        with self.progress("initial weights", None), compiling():
            state: State = training.start(stream(seed_key(self.config.seed), "init", 0))
        if training.mesh is not None:
            everywhere = NamedSharding(training.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
            state = jax.device_put(state, everywhere)
        return state

    def run(self, program: Program, plan: Plan, state: State, resumed: Restored | None) -> dict[str, Any]:
        """Drive to the target; what it took."""
        running = RunHandle(self.estimator, resumed.step if resumed else 0, plan.total_updates)
        hooks = self.hooks
        calls, summaries = CallCollector(running, hooks, plan), self._summaries(plan, resumed)
        told = [*([self.validate] if self.validate else []), *hooks]
        self.checkpoints.tell(running, told, summaries)

        def take(first: int, metrics: CallMetrics) -> None:
            if summaries:
                summaries(first, metrics)
            if hooks:
                calls(first, metrics)

        self.pace.start(running.step)
        before = program.lower_seconds, program.compile_seconds
        for hook in hooks:
            hook.begin(running)
        left = plan.total_updates - running.step
        with calls, self.progress("training", None if left == WITHOUT_END else left) as bar:
            drive(
                program,
                plan,
                state,
                self.records,
                self.checkpoints,
                resumed=self._fitting(resumed, program, plan),
                validate=self.validate,
                on_log=self.pace,
                on_call=take,
                progress=bar,
                guard="loss",
                enough=(lambda: running.stopped) if self.hooks else None,
                due=EventTimer(
                    self.config.log_seconds, self.config.checkpoint_seconds, self.validate is not None
                ),
                report=self.report,
                how_to_resume=f"train again with model_dir={self.folder}",
            )
        if summaries:
            summaries.flush()
        for hook in hooks:
            hook.end(running)
        return self.pace.figures() | {
            "lower_seconds": program.lower_seconds - before[0],
            "compile_seconds": program.compile_seconds - before[1],
        }

    def _fitting(self, resumed: Restored | None, program: Program, plan: Plan) -> Restored | None:
        """A model may go on with other data: that is said, and its place in them is the number of the update."""
        if resumed is None:
            return None
        try:
            program.feed.check_position(resumed.position["feed"])
        except CheckpointError as error:
            self.records.event(
                "warning",
                update=resumed.step,
                epoch=float(resumed.step / plan.updates_per_epoch),
                message=f"goes on with another input: {error}".split(": resume")[0],
                resumed=True,
            )
            return replace(
                resumed, position={**resumed.position, "feed": program.feed.position(resumed.step)}
            )
        return resumed

    def _checkpoints(self) -> HookedCheckpoints:
        keep: Keep = KeepLast(self.config.keep_last)
        if best := self.config.best:
            keep |= KeepBest(*best)
        return HookedCheckpoints(self.folder / "checkpoints", keep, family=FAMILY)

    def _summaries(self, plan: Plan, resumed: Restored | None) -> SummaryRecorder | None:
        every = self.config.summary_steps
        saved = resumed.position.get(SUMMARIES) if resumed else None
        return SummaryRecorder(self.records, every, plan, saved) if every else None

    def _records(self) -> Run:
        there = any((self.folder / name).exists() for name in ("config.json", "events.jsonl"))
        config = to_jsonable(self.about)
        earlier = read_json(self.folder / "config.json") if (self.folder / "config.json").exists() else {}
        return Run.create(
            self.folder,
            config,
            command=FAMILY,
            resume=there,
            may_differ={*config, *earlier},
            sinks=[ConsoleSink(self.say), *self._boards()],
        )

    def _boards(self) -> list[Sink]:
        if not self.config.summary_steps:
            return []
        try:
            return [TensorBoardSink(self.folder / "tensorboard")]
        except MissingExtra as error:
            self.say(f"summaries go to events.jsonl alone: {error}")
            return []
