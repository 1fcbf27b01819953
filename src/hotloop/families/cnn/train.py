"""`hotloop cnn train` from beginning to end: data, settings, program, run, then the validation of all checkpoints.

What an update computes is in `model`, what a run is in `work`; this is the order of things. It prints through the
console that it is handed.
"""

import tempfile
import time
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotloop.engine import measure as reports
from hotloop.engine.device import platform, replica_mesh
from hotloop.engine.drive import drive
from hotloop.engine.loop import Program
from hotloop.engine.progress import Console
from hotloop.engine.run import Run, check_free, check_makeable, check_options
from hotloop.engine.sinks import Announcer, ConsoleSink, Sink, WandbSink
from hotloop.errors import OptionError
from hotloop.families.cnn import model, saved
from hotloop.families.cnn.job import SAMPLES
from hotloop.families.cnn.model import Job
from hotloop.families.cnn.options import Train
from hotloop.families.cnn.saved import RunCheckpoints
from hotloop.families.cnn.sources import open_source
from hotloop.families.cnn.timing import Throughput, TrainingClock, time_in_words
from hotloop.families.cnn.validation import others_to_validate, validate
from hotloop.families.cnn.work import Work, announce, resolve_here, run_folder, with_seed
from hotloop.options import to_jsonable

MAY_DIFFER = (
    "results_dir", "run_name", "resume", "report", "plan", "expect", "wandb", "wandb_run_name", "wandb_tags",
    "validation", "validation_micro_batch_size", "validation_num_replicas", "clean_dir", "top_k", "sweep",
    "target_accuracy", "dataset_path", "pipeline_num_parallel", "mlperf_logging", "checkpoint_input_dir",
    "random_weights",
)  # fmt: skip
"""Options that change nothing about the weights, so that a resumed run may have others."""


def run(
    config: Train,
    console: Console,
    command: str,
    given: Set[str] = frozenset(),
    configured: Set[str] = frozenset(),
) -> Mapping[str, Any]:
    """Train, validate, or both; `given` are the options of the command line, `configured` those of a configuration."""
    _check_phases(config)
    folder = run_folder(config)
    if config.training:
        check_place(config, folder)
    own = RunCheckpoints.of(config, folder)
    config, was_drawn = with_seed(config)
    if config.resume and not config.compile_only:
        own.check_unfinished()
        if own.is_done():
            check_options(folder, to_jsonable(asdict(config)), MAY_DIFFER)
            console.say(
                f"{folder} is finished, its checkpoints are in {own.folder}: there is nothing to go on with; "
                f"`hotloop cnn validate {folder}` validates them again"
            )
            return {"run": str(folder), "finished": True}
    others = others_to_validate(config, own) if config.validation else None
    # What cannot work is refused before data are read.
    expected = resolve_here(config, SAMPLES[config.dataset], given, configured)
    if others is not None and others.made():
        saved.check_same(
            saved.read_saved_network(others.folder).network, Job(expected).network, others.folder
        )
    source = open_source(config, console, config.seed or 0)
    try:
        settings = resolve_here(config, source.samples, given, configured)
        announce(config, settings, source, was_drawn, console)
        work = Work(config, settings, source, console, folder, others)
        return train_run(work, command) if config.training else validate_alone(work)
    finally:
        source.close()


def check_place(config: Train, folder: Path) -> None:
    """RunError or OptionError where what a training writes has no place."""
    check_free(folder, config.resume)
    if config.checkpoint_output_dir is not None:
        check_makeable(config.checkpoint_output_dir, "--checkpoint-output-dir")
    reports.find_report_folder(
        config.report, folder, lambda _: None
    )  # what is to be said about it is said with the run


def _check_phases(config: Train) -> None:
    """OptionError where the options leave nothing to do, or ask for what the other phase has."""
    if not (config.training or config.validation):
        raise OptionError("--training False --validation False: leaves nothing to do; leave one of them out")
    if config.random_weights and config.training:
        raise OptionError("--random-weights: goes with validation alone (--training False); leave it out")
    if config.compile_only and not config.training:
        raise OptionError(
            "--compile-only: compiles the training program, and this only validates; leave it out"
        )
    if config.resume and not config.training:
        raise OptionError(
            "--resume --training False: there is no training to go on with; `hotloop cnn validate RUN` validates a run"
        )
    if (
        not (config.training or config.checkpoint_input_dir or config.random_weights)
        and run_folder(config).exists()
    ):
        raise OptionError(
            f"--training False: `hotloop cnn validate {run_folder(config)}` validates that run; --random-weights "
            "validates random ones"
        )
    if config.resume and config.run_name is None:
        raise OptionError("--resume: say which run goes on by --run-name, the name of its folder")


