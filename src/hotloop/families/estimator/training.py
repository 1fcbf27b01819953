"""One `train` call of an estimator: where it goes on, how far it goes, with hooks between the calls. Every call is a
part of the same run, whose records go on where the last ones ended; what is there already is not repeated."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from jax import Array

from hotloop import startup
from hotloop.engine import processes
from hotloop.engine.checkpoint import Checkpoints, Restored
from hotloop.engine.checkpoint_folder import STOPPED, Keep, KeepBest, KeepLast
from hotloop.engine.drive import Diverged
from hotloop.engine.interrupt import Interrupted
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program
from hotloop.engine.plan import Batch, Kind, Mark, Plan
from hotloop.engine.progress import compiling
from hotloop.engine.run import read_events, read_json
from hotloop.engine.sink_group import Sink
from hotloop.engine.sinks import ConsoleSink, TensorBoardSink
from hotloop.engine.training import TrainingRun, compiles_ahead, open_training
from hotloop.errors import CheckpointError, DataError, MissingExtra, RunError
from hotloop.families.estimator import model
from hotloop.families.estimator.between_calls import (
    HOOKS,
    SUMMARIES,
    CheckpointEvaluation,
    HookedCheckpoints,
    HookRunner,
    KeepBestOf,
    find_returning,
)
from hotloop.families.estimator.config import Mode, RunConfig
from hotloop.families.estimator.hooks import EarlyStopping, Hook, RunHandle, check_hooks, hand_back, tell
from hotloop.families.estimator.inputs import FromBatches, Source, check_batch
from hotloop.families.estimator.model import INFERENCE_PARTS, Job, State
from hotloop.options import to_jsonable

WITHOUT_END = 10**6  # updates after which an input of unknown length ends, when no number of steps is given
FAMILY = "estimator"


def make_plan(
    config: RunConfig, batch_size: int, samples: int | None, length: int | None, target: int, evaluates: bool
) -> Plan:
    """Calls and events up to `target` updates; an epoch is all samples, else `length` batches, else the run."""
    periods: dict[Kind, int | None] = {"log": config.log_steps, "checkpoint": config.checkpoint_steps}
    if evaluates:
        periods["validate"] = config.checkpoint_steps
    marks = [Mark(kind, range(every, target, every)) for kind, every in periods.items() if every]
    marks += [Mark(kind, range(target, target + 1)) for kind in periods]
    epoch = Fraction(samples, batch_size) if samples else Fraction(length or max(target, 1))
    batch = Batch(batch_size // (config.replicas * config.accumulation), config.replicas, config.accumulation)
    return Plan(target, epoch, batch, tuple(marks), samples=samples, longest_call=config.iterations_per_call)


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


def run_training(
    estimator: Any,
    input_fn: Any,
    steps: int | None,
    max_steps: int | None,
    hooks: Any,
    evaluation: CheckpointEvaluation | None = None,
) -> None:
    """Train to the target; what it took is the estimator's `last_run`."""
    hooks = check_hooks(hooks)
    config, folder = estimator.config, estimator.model_dir
    _check_own(folder)
    if max_steps is not None:
        done = estimator.latest_checkpoint() or 0
        # At the target, a stop or a kill may have left something to do after the last update.
        if done > max_steps or (done == max_steps and processes.agreed(_is_closed(folder))):
            estimator._say(f"nothing to train: {folder} holds {done:,} updates, {max_steps:,} were asked for")
            return
    source = estimator._read_input(input_fn, Mode.TRAIN)
    job = estimator._job(Mode.TRAIN, source)
    accumulation = job.config.accumulation
    if source.batch_size % (parts := config.replicas * accumulation):
        raise DataError(
            f"a batch of {source.batch_size} does not fall into {config.replicas} replicas x {accumulation} "
            f"parts: take a multiple of {parts}"
        )
    if evaluation is None and config.best and config.best[0] not in ("loss", *job.spec.metrics):
        # A model_fn may measure more where it evaluates than where it trains.
        config.check_best(estimator._job(Mode.EVALUATE, source).spec.metrics)
    for hook in (hook for hook in hooks if isinstance(hook, EarlyStopping)):
        figures = ["loss", *job.spec.metrics] if evaluation is None else evaluation.figures
        hook.check(figures, evaluation is not None)
    source = source.check_labels(job.classes)
    find_target(source, 0, steps, max_steps)  # refuses what has no end, while nothing is written
    startup.end_part("data")
    later = compiles_ahead(job.mesh) and not (estimator._warm_start_from or _has_begun(folder))
    state = None if later else _first_state(estimator, job)
    startup.end_part("weights")
    with _open(estimator, hooks) as training:
        if state is None and training.checkpoints.begun():  # another process has been here since
            state = _first_state(estimator, job)
        resumed = None if state is None else training.newest(state)
        done = resumed.step if resumed else 0
        target = find_target(source, done, steps, max_steps)
        evaluates = evaluation is not None
        plan = make_plan(job.config, source.batch_size, source.samples, source.length, target, evaluates)
        if isinstance(source, FromBatches) and (skipped := source.count_skipped(done)):
            estimator._say(
                f"the first {skipped} batches of the input are passed over: they were trained on before"
            )
        with source.feed(config, job.mesh, done) as feed:
            program = estimator._keep(
                ("program", job, source.signature),
                lambda: Program(model.update(job), feed, config.iterations_per_call, seed_key(config.seed)),
            )
            program.feed = feed
            if state is None:
                startup.end_part("data")
                training.compile_ahead(program, plan, jax.eval_shape(*_drawing(estimator, job)))
                state = _first_state(estimator, job)
            run = RunHandle(
                estimator, done, target, evaluates=evaluation is not None, by_steps=steps is not None
            )
            saved = resumed.position.get(SUMMARIES) if resumed else None
            runner = HookRunner(run, hooks, config, plan, training.record, saved)
            try:
                estimator.last_run = _train(runner, training, program, state, resumed, evaluation)
            except Diverged as error:
                if error.update and source.samples:  # a transform may have made a label that is no class
                    check_batch(job.classes, feed, error.update - 1)
                raise


