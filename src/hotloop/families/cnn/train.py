"""`hotloop cnn train` from beginning to end: data, settings, program, run, then the validation of all checkpoints.

What an update computes is in `model`; this is the order of things, and the names of folders. It prints through the
console that it is handed.
"""

import secrets
import time
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from hotloop.engine import report as reports
from hotloop.engine import shelf
from hotloop.engine.checkpoint import Checkpoints, KeepAll
from hotloop.engine.drive import drive, newest
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program
from hotloop.engine.mesh import replicas
from hotloop.engine.precision import partials_note
from hotloop.engine.records import jsonable
from hotloop.engine.run import Run
from hotloop.engine.sinks import ConsoleSink, WandbSink
from hotloop.engine.where import platform
from hotloop.errors import CheckpointError
from hotloop.families.cnn import model, saved, validation
from hotloop.families.cnn.config import Train
from hotloop.families.cnn.model import Job
from hotloop.families.cnn.pace import Pace
from hotloop.families.cnn.settings import SAMPLES, Samples, Settings, resolve
from hotloop.families.cnn.sources import Source, open_source
from hotloop.families.cnn.validation import Validated
from hotloop.families.console import Console

MAY_DIFFER = (
    "results_dir", "run_name", "resume", "report", "plan", "expect", "wandb", "wandb_run_name", "wandb_tags",
    "validation", "validation_micro_batch_size", "validation_num_replicas", "clean_dir", "top_k", "sweep",
    "target_accuracy", "dataset_path", "pipeline_num_parallel", "mlperf_logging", "checkpoint_input_dir",
)  # fmt: skip
"""Options that change nothing about the weights, so that a resumed run may have others."""


@dataclass(frozen=True, eq=False)
class Work:
    """One run."""

    config: Train
    settings: Settings
    source: Source
    console: Console
    folder: Path

    @property
    def job(self) -> Job:
        """The settings as functions."""
        return Job(self.settings, self.source.repeated)

    @property
    def key(self) -> Any:
        """The run's key."""
        return seed_key(self.settings.seed or 0)

    @property
    def checkpoints(self) -> Path:
        """Where this run saves."""
        return self.config.checkpoint_output_dir or self.folder / "checkpoints"

    def initial(self) -> model.State:
        """The state before the first update."""
        return model.init(self.job, stream(self.key, "init", 0))


def run(config: Train, console: Console, command: str, given: Set[str] = frozenset()) -> Mapping[str, Any]:
    """Train, validate, or both."""
    config, was_drawn = seeded(config)
    settled(config, SAMPLES[config.dataset], given)  # what cannot work is refused before data are read
    source = open_source(config, console, config.seed or 0)
    try:
        settings = settled(config, source.samples, given)
        told(config, settings, source, was_drawn, console)
        work = Work(config, settings, source, console, run_folder(config))
        return once(work, command)
    finally:
        source.close()


def seeded(config: Train) -> tuple[Train, bool]:
    """The config with a seed, and whether it was drawn here."""
    if config.seed is not None:
        return config, False
    return replace(config, seed=secrets.randbits(32)), True


def settled(config: Train, samples: Samples, given: Set[str]) -> Settings:
    """The settings on the devices that there are."""
    return resolve(config, samples, len(jax.devices(platform())), given)


def told(config: Train, settings: Settings, source: Source, was_drawn: bool, console: Console) -> None:
    """Everything that must be said before the first update."""
    if config.expect:
        console.say(f"to expect: {config.expect}")
    for line in (*settings.warnings, *settings.notices):
        console.warn(line)
    if was_drawn:
        console.say(f"seed: {config.seed}")
    if source.notice:
        console.warn(source.notice)
    if note := partials_note(Job(settings).policy):
        console.say(note)


def run_folder(config: Train) -> Path:
    """RESULTS/NAME, where the name says model, data and time unless it is given."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    return config.results_dir / (config.run_name or f"{config.model_name}-{config.dataset}-{stamp}")


def once(work: Work, command: str) -> dict[str, Any]:
    """One run in a folder of its own."""
    config = work.config
    report = reports.requested(str(config.report) if config.report else None, work.console.warn)
    if report is not None:
        reports.check_writable(report)
    settings = jsonable(asdict(config))
    with Run.create(
        work.folder, settings, command=command, resume=config.resume, may_differ=MAY_DIFFER,
        sinks=[ConsoleSink(work.console.say)],
    ) as record:  # fmt: skip
        if config.wandb:
            record.add_sink(_wandb(work, settings))
        result: dict[str, Any] = {"run": str(work.folder), "seed": config.seed}
        began, made = time.perf_counter(), []
        if config.training:
            trained = train(work, record, settings, report)
            result |= trained.figures
            began, made = trained.began, trained.made
            if config.compile_only:
                return result
        if config.validation:
            result |= validate(work, record, made)
            if config.training:
                seconds = time.perf_counter() - began
                result["time_to_train_seconds"] = seconds
                record.event("time_to_train", seconds=seconds)
                work.console.say(f"time to train: {clock(seconds)}")
            if config.clean_dir and made:
                clean(work, made)
    if work.source.notice:
        work.console.warn(work.source.notice)
    return result


def _wandb(work: Work, settings: Mapping[str, Any]) -> WandbSink:
    config = work.config
    name = config.wandb_run_name or f"{config.model_name}-{config.dataset}-{time.strftime('%Y-%m-%d')}"
    tags = {"tags": list(config.wandb_tags)} if config.wandb_tags else {}
    return WandbSink("tf2-resnet50", name, {**settings, **tags}, work.folder)


def clock(seconds: float) -> str:
    """h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


