"""`hotloop cnn train` from beginning to end: options, data, job, program, run, validation of all checkpoints."""

import secrets
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import jax

from hotloop import startup
from hotloop.engine import processes
from hotloop.engine.checkpoint import RunCheckpoints
from hotloop.engine.checkpoint_folder import find_steps
from hotloop.engine.device import platform
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program, Sums
from hotloop.engine.measure import ceilings, known_ceilings
from hotloop.engine.plan import Batch
from hotloop.engine.precision import partials_note
from hotloop.engine.progress import Console
from hotloop.engine.run import (
    Run,
    check_makeable,
    check_options,
    current_records,
    has_finished,
    read_events,
    read_json,
)
from hotloop.engine.sink_group import Sink
from hotloop.engine.sinks import Announcer, ConsoleSink, Recorder, WandbSink, format_clock
from hotloop.engine.stage_rows import TreeForm
from hotloop.engine.training import TrainingRun, check_place, compiles_ahead, open_training
from hotloop.errors import CheckpointError, OptionError, PlanError, RunError
from hotloop.families.cnn import model
from hotloop.families.cnn.freezing import describe_frozen
from hotloop.families.cnn.initial_weights import begin_with
from hotloop.families.cnn.job import Job, resolve
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.own_folder import expected_size
from hotloop.families.cnn.presets import FAMILY, NETWORK_FILE, RUN_CONFIG
from hotloop.families.cnn.saved_network import (
    CLEANED,
    Kind,
    SavedNetwork,
    check_any,
    check_classes,
    check_same,
    check_shared_folder,
    checkpoints_at,
    counted_accuracy,
    read_saved_network,
    was_cleaned,
    weights_of,
)
from hotloop.families.cnn.sources import ImageSource, open_source
from hotloop.families.cnn.speed import Throughput, compile_seconds
from hotloop.options import to_jsonable, values_of

MAY_DIFFER = (
    "results_dir", "run_name", "resume", "report", "plan", "expect", "wandb", "wandb_run_name", "wandb_tags",
    "validation", "validation_micro_batch_size", "validation_num_replicas", "clean_dir", "top_k", "sweep",
    "target_accuracy", "dataset_path", "pipeline_num_parallel", "mlperf_logging", "checkpoint_input_dir",
    "random_weights", "strict_devices", "pipeline_validation_model", "pipeline_splits", "pipeline_schedule",
    "device_mapping", "recomputation",
)  # fmt: skip
"""Options that change nothing about the weights but their rounding, so that a resumed run may have others."""
SPLIT = ("num_replicas", "gradient_accumulation_count", "global_batch_size")
"""Options that may differ, too, where micro-batch and global batch stay: who computes which part of it."""
STARTS = "training"  # the record that a process's clock starts
TOOK = "time_to_train"  # the record that the run is trained and validated, and how long that took
TARGET_WIDTH = 0.02  # how fast the sweep's figure falls below the target


def run(
    config: TrainConfig,
    console: Console,
    command: str,
    given: Set[str] = frozenset(),
    configured: Set[str] = frozenset(),
) -> Mapping[str, Any]:
    """Train, validate, or both; `given` are the options of the command line, `configured` those of a configuration."""
    folder = run_folder(config)
    _check_phases(config, folder)
    config, was_drawn = _find_seed(config, folder)
    settings = to_jsonable(values_of(config))
    sinks: list[Sink] = [ConsoleSink(console.say)]
    if config.wandb and processes.is_writer():
        name = config.wandb_run_name or f"{config.model_name}-{config.dataset}-{time.strftime('%Y-%m-%d')}"
        place = folder if config.training else Path(tempfile.gettempdir())
        tags = {"tags": list(config.wandb_tags)} if config.wandb_tags else {}
        sinks.append(WandbSink(project="tf2-resnet50", name=name, config=settings, dir=str(place), **tags))
    if config.training:
        check_place(folder, config.resume, config.report)
        if config.checkpoint_output_dir is not None:
            check_makeable(config.checkpoint_output_dir, "--checkpoint-output-dir")
    saved = config.checkpoint_output_dir or folder / "checkpoints"
    own = RunCheckpoints(saved, folder, FAMILY, config.ckpt_all_instances)
    if config.resume and not config.compile_only and _is_done(config, settings, own):
        console.say(
            f"{folder} is finished, its checkpoints are in {own.folder}: there is nothing to go on with; "
            f"`hotloop cnn validate {folder}` validates them again"
        )
        return {"run": str(folder), "finished": True}
    asked = config.checkpoint_input_dir if config.validation else None
    others = others_to_validate(config, asked, own) if asked is not None else None
    # What cannot work is refused before data are read.
    expected = resolve(config, expected_size(config), None, given, configured)
    if others is not None and others.steps():
        check_same(read_saved_network(others.folder).network, expected.network, others.folder)
    with open_source(config, console, config.seed or 0) as source:
        for each in (own, others):
            if each is not None and each.steps():
                check_classes(read_saved_network(each.folder), source.classes, each.folder)
        job = resolve(config, source.size, None, given, configured, repeated=source.repeated)
        if config.expect:
            console.say(f"to expect: {config.expect}")
        for line in (*job.warnings, *job.notices):
            console.warn(line)
        if was_drawn:
            console.say(f"seed: {config.seed}")
        if config.half_partials:
            wide = "half partials: the network's sums are float32 all the same"
            console.say(partials_note(job.policy) or wide)
        if config.training:
            result = train_run(job, source, console, command, settings, sinks, own, others)
        else:  # reported, and nothing is written
            with Announcer(sinks) as record:
                if source.notice:
                    record.event("warning", message=source.notice)
                found = validate(job, source, console, record, own, others, None)
            result = {"seed": config.seed, **found}
            if source.notice:
                console.warn(source.notice)
    return result