def open_checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", family=FAMILY)


def _is_closed(folder: Path) -> bool:
    """Whether the records of a model_dir, if there are any, end as those of a training that nothing disturbed."""
    records = read_events(folder) if (folder / "events.jsonl").exists() else ()
    frames = [record for record in records if record["event"] in ("start", "end")]
    return not frames or frames[-1].get("status") == "finished"


def _has_begun(folder: Path) -> bool:
    """Whether there are checkpoints, whole or not."""
    with open_checkpoints(folder) as there:
        return bool(processes.agreed(folder.is_dir())) and there.begun()


def _drawing(estimator: Any, job: Job) -> tuple[Callable[[Array], State], Array]:
    """What draws a new model's weights, and the key that it takes."""
    draw = estimator._keep(("init", job), lambda: model.make_start(job))
    return draw, stream(seed_key(job.config.seed), "init", 0)


def _first_state(estimator: Any, job: Job) -> State:
    """What a new model begins with; weights that do not fit the model are refused while nothing is written."""
    folder, other = estimator.model_dir, estimator._warm_start_from
    with estimator._progress("initial weights", None), compiling():
        draw, key = _drawing(estimator, job)
        state = draw(key)
    if _has_begun(folder):
        with open_checkpoints(folder) as there:
            there.check_fits(state)
        return state
    if other is None:
        return state
    with open_checkpoints(other) as others:
        found = others.restore({name: state[name] for name in INFERENCE_PARTS}, in_part=True)
    estimator._say(f"weights of update {found.step:,} of {other}")
    return {**state, **found.state}


def _check_own(folder: Path) -> None:
    """RunError where the folder holds another family's run, whose records this one's would replace."""
    there = folder / "config.json"
    config = read_json(there) if there.exists() else {}
    if config and "model_fn" not in config:
        raise RunError(f"{folder}: its config.json is none of an estimator's run; choose another model_dir")


