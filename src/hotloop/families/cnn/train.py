"""`hotloop cnn train` from beginning to end: options, data, job, program, run, then the validation of all checkpoints.

What an update computes is in `model`; this is the order of things. It prints through the console that it is handed.
"""

import secrets
import tempfile
import time
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotloop.engine import measure
from hotloop.engine.drive import drive
from hotloop.engine.keys import stream
from hotloop.engine.loop import Program
from hotloop.engine.precision import partials_note
from hotloop.engine.progress import Console
from hotloop.engine.records import read_json
from hotloop.engine.run import Run, check_free, check_makeable, check_options
from hotloop.engine.sinks import Announcer, ConsoleSink, Sink, WandbSink
from hotloop.errors import OptionError
from hotloop.families.cnn import model
from hotloop.families.cnn.job import Job, resolve
from hotloop.families.cnn.options import DATASET_SIZES, TrainConfig
from hotloop.families.cnn.presets import NETWORK_FILE, RUN_CONFIG
from hotloop.families.cnn.run_checkpoints import RunCheckpoints
from hotloop.families.cnn.saved import (
    SavedNetwork,
    check_same,
    check_shared_folder,
    own_checkpoints,
    read_saved_network,
)
from hotloop.families.cnn.sources import ImageSource, open_source
from hotloop.families.cnn.timing import TOOK, Throughput, TrainingClock, compile_seconds, time_in_words
from hotloop.families.cnn.validation import others_to_validate, validate
from hotloop.options import to_jsonable, values_of

MAY_DIFFER = (
    "results_dir", "run_name", "resume", "report", "plan", "expect", "wandb", "wandb_run_name", "wandb_tags",
    "validation", "validation_micro_batch_size", "validation_num_replicas", "clean_dir", "top_k", "sweep",
    "target_accuracy", "dataset_path", "pipeline_num_parallel", "mlperf_logging", "checkpoint_input_dir",
    "random_weights",
)  # fmt: skip
"""Options that change nothing about the weights, so that a resumed run may have others."""