def _find_seed(config: TrainConfig, folder: Path) -> tuple[TrainConfig, bool]:
    """The options with the seed that counts in every process, and whether it was drawn now, not by an earlier one."""
    goes_on = config.resume and (folder / RUN_CONFIG).exists()
    seed, was_drawn = config.seed, config.seed is None and not goes_on
    if was_drawn:
        seed = secrets.randbits(32)
    elif seed is None:
        seed = read_json(folder / RUN_CONFIG).get("seed")
    seed, was_drawn = processes.agreed([seed, was_drawn])
    return replace(config, seed=seed), was_drawn


def run_folder(config: TrainConfig) -> Path:
    """RESULTS/NAME, where the name says model, data and time unless it is given."""
    stamp = processes.agreed(time.strftime("%Y%m%d_%H%M%S", time.gmtime()))
    return config.results_dir / (config.run_name or f"{config.model_name}-{config.dataset}-{stamp}")


def _check_phases(config: TrainConfig, folder: Path) -> None:
    """OptionError where the options leave nothing to do, or ask for what the other phase has."""
    reason, alone = "", not config.training
    if alone and not config.validation:
        reason = "--training False --validation False: leaves nothing to do; leave one of them out"
    elif config.random_weights and config.training:
        reason = "--random-weights: goes with validation alone (--training False); leave it out"
    elif config.compile_only and alone:
        reason = "--compile-only: compiles the training program, and this only validates; leave it out"
    elif config.resume and alone:
        validating = "`hotloop cnn validate RUN` validates a run"
        reason = f"--resume --training False: there is no training to go on with; {validating}"
    elif alone and not (config.checkpoint_input_dir or config.random_weights) and folder.exists():
        random = "--random-weights validates random ones"
        reason = f"--training False: `hotloop cnn validate {folder}` validates that run; {random}"
    elif config.resume and config.run_name is None:
        reason = "--resume: say which run goes on by --run-name, the name of its folder"
    if reason:
        raise OptionError(reason)


def _is_done(config: TrainConfig, settings: Mapping[str, Any], own: RunCheckpoints) -> bool:
    """Whether a run came to its end: trained, validated, and rid of the checkpoints that were not to stay.

    RunError where it is finished and left nothing to go on from: it would start over unasked.
    """
    with own.open() as checkpoints:
        begun = checkpoints.begun()
    return bool(processes.agreed(processes.is_writer() and _has_ended(config, settings, own, begun)))


def _has_ended(config: TrainConfig, settings: Mapping[str, Any], own: RunCheckpoints, begun: bool) -> bool:
    """`_is_done` by the run's own records, where it has checkpoints or not."""
    assert own.run is not None
    if not begun and (was_cleaned(own) or has_finished(own.run)):
        cleaned = "its checkpoints were removed, as --clean-dir asked for"
        why = cleaned if was_cleaned(own) else "has no checkpoints"
        raise RunError(f"--resume: {own.run} is finished and {why}; to train again give another --run-name")
    if not has_finished(own.run) or all(each["event"] != TOOK for each in own.records()):
        return False
    check_options(own.run, settings, _may_differ(own.run, settings), type(config))
    return True