@dataclass(frozen=True, eq=False)
class Trained:
    """What the training left: figures, the checkpoints it made, and when its clock started."""

    figures: dict[str, Any]
    made: list[int]
    began: float


def train(work: Work, record: Run, settings: Mapping[str, Any], report: Path | None) -> Trained:
    """All updates of the plan."""
    config, plan = work.config, work.settings.plan
    assert plan is not None
    batch = work.settings.batch
    mesh = replicas(batch.replicas, platform()) if batch.replicas > 1 else None
    feed = work.source.feed(work.settings, mesh)
    program = Program(model.update(work.job, mesh), feed, plan.updates_per_call, work.key)
    state = work.initial()
    pace = Pace(work.job, batch.replicas)
    if config.compile_only or config.mlperf_logging:
        program.compile(state, min(plan.updates_per_call, program.updates_per_call))
        record.event("compile", updates_per_call=program.updates_per_call, **pace.compiled(program))
    if config.compile_only:
        return Trained(pace.compiled(program), [], time.perf_counter())
    began = time.perf_counter()
    about(work).write(work.checkpoints)
    before = set(saved.steps(work.checkpoints))
    with ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(work.checkpoints, KeepAll(), family=saved.FAMILY, config=settings)
        )
        bar = stack.enter_context(work.console.progress(work.settings.model, plan.total_updates))
        resumed = newest(checkpoints, state) if config.resume else None
        bar.advance(resumed.step if resumed else 0)
        drive(
            program, plan, state, record, checkpoints if plan.updates("checkpoint") else None,
            resumed=resumed, progress=bar, latest=("learning_rate", "loss_scaling_factor"), guard="loss",
            on_log=pace.on_log, report=report,
            how_to_resume=f"the same command with --resume --run-name {work.folder.name}",
        )  # fmt: skip
        steps = checkpoints.steps()
    made = [step for step in steps if config.resume or step not in before]
    return Trained({"updates": plan.total_updates, **pace.result(program)}, made, began)


def about(work: Work) -> saved.About:
    """What must be known to use the checkpoints without the options."""
    chosen, plan = work.settings, work.settings.plan
    return saved.About(
        work.job.network,
        chosen.dataset,
        chosen.precision,
        chosen.half,
        float(plan.updates_per_epoch) if plan else 1.0,
    )


def validate(work: Work, record: Run, made: list[int]) -> dict[str, Any]:
    """Every checkpoint that there is to validate, in the order of epochs, the best marked."""
    config = work.config
    assert work.settings.validation is not None
    evaluation = work.source.evaluation(
        model.evaluate(work.job, config.top_k), work.settings.validation.batch
    )

    def evaluate(state: Any) -> dict[str, Any]:
        return validation.figures_of(evaluation(state), config.top_k)

    folder, steps = _to_validate(work, made)
    if not steps:
        state = work.initial()
        figures = evaluate({"params": state["params"], "statistics": state["statistics"]})
        record.event("validation", **figures)
        return {"validation": [{"step": 0, "epoch": 0.0, **figures}], "best": None}
    known = saved.about(folder)
    check_same(work, known, folder)
    found: list[Validated] = []
    with work.console.progress("validation", len(steps)) as bar:
        for each in validation.validate_all(
            steps,
            lambda step: saved.weights(folder, step, known)[1],
            evaluate,
            known.updates_per_epoch,
            record,
        ):
            found.append(each)
            bar.advance(1)
    best = validation.best_of(found)
    work.console.say(
        f"best of {len(found)}: step {best.step}, epoch {best.epoch:g}, accuracy: {100 * best.accuracy:.2f} %"
    )
    rows = [{"step": each.step, "epoch": each.epoch, **each.figures} for each in found]
    result: dict[str, Any] = {"validation": rows, "best": rows[found.index(best)]}
    if config.sweep:
        result |= validation.sweep_figures(found, config.target_accuracy)
        record.event("sweep", **validation.sweep_figures(found, config.target_accuracy))
    return result


def check_same(work: Work, known: saved.About, folder: Path) -> None:
    """The checkpoints must be of the network that the options name."""
    if known.network != work.job.network:
        there, here = known.network, work.job.network
        raise CheckpointError(
            f"{folder}: holds a {there.model} for {there.shape} images and {there.classes} classes, and the options "
            f"ask for {here.model}, {here.shape} and {here.classes}; give the options that it was trained with"
        )


def _to_validate(work: Work, made: list[int]) -> tuple[Path, list[int]]:
    """The folder and its steps; no steps where there is nothing, with a warning that says what is validated instead."""
    asked = work.config.checkpoint_input_dir
    if asked is not None:
        folder = saved.checkpoints_in(asked)
        steps = saved.steps(folder) if folder.is_dir() else []
        if not steps:
            work.console.warn(
                f"--checkpoint-input-dir {asked}: holds no checkpoint; random weights are validated"
            )
        return folder, steps
    if not made:
        work.console.warn("there is no checkpoint to validate; random weights are validated")
    return work.checkpoints, made


def clean(work: Work, made: list[int]) -> None:
    """Remove the checkpoints that this run made, and the folder if nothing else is in it."""
    folder = work.checkpoints
    there = shelf.numbered(folder)
    for step in made:
        shelf.remove(there[step])
    if not shelf.numbered(folder):
        (folder / saved.ABOUT).unlink(missing_ok=True)
    if not list(folder.iterdir()):
        folder.rmdir()
    work.console.say(f"removed {len(made)} checkpoints (--clean-dir False keeps them)")