def _open(estimator: Any, hooks: tuple[Hook, ...]) -> AbstractContextManager[TrainingRun]:
    """Hold the model_dir and its records; another process is refused meanwhile."""
    config, folder = estimator.config, estimator.model_dir
    there = folder / "config.json"
    settings = to_jsonable(
        {
            **asdict(config),
            "params": {name: _describe_param(value) for name, value in estimator.params.items()},
            "model_fn": getattr(estimator._model_fn, "__qualname__", type(estimator._model_fn).__name__),
        }
    )
    keep: Keep = KeepLast(config.keep_last)
    if config.best:
        keep |= KeepBest(*config.best)
    if (returning := find_returning(hooks)) is not None:
        keep |= KeepBestOf(returning)
    sinks: list[Sink] = [ConsoleSink(estimator._say, also=("early_stop", "best_restored"))]
    if (config.tensorboard or config.summary_steps) and processes.is_writer():
        try:
            sinks.append(TensorBoardSink(folder / "tensorboard"))
        except MissingExtra as error:
            estimator._say(f"summaries go to events.jsonl alone: {error}")
    return open_training(
        folder,
        settings,
        command=FAMILY,
        resume=bool(processes.agreed(there.exists() or (folder / "events.jsonl").exists())),
        may_differ={*settings, *(read_json(there) if there.exists() else {})},
        sinks=sinks,
        progress=estimator._progress,
        checkpoints=lambda place: HookedCheckpoints(place, keep, family=FAMILY),
        report=config.report,
        programs=("training",),
        how_to_resume=f"train again with model_dir={folder}",
        resume_words=("--model-dir", str(folder)),
    )


def _describe_param(param: Any) -> Any:
    """A param as the records keep it: what has no JSON form, by its name or kind."""
    try:
        return to_jsonable(param)
    except TypeError:
        return getattr(param, "__qualname__", f"a {type(param).__name__}")


def _train(
    runner: HookRunner,
    training: TrainingRun,
    program: Program,
    state: State,
    resumed: Restored | None,
    evaluation: CheckpointEvaluation | None,
) -> dict[str, Any]:
    run, hooks, plan = runner.run, runner.hooks, runner.plan
    checkpoints = training.checkpoints
    assert isinstance(checkpoints, HookedCheckpoints)
    checkpoints.runner, checkpoints.evaluation = runner, evaluation
    if resumed:
        checkpoints.last = resumed.step, resumed.position  # where no update is left, nothing is saved again
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
    run.note = runner.note
    hand_back(hooks, resumed.position.get(HOOKS, {}) if resumed else {})
    tell(hooks, "begin", run)

    def validate(state: State) -> Mapping[str, Any]:
        figures = evaluation(state) if evaluation is not None else {}
        runner.after_evaluation(figures)
        return figures

    if resumed and run.stopped and STOPPED not in resumed.position:
        checkpoints.return_to_best(resumed.state)  # a kill may have come before that
        run.estimator._say(f"nothing to train: a hook has ended the training at update {resumed.step:,}")
        return {}
    try:
        state = training.train(
            program,
            plan,
            state,
            resumed=resumed,
            endless=plan.total_updates - run.step == WITHOUT_END,
            validate=None if evaluation is None else validate,
            waits_for_logs=runner.waits_for_logs,
            on_log=runner.on_log,
            on_call=runner.on_call,
            guard="loss",
            enough=(lambda: run.stopped) if hooks else None,
            due=runner.due,
        )
    except Interrupted:
        runner.hand_over()
        raise
    runner.hand_over()
    runner.record_summary()
    checkpoints.return_to_best(state)
    tell(hooks, "end", run)
    seconds, samples = runner.seconds, runner.updates * plan.batch.global_
    return {
        "updates": runner.updates,
        "training_seconds": seconds,
        "images_per_second": samples / seconds if seconds else None,
        "lower_seconds": program.lower_seconds - before[0],
        "compile_seconds": program.compile_seconds - before[1],
    }
