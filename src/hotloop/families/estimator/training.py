"""One `train` call of an estimator: where it goes on, how far it goes, with hooks between the calls.

The target is a number of weight updates in all; what is there already is not repeated. Every call of `train` is a part
of the same run: its records go on where the last ones ended. How a training runs is the engine's.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.engine.checkpoint import Restored
from hotloop.engine.checkpoint_folder import Keep, KeepBest, KeepLast
from hotloop.engine.drive import Diverged
from hotloop.engine.interrupt import Interrupted
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program
from hotloop.engine.plan import Batch, Kind, Mark, Plan
from hotloop.engine.progress import compiling
from hotloop.engine.run import Sink, read_events, read_json
from hotloop.engine.sinks import ConsoleSink, TensorBoardSink
from hotloop.engine.training import TrainingRun, open_training
from hotloop.errors import CheckpointError, DataError, MissingExtra
from hotloop.families.estimator.config import Mode, RunConfig
from hotloop.families.estimator.hooks import SUMMARIES, Hook, HookedCheckpoints, HookRunner, RunHandle
from hotloop.families.estimator.inputs import Source, check_batch
from hotloop.families.estimator.model import INFERENCE_PARTS, Job, State
from hotloop.families.estimator.programs import FAMILY, Programs
from hotloop.options import to_jsonable

WITHOUT_END = 10**6
"""Updates after which the training of an input of unknown length ends, when no number of steps is given."""


def make_plan(
    config: RunConfig, batch_size: int, samples: int | None, length: int | None, target: int, evaluates: bool
) -> Plan:
    """Calls and events up to `target` updates; an epoch is all samples, else `length` batches, else the run."""
    parts = config.replicas * config.accumulation
    periods: dict[Kind, int | None] = {"log": config.log_steps, "checkpoint": config.checkpoint_steps}
    if evaluates:
        periods["validate"] = config.checkpoint_steps
    marks = [Mark(kind, range(every, target, every)) for kind, every in periods.items() if every]
    marks += [Mark(kind, range(target, target + 1)) for kind in periods]
    epoch = Fraction(samples, batch_size) if samples else Fraction(length or max(target, 1))
    batch = Batch(batch_size // parts, config.replicas, config.accumulation)
    longest = config.iterations_per_call
    return Plan(target, epoch, batch, tuple(marks), samples=samples, longest_call=longest)


def find_target(source: Source, step: int, steps: int | None, max_steps: int | None) -> int:
    """The number of updates to end at; without a number, where a pass over the input ends."""
    if max_steps is not None:
        return max_steps
    if steps is not None:
        return step + steps
    if source.samples is not None:
        raise DataError("arrays have no end: give steps or max_steps")
    length = source.length
    return step + (length - step % length if length else WITHOUT_END)


def is_closed(folder: Path) -> bool:
    """Whether the records of a model_dir, if there are any, end as those of a training that nothing disturbed."""
    records = read_events(folder) if (folder / "events.jsonl").exists() else ()
    frames = [record for record in records if record["event"] in ("start", "end")]
    return not frames or frames[-1].get("status") == "finished"


class CheckpointEvaluation(Hook):
    """The evaluations of train_and_evaluate: one before each checkpoint, noted once the checkpoint is there.

    `measure` takes a state, `throttle_seconds` apart at least; `note` takes each result with its number of updates.
    """

    def __init__(
        self,
        measure: Callable[[State], dict[str, Any]],
        note: Callable[[dict[str, Any]], dict[str, Any]],
        throttle_seconds: float = 0,
    ):
        self._measure, self._note, self._throttle_seconds = measure, note, throttle_seconds
        self._since = -math.inf
        self._found: dict[str, Any] = {}
        self.last: dict[str, Any] = {}

    def __call__(self, state: State) -> Mapping[str, Any]:
        """The figures of a state that is about to be saved; none when the last ones are too young."""
        if time.monotonic() - self._since < self._throttle_seconds:
            return {}
        self._found = self._measure({name: state[name] for name in INFERENCE_PARTS})
        self._since = time.monotonic()
        return self._found

    def on_checkpoint(self, run: RunHandle, step: int) -> None:
        if self._found:
            self.last = self._note({**self._found, "global_step": step})
            self._found = {}


@dataclass
class TrainCall:
    """One call of `train`; `about` is what its records say of the estimator."""

    estimator: Any
    programs: Programs
    about: Mapping[str, Any]
    warm_start_from: Path | None
    hooks: Sequence[Hook]
    evaluation: CheckpointEvaluation | None

    def run(self, input_fn: Any, steps: int | None, max_steps: int | None) -> dict[str, Any]:
        """Train to the target; what it took, as `Estimator.last_run` has it."""
        programs, config = self.programs, self.programs.config
        source = programs.read_input(input_fn, Mode.TRAIN)
        config.check_batch_size(source.batch_size)
        job = programs.job(Mode.TRAIN, source)
        if (
            self.evaluation is None
            and config.best
            and config.best[0] not in ("loss", *job.model.spec.metrics)
        ):
            # A model_fn may measure more where it evaluates than where it trains.
            config.check_best(programs.job(Mode.EVALUATE, source).model.spec.metrics)
        source = source.check_labels(job.model.classes)
        find_target(source, 0, steps, max_steps)  # refuses what has no end, while nothing is written
        state = self._first_state(job)
        with self._open() as training:
            resumed = training.newest(state)
            done = resumed.step if resumed else 0
            target = find_target(source, done, steps, max_steps)
            evaluates = self.evaluation is not None
            plan = make_plan(config, source.batch_size, source.samples, source.length, target, evaluates)
            if skipped := source.count_skipped(done):
                programs.say(
                    f"the first {skipped} batches of the input are passed over: they were trained on before"
                )
            with source.feed(config, job.mesh, done) as feed:
                program = programs.program(source, job, feed)
                try:
                    return self._train(training, program, plan, state, resumed)
                except Diverged as error:
                    if error.update and source.samples:  # a transform may have made a label that is no class
                        check_batch(job.model.classes, feed, error.update - 1)
                    raise

    def _first_state(self, job: Job) -> State:
        """What a new model begins with; weights that do not fit the model are refused while nothing is written."""
        programs = self.programs
        with programs.progress("initial weights", None), compiling():
            state = programs.init(job)(stream(seed_key(programs.config.seed), "init", 0))
        if job.mesh is not None:
            everywhere = NamedSharding(job.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
            state = jax.device_put(state, everywhere)
        with programs.checkpoints() as there:
            if programs.folder.is_dir() and there.begun():
                there.check_fits(state)
                return state
        if self.warm_start_from is None:
            return state
        with programs.checkpoints(self.warm_start_from) as others:
            found = others.restore({name: state[name] for name in INFERENCE_PARTS}, in_part=True)
        programs.say(f"weights of update {found.step:,} of {self.warm_start_from}")
        return {**state, **found.state}

    def _open(self) -> AbstractContextManager[TrainingRun]:
        """Hold the model_dir and its records; another process is refused meanwhile."""
        folder, config = self.programs.folder, self.programs.config
        there = folder / "config.json"
        settings = to_jsonable(self.about)
        earlier = read_json(there) if there.exists() else {}
        keep: Keep = KeepLast(config.keep_last)
        if config.best:
            keep |= KeepBest(*config.best)
        sinks: list[Sink] = [ConsoleSink(self.programs.say)]
        if config.summary_steps:
            try:
                sinks.append(TensorBoardSink(folder / "tensorboard"))
            except MissingExtra as error:
                self.programs.say(f"summaries go to events.jsonl alone: {error}")
        return open_training(
            folder,
            settings,
            command=FAMILY,
            resume=there.exists() or (folder / "events.jsonl").exists(),
            may_differ={*settings, *earlier},
            sinks=sinks,
            progress=self.programs.progress,
            checkpoints=lambda place: HookedCheckpoints(place, keep, family=FAMILY),
            report=config.report,
            programs=("training",),
        )

    def _train(
        self, training: TrainingRun, program: Program, plan: Plan, state: State, resumed: Restored | None
    ) -> dict[str, Any]:
        run = RunHandle(self.estimator, resumed.step if resumed else 0, plan.total_updates)
        saved = resumed.position.get(SUMMARIES) if resumed else None
        runner = HookRunner(run, self.hooks, self.programs.config, plan, training.record, saved)
        checkpoints = training.checkpoints
        assert isinstance(checkpoints, HookedCheckpoints)
        checkpoints.runner = runner
        checkpoints.hooks = [*([self.evaluation] if self.evaluation else []), *self.hooks]
        if resumed:
            try:
                program.feed.check_position(resumed.position["feed"])
            except CheckpointError as error:  # other data: the place in them is the number of the update
                training.record.event(
                    "warning",
                    update=resumed.step,
                    epoch=float(resumed.step / plan.updates_per_epoch),
                    message=f"goes on with another input: {error}".split(": resume")[0],
                    resumed=True,
                )
                position = {**resumed.position, "feed": program.feed.position(resumed.step)}
                resumed = replace(resumed, position=position)
        before = program.lower_seconds, program.compile_seconds
        for hook in self.hooks:
            hook.begin(run)
        try:
            training.train(
                program,
                plan,
                state,
                resumed=resumed,
                endless=plan.total_updates - run.step == WITHOUT_END,
                validate=self.evaluation,
                on_log=runner.on_log,
                on_call=runner.on_call,
                guard="loss",
                enough=(lambda: run.stopped) if self.hooks else None,
                due=runner.due,
                how_to_resume=f"train again with model_dir={self.programs.folder}",
            )
        except Interrupted:
            runner.hand_over()
            raise
        runner.hand_over()
        runner.record_summary()
        for hook in self.hooks:
            hook.end(run)
        return runner.speed() | {
            "lower_seconds": program.lower_seconds - before[0],
            "compile_seconds": program.compile_seconds - before[1],
        }