def _may_differ(run: Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The options that a run may go on with other values of."""
    file = run / "config.json"
    old = {**settings, **read_json(file)} if file.is_file() else settings
    before, now = _global_batch(old), _global_batch(settings)
    # Another micro-batch or rule is refused as such.
    same = before is not None and before == now and settings["statistics_rule"] == "spread"
    return (*MAY_DIFFER, *SPLIT) if same else MAY_DIFFER


def _global_batch(settings: Mapping[str, Any]) -> int | None:
    """Images of an update; None where the settings name both accumulation and global size, or no batch."""
    replicas, accumulation, size = (settings[name] for name in SPLIT)
    try:
        return Batch.of(
            settings["micro_batch_size"], replicas, accumulation=accumulation, global_size=size
        ).global_
    except PlanError:
        return None


def train_run(
    job: Job,
    source: ImageSource,
    console: Console,
    command: str,
    settings: Mapping[str, Any],
    sinks: Sequence[Sink],
    own: RunCheckpoints,
    others: RunCheckpoints | None,
) -> dict[str, Any]:
    config, plan, folder = job.config, job.plan, own.run
    assert plan is not None and folder is not None
    check_shared_folder(own, job.network, plan, averages=config.ema is not None)
    again = ("--resume", "--run-name", folder.name)
    with open_training(
        folder,
        settings,
        command=command,
        family=FAMILY,
        resume=config.resume,
        may_differ=_may_differ(folder, settings),
        options=type(config),
        checkpoints=lambda _: own.open(),
        console=console,
        sinks=sinks,
        report=config.report,
        notice=source.notice,
        each_process_saves=config.ckpt_all_instances,
        how_to_resume=f"the same command with {' '.join(again)}",
        resume_words=again,
    ) as training:
        record = training.record
        result: dict[str, Any] = {"run": str(folder), "seed": config.seed}
        program, state = _start(job, source, console, training, own.steps())
        device = jax.local_devices(backend=platform())[0]
        limits = known_ceilings(device)
        throughput = Throughput(job, limits)
        if config.compile_only or config.mlperf_logging:
            with console.progress(config.model_name):
                program.fit(state, plan.count_lengths())
                program.compile(state, min(plan.updates_per_call, program.updates_per_call))
            record.event("compile", updates_per_call=program.updates_per_call, **compile_seconds(program))
        if config.compile_only:
            return result | compile_seconds(program)
        clock = TrainingClock(record)
        about = config.dataset, config.precision, config.half, float(plan.updates_per_epoch)
        if processes.is_writer() or config.ckpt_all_instances:
            about_weights = config.ema is not None, source.classes
            SavedNetwork(job.network, *about, *about_weights).write(own.folder)
        state = training.train(
            program,
            plan,
            state,
            title=config.model_name,
            latest=("learning_rate", "loss_scaling_factor"),
            guard="loss",
            on_log=throughput.on_log,
        )
        result |= {"updates": plan.total_updates, **throughput.result(program)}
        if config.validation:
            training.checkpoints.wait()
            result |= validate(job, source, console, record, own, others, state)
            took = clock.stop(plan.total_updates, float(config.num_epochs))
            result |= took
            console.say(time_in_words(took))
            if config.clean_dir is not False and (made := training.checkpoints.steps()):
                if others is not None:
                    console.say(f"{len(made)} checkpoints of this run stay in {own.folder}: not validated")
                else:
                    _clean(job, training, own, made, result["best"]["step"], console)
        if limits is None and device.platform != "cpu":
            # Only now: nobody should wait for it before the first update, and it takes memory of its own.
            with console.progress("measuring the device"):
                result["mfu"] = throughput.share_of(ceilings(device))
    return result


def _start(
    job: Job, source: ImageSource, console: Console, training: TrainingRun, steps: Sequence[int]
) -> tuple[Program, model.State]:
    """The program, and the state of its first update; `steps` are those of which there are checkpoints. The compiler
    may be at work on the program."""
    config, plan, key = job.config, job.plan, seed_key(job.config.seed or 0)
    assert plan is not None
    weights_key = stream(key, "init", 0)
    with console.progress("initial weights"):
        beginning = None if steps else begin_with(config, job.network, source.classes, weights_key)
        weights = beginning.weights if beginning else None
        startup.end_part("weights")
        program = Program(model.update(job), source.feed(job), plan.updates_per_call, key)
        startup.end_part("data")
        # Others compile before the clock starts, and another call than the first.
        if compiles_ahead(job.mesh) and not (config.compile_only or config.mlperf_logging):
            forms = jax.eval_shape(partial(model.start, job), weights_key, weights)
            training.compile_ahead(program, plan, forms, max(steps, default=0))
        state = model.start(job, weights_key, weights)
    if beginning:
        console.say(beginning.said)
    if config.freeze:
        console.say(describe_frozen(job.network, config.freeze, job.frozen))
    return program, state


def _clean(
    job: Job, training: TrainingRun, own: RunCheckpoints, made: list[int], best: int, console: Console
) -> None:
    """Remove the run's checkpoints but the best and the last, or all."""
    assert job.plan is not None
    config, folder, last = job.config, training.checkpoints.folder, made[-1]
    kept = [] if config.clean_dir else sorted({best, last})
    gone = [step for step in made if step not in kept]
    # It is there already where a kill came right after it.
    if processes.is_writer() and not any(
        each["event"] == CLEANED for each in current_records(read_events(training.record.path))
    ):
        epoch = float(last / job.plan.updates_per_epoch)
        training.record.event(CLEANED, update=last, epoch=epoch, steps=gone, kept=kept)
    for step in gone:
        training.checkpoints.remove(step)
    _remove_empty(own.folder.absolute(), folder, is_ours=config.checkpoint_output_dir is None)
    if not kept:
        console.say(f"removed {len(made)} checkpoints, as --clean-dir asks for")
    elif gone:
        both = f"the best (step {best}) and the last (step {last}) stay"
        stay = both if len(kept) > 1 else f"the last (step {last}), which is the best, stays"
        console.say(f"of {len(made)} checkpoints {stay} in {folder}; --clean-dir False keeps all")


def _remove_empty(outer: Path, folder: Path, *, is_ours: bool) -> None:
    """Where no step is left: the word of which network they were of, and the folders, unless the user named them.

    `folder` is where this process saves: `outer`, or its own one inside of that.
    """
    own = folder != outer
    if own and not list(folder.iterdir()):
        folder.rmdir()
    processes.barrier("cleaned")
    if not (processes.is_writer() or own):
        return
    if not (find_steps(outer) or any(map(find_steps, outer.glob("rank*")))):
        (outer / NETWORK_FILE).unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # of several processes that see the same folder another was quicker
        if is_ours and not list(outer.iterdir()):
            outer.rmdir()


def others_to_validate(config: TrainConfig, asked: Path, own: RunCheckpoints) -> RunCheckpoints | None:
    """The checkpoints that --checkpoint-input-dir names, unless they are the run's own; CheckpointError where it has
    none and random weights were not asked for."""
    if config.training and asked.resolve() == own.folder.resolve():
        return None
    try:
        found = checkpoints_at(asked)
    except CheckpointError as error:
        raise CheckpointError(f"--checkpoint-input-dir {error}") from None
    if config.random_weights and found.steps():
        raise OptionError(f"--random-weights: {asked} holds checkpoints; leave out one of them")
    if not (config.training or config.random_weights):
        check_any(found)
    return found


def validate(
    job: Job,
    source: ImageSource,
    console: Console,
    record: Recorder,
    own: RunCheckpoints,
    others: RunCheckpoints | None,
    last: model.State | None,
) -> dict[str, Any]:
    """Every checkpoint that there is to validate, in the order of epochs, the best marked.

    `others` are checkpoints to validate in place of the run's own; `last` is the state that the training ended with
    (None: there was no training).
    """
    config, checkpoints = job.config, others or own
    in_hand: Any = None
    kinds: Sequence[Kind] = ("raw",)
    steps = processes.agreed(others.steps() if others else own.steps() if last is not None else [])
    if others:
        with others.open() as opened:
            for line in opened.damaged():
                console.warn(line)
    if steps:
        known = read_saved_network(checkpoints.folder)
        job, per_epoch, kinds = replace(job, network=known.network), known.updates_per_epoch, known.kinds
        form = known.weights(*kinds)
    else:
        per_epoch = float(job.plan.updates_per_epoch) if job.plan else 1.0
        lacking = f"{others.folder} holds no checkpoint" if others else "there is no checkpoint to validate"
        console.warn(f"{lacking}; {'random' if last is None else 'the last'} weights are validated")
        # By way of the host: they may lie on other devices than the images do.
        in_hand = (
            model.random_weights(job, stream(seed_key(config.seed or 0), "init", 0))
            if last is None
            else model.gather({name: last[name] for name in last if name not in ("optimiser", "scale")})
        )
        kinds = ("raw", "ema") if last is not None and config.ema else kinds
    assert job.validation is not None
    compute = model.evaluate_stages(job) if job.validates_in_stages else model.evaluate(job)
    if steps and job.validates_in_stages:
        form = TreeForm.of(form).blank()  # read to the host: the whole need fit on no device
    evaluation = source.evaluation(compute, job.validation.batch, job.validation_sharding)

    found: list[dict[str, Any]] = []
    wanted = sorted(steps) or [int(in_hand.pop("update", 0))]
    with console.progress("validation", len(wanted)) as bar:
        for step in wanted:
            state = in_hand
            if state is None:
                with checkpoints.open() as opened:
                    state = opened.restore(form, step, in_part=True).warn().state
            figures: dict[str, Any] = {}
            for kind in kinds:
                weights = weights_of(state, kind)
                if job.validates_in_stages:
                    weights = model.spread_weights(job, weights)
                figures |= validation_figures(evaluation(weights), config.top_k, kind)
            epoch = step / per_epoch
            record.event("validation", update=step, epoch=epoch, **figures)
            found.append({"step": step, "epoch": epoch, **figures})
            bar.advance(1)
    if not steps:
        return {"validation": found, "best": None}
    best = max(found, key=lambda each: (counted_accuracy(each), -each["step"]))  # of equals the earliest
    # No colon: the last "accuracy: X %" of a log is that of the last checkpoint, as old patterns mean it.
    accuracy = f"{'ema ' if 'ema' in kinds else ''}accuracy {100 * counted_accuracy(best):.2f} %"
    console.say(f"best of {len(found)}: step {best['step']}, epoch {best['epoch']:g}, {accuracy}")
    result: dict[str, Any] = {"validation": found, "best": best}
    if config.sweep:
        figures = sweep_figures(found, config.target_accuracy)
        record.event("sweep", **figures)
        result |= figures
    return result


def validation_figures(sums: Sums, top: int, kind: Kind = "raw") -> dict[str, Any]:
    """Accuracies and mean loss over every image."""
    count, name = sums["samples"], "validation" if kind == "raw" else kind
    return {
        f"{name}_accuracy": sums["correct"] / count,
        # Not "accuracy": whoever looks for the last "accuracy: X %" of a log must not find this one.
        f"{name}_top_{top}": sums["correct_top"] / count,
        f"{name}_loss": sums["loss"] / count,
        "samples": count,
    }


def sweep_figures(found: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """When the target was first reached, and the figure that a sweep maximises: both by the last checkpoint's rule."""
    reached = [each["epoch"] for each in found if counted_accuracy(each) >= target]
    last = found[-1]
    short = min(counted_accuracy(last) - target, 0.0) / TARGET_WIDTH
    return {
        "target_accuracy": target,
        "epoch_to_target": reached[0] if reached else None,
        "optimization_metric": exp(-0.5 * short**2) / last["epoch"] if last["epoch"] else None,
    }


class TrainingClock:
    """From the start of training to the end of validation, over all processes that a run took.

    Those before count up to their last record: work that was lost and done again counts, time between them does not.
    """

    def __init__(self, record: Run):
        self._record, self._began = record, time.perf_counter()
        self._before = seconds_of_processes(read_events(record.path)) if processes.is_writer() else []
        record.event(STARTS, process=len(self._before) + 1, seconds_before=sum(self._before))

    def stop(self, update: int, epoch: float) -> dict[str, Any]:
        seconds, processes = sum(self._before) + time.perf_counter() - self._began, len(self._before) + 1
        self._record.event(TOOK, update=update, epoch=epoch, seconds=seconds, processes=processes)
        return {"time_to_train_seconds": seconds, "time_to_train_processes": processes}


def seconds_of_processes(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """The seconds that each process had on its clock when it wrote its last record."""
    spent: list[float] = []
    began = None
    for event in events:
        if event["event"] == "start":
            began = None
        elif event["event"] == STARTS:
            began = event.get("elapsed", 0.0)
            spent.append(0.0)
        if began is not None:
            spent[-1] = event.get("elapsed", began) - began
    return spent


def time_in_words(figures: Mapping[str, Any]) -> str:
    """`time to train: h:mm:ss`, and in how many processes where it was not one."""
    clock = format_clock(round(figures["time_to_train_seconds"]))
    processes = figures["time_to_train_processes"]
    return f"time to train: {clock}" + (f", in {processes} processes" if processes > 1 else "")