def train_run(work: Work, command: str) -> dict[str, Any]:
    """One run in a folder of its own."""
    config = work.config
    report = reports.find_report_folder(config.report, work.folder, work.console.warn)
    settings = to_jsonable(asdict(config))
    work.keeping.check(work.job.network, work.settings.plan)
    with Run.create(
        work.folder, settings, command=command, resume=config.resume, may_differ=MAY_DIFFER,
        sinks=[ConsoleSink(work.console.say), *([_wandb(work, settings, work.folder)] if config.wandb else [])],
    ) as record:  # fmt: skip
        result: dict[str, Any] = {"run": str(work.folder), "seed": config.seed}
        trained = train(work, record, report)
        result |= trained.figures
        if trained.clock is None:
            return result
        if config.validation:
            result |= validate(work, record, trained.state, trained.made)
            took = trained.clock.stop(record, trained.figures["updates"], float(config.num_epochs))
            result |= took
            work.console.say(time_in_words(took))
            if config.clean_dir is not False and trained.made:
                _clean(work, trained.made, result["best"], record)
    if work.source.notice:
        work.console.warn(work.source.notice)
    return result


def validate_alone(work: Work) -> dict[str, Any]:
    """Validation without training: it is told, and nothing is written."""
    sinks: list[Sink] = [ConsoleSink(work.console.say)]
    if work.config.wandb:
        sinks.append(_wandb(work, to_jsonable(asdict(work.config)), Path(tempfile.gettempdir())))
    with Announcer(sinks) as record:
        result = {"seed": work.config.seed, **validate(work, record, None, [])}
    if work.source.notice:
        work.console.warn(work.source.notice)
    return result


def _clean(work: Work, made: list[int], best: Mapping[str, Any], record: Run) -> None:
    """Remove the run's checkpoints but the best and the last, or all; none where it was others' that were validated."""
    if work.others is not None:
        work.console.say(f"{len(made)} checkpoints of this run stay in {work.keeping.folder}: not validated")
        return
    assert work.settings.plan is not None
    kept = [] if work.config.clean_dir else sorted({best["step"], made[-1]})
    work.keeping.clean(made, kept, float(made[-1] / work.settings.plan.updates_per_epoch), record)
    if not kept:
        work.console.say(f"removed {len(made)} checkpoints, as --clean-dir asks for")
    elif len(kept) < len(made):
        both = f"the best (step {best['step']}) and the last (step {made[-1]}) stay"
        stay = both if len(kept) > 1 else f"the last (step {made[-1]}), which is the best, stays"
        work.console.say(
            f"of {len(made)} checkpoints {stay} in {work.keeping.folder}; --clean-dir False keeps all"
        )


def _wandb(work: Work, settings: Mapping[str, Any], folder: Path) -> WandbSink:
    config = work.config
    name = config.wandb_run_name or f"{config.model_name}-{config.dataset}-{time.strftime('%Y-%m-%d')}"
    return WandbSink("tf2-resnet50", name, settings, folder, config.wandb_tags or ())


@dataclass(frozen=True, eq=False)
class Trained:
    """What the training left: figures, last state, checkpoints, and its running clock (None: it only compiled)."""

    figures: dict[str, Any]
    state: model.State
    made: list[int]
    clock: TrainingClock | None


def train(work: Work, record: Run, report: Path | None) -> Trained:
    """All updates of the plan."""
    config, plan = work.config, work.settings.plan
    assert plan is not None
    batch = work.settings.batch
    mesh = replica_mesh(batch.replicas, platform()) if batch.replicas > 1 else None
    feed = work.source.feed(work.settings, mesh)
    program = Program(model.update(work.job, mesh), feed, plan.updates_per_call, work.key)
    with work.console.progress("initial weights"):
        state = work.initial()
    with work.console.progress("measuring the device"):
        pace = Throughput(work.job, batch.replicas)
    if config.compile_only or config.mlperf_logging:
        with work.console.progress(work.settings.model):
            program.compile(state, min(plan.updates_per_call, program.updates_per_call))
        record.event("compile", updates_per_call=program.updates_per_call, **pace.compiled(program))
    if config.compile_only:
        return Trained(pace.compiled(program), state, [], None)
    clock = TrainingClock.start(record)
    work.about().write(work.keeping.folder)
    with ExitStack() as stack:
        checkpoints = stack.enter_context(work.keeping.opened())
        bar = stack.enter_context(work.console.progress(work.settings.model, plan.total_updates))
        resumed = work.keeping.newest(checkpoints, state) if config.resume else None
        bar.advance(resumed.step if resumed else 0)
        state = drive(
            program, plan, state, record, checkpoints if plan.updates("checkpoint") else None,
            resumed=resumed, progress=bar, latest=("learning_rate", "loss_scaling_factor"), guard="loss",
            on_log=pace.on_log, report=report,
            how_to_resume=f"the same command with --resume --run-name {work.folder.name}",
        )  # fmt: skip
        made = checkpoints.steps()
    return Trained({"updates": plan.total_updates, **pace.result(program)}, state, made, clock)
