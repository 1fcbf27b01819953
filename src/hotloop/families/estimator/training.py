"""One `train` call of an estimator: resume, plan, drive, with hooks between the calls.

The target is a number of weight updates in all; what is there already is not repeated. Every call of `train` is a part
of the same run: its records go on where the last ones ended.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from hotloop.engine.plan import Kind, Mark, Plan
from hotloop.engine.progress import Show, compiling
from hotloop.engine.records import read_events, read_json
from hotloop.engine.run import Run
from hotloop.engine.sinks import ConsoleSink, Sink, TensorBoardSink
from hotloop.errors import CheckpointError, DataError, MissingExtra
from hotloop.families.estimator.hooks import SUMMARIES, Calls, Hook, Running, Summaries, Watched
from hotloop.families.estimator.inputs import Source
from hotloop.families.estimator.parts import FAMILY
from hotloop.families.estimator.run_config import RunConfig
from hotloop.families.estimator.step import State, Training
from hotloop.families.estimator.timing import Clock, Pace
from hotloop.families.estimator.validation import Validation
from hotloop.options import to_jsonable

WITHOUT_END = 10**6
"""Updates after which the training of an input of unknown length ends, when no number of steps is given."""


def plan(config: RunConfig, source: Source, target: int, validates: bool) -> Plan:
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


def target_of(source: Source, step: int, steps: int | None, max_steps: int | None) -> int:
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
class Work:
    """Everything that one train call needs besides the program."""

    estimator: Any
    config: RunConfig
    folder: Path
    about: Mapping[str, Any]
    say: Callable[[str], None]
    progress: Show
    hooks: Sequence[Hook]
    validate: Validation | None
    pace: Pace

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the model_dir and its records; another process is refused meanwhile."""
        self.report = reports.requested(self.config.report, self.folder, programs=("training",))
        with self._records() as self.records, self._checkpoints() as self.checkpoints:
            yield

    def fresh(self, training: Training) -> State:
        """The first weights."""
        with self.progress("initial weights", None), compiling():
            state: State = training.start(stream(seed_key(self.config.seed), "init", 0))
        if training.mesh is not None:
            everywhere = NamedSharding(training.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
            state = jax.device_put(state, everywhere)
        return state

    def run(self, program: Program, plan: Plan, state: State, resumed: Restored | None) -> dict[str, Any]:
        """Drive to the target; what it took."""
        running = Running(self.estimator, resumed.step if resumed else 0, plan.total_updates)
        hooks = self.hooks
        calls, summaries = Calls(running, hooks, plan), self._summaries(plan, resumed)
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
                due=Clock(self.config.log_seconds, self.config.checkpoint_seconds, self.validate is not None),
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

    def _checkpoints(self) -> Watched:
        keep: Keep = KeepLast(self.config.keep_last)
        if best := self.config.best:
            keep |= KeepBest(*best)
        return Watched(self.folder / "checkpoints", keep, family=FAMILY)

    def _summaries(self, plan: Plan, resumed: Restored | None) -> Summaries | None:
        every = self.config.summary_steps
        saved = resumed.position.get(SUMMARIES) if resumed else None
        return Summaries(self.records, every, plan, saved) if every else None

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