def run(
    config: TrainConfig,
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
    own = own_checkpoints(config, folder)
    config, was_drawn = with_seed(config)
    if config.resume and not config.compile_only:
        own.check_unfinished()
        if own.has_ended() and any(each["event"] == TOOK for each in own.records()):
            check_options(folder, to_jsonable(values_of(config)), MAY_DIFFER)
            console.say(
                f"{folder} is finished, its checkpoints are in {own.folder}: there is nothing to go on with; "
                f"`hotloop cnn validate {folder}` validates them again"
            )
            return {"run": str(folder), "finished": True}
    others = others_to_validate(config, own) if config.validation else None
    # What cannot work is refused before data are read.
    expected = resolve(config, DATASET_SIZES[config.dataset], None, given, configured)
    if others is not None and others.steps():
        check_same(read_saved_network(others.folder).network, expected.network, others.folder)
    source = open_source(config, console, config.seed or 0)
    try:
        job = resolve(config, source.size, None, given, configured, repeated=source.repeated)
        announce(job, source, was_drawn, console)
        if config.training:
            return train_run(job, source, console, command, folder, own, others)
        return validate_alone(job, source, console, own, others)
    finally:
        source.close()


def run_folder(config: TrainConfig) -> Path:
    """RESULTS/NAME, where the name says model, data and time unless it is given."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    return config.results_dir / (config.run_name or f"{config.model_name}-{config.dataset}-{stamp}")


def with_seed(config: TrainConfig) -> tuple[TrainConfig, bool]:
    """The config with a seed, and whether it was drawn here; a run that goes on keeps the one it drew."""
    if config.seed is not None:
        return config, False
    before = run_folder(config) / RUN_CONFIG
    if config.resume and before.exists():
        return replace(config, seed=read_json(before).get("seed")), False
    return replace(config, seed=secrets.randbits(32)), True


def check_place(config: TrainConfig, folder: Path) -> None:
    """RunError or OptionError where what a training writes has no place."""
    check_free(folder, config.resume)
    if config.checkpoint_output_dir is not None:
        check_makeable(config.checkpoint_output_dir, "--checkpoint-output-dir")
    measure.find_report_folder(config.report, folder, lambda _: None)  # what it says is said with the run


def _check_phases(config: TrainConfig) -> None:
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


def announce(job: Job, source: ImageSource, was_drawn: bool, console: Console) -> None:
    """Everything that must be said before the first update."""
    config = job.config
    if config.expect:
        console.say(f"to expect: {config.expect}")
    for line in (*job.warnings, *job.notices):
        console.warn(line)
    if was_drawn:
        console.say(f"seed: {config.seed}")
    if source.notice:
        console.warn(source.notice)
    if config.half_partials:
        console.say(partials_note(job.policy) or "half partials: the network's sums are float32 all the same")


def train_run(
    job: Job,
    source: ImageSource,
    console: Console,
    command: str,
    folder: Path,
    own: RunCheckpoints,
    others: RunCheckpoints | None,
) -> dict[str, Any]:
    """One run in a folder of its own."""
    config, plan = job.config, job.plan
    assert plan is not None
    report = measure.find_report_folder(config.report, folder, console.warn)
    settings = to_jsonable(values_of(config))
    check_shared_folder(own, job.network, plan)
    with Run.create(
        folder, settings, command=command, resume=config.resume, may_differ=MAY_DIFFER,
        sinks=_sinks(config, console, folder),
    ) as record:  # fmt: skip
        result: dict[str, Any] = {"run": str(folder), "seed": config.seed}
        trained = train(job, source, console, record, report, folder, own)
        result |= trained.figures
        if trained.clock is None:
            return result
        if config.validation:
            made = own.steps()
            result |= validate(job, source, console, record, own, others, trained.state)
            took = trained.clock.stop(record, trained.figures["updates"], float(config.num_epochs))
            result |= took
            console.say(time_in_words(took))
            if config.clean_dir is not False and made:
                if others is not None:
                    console.say(f"{len(made)} checkpoints of this run stay in {own.folder}: not validated")
                else:
                    _clean(job, own, made, result["best"]["step"], record, console)
    if source.notice:
        console.warn(source.notice)
    return result


def validate_alone(
    job: Job, source: ImageSource, console: Console, own: RunCheckpoints, others: RunCheckpoints | None
) -> dict[str, Any]:
    """Validation without training: it is told, and nothing is written."""
    with Announcer(_sinks(job.config, console, Path(tempfile.gettempdir()))) as record:
        found = validate(job, source, console, record, own, others, None)
    if source.notice:
        console.warn(source.notice)
    return {"seed": job.config.seed, **found}


def _clean(job: Job, own: RunCheckpoints, made: list[int], best: int, record: Run, console: Console) -> None:
    """Remove the run's checkpoints but the best and the last, or all."""
    assert job.plan is not None
    last = made[-1]
    kept = [] if job.config.clean_dir else sorted({best, last})
    own.clean(made, kept, float(last / job.plan.updates_per_epoch), record)
    if not any(own.folder.glob("[0-9]*")):
        (own.folder / NETWORK_FILE).unlink(missing_ok=True)
    if not own.given and not list(own.folder.iterdir()):
        own.folder.rmdir()
    if not kept:
        console.say(f"removed {len(made)} checkpoints, as --clean-dir asks for")
    elif len(kept) < len(made):
        both = f"the best (step {best}) and the last (step {last}) stay"
        stay = both if len(kept) > 1 else f"the last (step {last}), which is the best, stays"
        console.say(f"of {len(made)} checkpoints {stay} in {own.folder}; --clean-dir False keeps all")


def _sinks(config: TrainConfig, console: Console, folder: Path) -> list[Sink]:
    sinks: list[Sink] = [ConsoleSink(console.say)]
    if config.wandb:
        name = config.wandb_run_name or f"{config.model_name}-{config.dataset}-{time.strftime('%Y-%m-%d')}"
        settings = to_jsonable(values_of(config))
        sinks.append(WandbSink("tf2-resnet50", name, settings, folder, config.wandb_tags or ()))
    return sinks


@dataclass(frozen=True, eq=False)
class Trained:
    """What the training left: figures, last state, and its running clock (None: it only compiled)."""

    figures: dict[str, Any]
    state: model.State
    clock: TrainingClock | None


def train(
    job: Job,
    source: ImageSource,
    console: Console,
    record: Run,
    report: Path | None,
    folder: Path,
    own: RunCheckpoints,
) -> Trained:
    """All updates of the plan."""
    config, plan = job.config, job.plan
    assert plan is not None
    program = Program(model.update(job), source.feed(job), plan.updates_per_call, job.key)
    with console.progress("initial weights"):
        state = model.init(job, stream(job.key, "init", 0))
    with console.progress("measuring the device"):
        throughput = Throughput(job)
    if config.compile_only or config.mlperf_logging:
        with console.progress(config.model_name):
            program.compile(state, min(plan.updates_per_call, program.updates_per_call))
        record.event("compile", updates_per_call=program.updates_per_call, **compile_seconds(program))
    if config.compile_only:
        return Trained(compile_seconds(program), state, None)
    clock = TrainingClock.start(record)
    SavedNetwork.of(job).write(own.folder)
    with ExitStack() as stack:
        checkpoints = stack.enter_context(own.open())
        bar = stack.enter_context(console.progress(config.model_name, plan.total_updates))
        resumed = own.newest(checkpoints, state) if config.resume else None
        bar.advance(resumed.step if resumed else 0)
        state = drive(
            program, plan, state, record, checkpoints if plan.updates("checkpoint") else None,
            resumed=resumed, progress=bar, latest=("learning_rate", "loss_scaling_factor"), guard="loss",
            on_log=throughput.on_log, report=report,
            how_to_resume=f"the same command with --resume --run-name {folder.name}",
        )  # fmt: skip
    return Trained({"updates": plan.total_updates, **throughput.result(program)}, state, clock)
