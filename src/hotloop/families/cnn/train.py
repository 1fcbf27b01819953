"""`hotloop cnn train` from beginning to end: data, settings, program, run, then the validation of all checkpoints.

What an update computes is in `model`; this is the order of things, and the names of folders. It prints through the
console that it is handed.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from hotloop.engine import report as reports
from hotloop.engine.checkpoint import Checkpoints, KeepAll
from hotloop.engine.drive import drive
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program
from hotloop.engine.mesh import replicas
from hotloop.engine.precision import partials_note
from hotloop.engine.records import jsonable, read_json
from hotloop.engine.run import Run
from hotloop.engine.sinks import ConsoleSink, WandbSink
from hotloop.engine.where import platform
from hotloop.errors import OptionError
from hotloop.families.cnn import model, saved, validation
from hotloop.families.cnn.config import Train
from hotloop.families.cnn.keeping import Keeping
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
    if not (config.training or config.validation):
        raise OptionError("--training False --validation False: leaves nothing to do; leave one of them out")
    if config.resume and config.run_name is None:
        raise OptionError("--resume: say which run goes on by --run-name, the name of its folder")
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
    """The config with a seed, and whether it was drawn here; a run that goes on keeps the one it drew."""
    if config.seed is not None:
        return config, False
    before = run_folder(config) / "config.json"
    if config.resume and before.exists():
        return replace(config, seed=read_json(before).get("seed")), False
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
    if settings.half_partials:
        console.say(
            partials_note(Job(settings).policy)
            or "half partials: the network's sums are float32 all the same"
        )


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
    keeping = Keeping.of(work.checkpoints, work.folder, config)
    keeping.check(work.job.network, work.settings.plan)
    with Run.create(
        work.folder, settings, command=command, resume=config.resume, may_differ=MAY_DIFFER,
        sinks=[ConsoleSink(work.console.say)],
    ) as record:  # fmt: skip
        if config.wandb:
            record.add_sink(_wandb(work, settings))
        result: dict[str, Any] = {"run": str(work.folder), "seed": config.seed}
        trained = train(work, record, settings, keeping, report) if config.training else None
        result |= trained.figures if trained else {}
        if config.compile_only and trained:
            return result
        if config.validation:
            result |= validate(work, record, trained)
            if trained:
                seconds = time.perf_counter() - trained.began
                result["time_to_train_seconds"] = seconds
                total = trained.figures["updates"]
                record.event("time_to_train", update=total, epoch=float(config.num_epochs), seconds=seconds)
                work.console.say(f"time to train: {clock(seconds)}")
            if config.clean_dir and trained and trained.made:
                trained.keeping.clean(trained.made)
                work.console.say(f"removed {len(trained.made)} checkpoints (--clean-dir False keeps them)")
    if work.source.notice:
        work.console.warn(work.source.notice)
    return result


def _wandb(work: Work, settings: Mapping[str, Any]) -> WandbSink:
    config = work.config
    name = config.wandb_run_name or f"{config.model_name}-{config.dataset}-{time.strftime('%Y-%m-%d')}"
    return WandbSink("tf2-resnet50", name, settings, work.folder, config.wandb_tags or ())


def clock(seconds: float) -> str:
    """h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


@dataclass(frozen=True, eq=False)
class Trained:
    """What the training left: figures, its last state, the checkpoints it made, and when its clock started."""

    figures: dict[str, Any]
    state: model.State
    made: list[int]
    keeping: Keeping
    began: float


def train(
    work: Work, record: Run, settings: Mapping[str, Any], keeping: Keeping, report: Path | None
) -> Trained:
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
        return Trained(pace.compiled(program), state, [], keeping, time.perf_counter())
    began = time.perf_counter()
    keeping.note(record)
    about(work).write(work.checkpoints)
    with ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(work.checkpoints, KeepAll(), family=saved.FAMILY, config=settings)
        )
        bar = stack.enter_context(work.console.progress(work.settings.model, plan.total_updates))
        resumed = keeping.newest(checkpoints, state) if config.resume else None
        bar.advance(resumed.step if resumed else 0)
        state = drive(
            program, plan, state, record, checkpoints if plan.updates("checkpoint") else None,
            resumed=resumed, progress=bar, latest=("learning_rate", "loss_scaling_factor"), guard="loss",
            on_log=pace.on_log, report=report,
            how_to_resume=f"the same command with --resume --run-name {work.folder.name}",
        )  # fmt: skip
        made = keeping.made(checkpoints)
    return Trained({"updates": plan.total_updates, **pace.result(program)}, state, made, keeping, began)


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


def validate(work: Work, record: Run, trained: Trained | None) -> dict[str, Any]:
    """Every checkpoint that there is to validate, in the order of epochs, the best marked."""
    config = work.config
    assert work.settings.validation is not None
    folder, steps = _to_validate(work, trained)
    known = saved.about(folder) if steps else about(work)
    saved.check_same(known.network, work.job.network, folder)
    job = replace(work.job, variant=known.network.variant)
    evaluation = work.source.evaluation(model.evaluate(job, config.top_k), work.settings.validation.batch)

    def evaluate(state: Any) -> dict[str, Any]:
        return validation.figures_of(evaluation(state), config.top_k)

    if not steps:
        return {"validation": [_without_checkpoint(work, record, trained, evaluate)], "best": None}
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


def _to_validate(work: Work, trained: Trained | None) -> tuple[Path, list[int]]:
    """The folder and its steps; no steps where there is nothing, with a warning that says what is validated instead."""
    asked, made = work.config.checkpoint_input_dir, trained.made if trained else []
    instead = "the last weights are validated" if trained else "random weights are validated"
    if asked is not None:
        folder = saved.checkpoints_in(asked)
        steps = saved.steps(folder) if folder.is_dir() else []
        if not steps:
            work.console.warn(f"--checkpoint-input-dir {asked}: holds no checkpoint; {instead}")
        return folder, steps
    if not made:
        work.console.warn(f"there is no checkpoint to validate; {instead}")
    return work.checkpoints, made


def _without_checkpoint(
    work: Work, record: Run, trained: Trained | None, evaluate: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """The figures of the weights in hand: the training's last, or random ones."""
    # By way of the host: they may lie on several devices, where the images do not.
    state = jax.device_get(trained.state if trained else work.initial())
    step = int(state["update"])
    plan = work.settings.plan
    epoch = float(step / plan.updates_per_epoch) if plan else 0.0
    figures = evaluate({"params": state["params"], "statistics": state["statistics"]})
    record.event("validation", update=step, epoch=epoch, **figures)
    return {"step": step, "epoch": epoch, **figures}
