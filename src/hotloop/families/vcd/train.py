"""`hotloop vcd train` from beginning to end: data, plan, program, run, and the evaluation after it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from hotloop.engine import processes
from hotloop.engine.device import mesh_of_replicas, platform
from hotloop.engine.feed import Resident, place_everywhere
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Evaluation, Program
from hotloop.engine.plan import Batch, Event, Plan
from hotloop.engine.progress import Console
from hotloop.engine.run import Run, has_finished, is_held, is_only_begun
from hotloop.engine.sinks import ConsoleSink
from hotloop.engine.training import check_place, open_training
from hotloop.errors import OptionError, RunError
from hotloop.families.vcd import evaluation, fused, images, model
from hotloop.families.vcd.config import FAMILY, PIXELS, VcdTrain
from hotloop.families.vcd.images import Images
from hotloop.layers import paths
from hotloop.options import to_jsonable

MAY_DIFFER = (
    "config_file",
    "results_dir",
    "run_name",
    "resume",
    "updates_per_call",
    "log_level",
    "report",
    "plan",
    "test_images",
    "replicas",
)
"""Options that change nothing about the numbers, so that a resumed run may have others."""


def run(config: VcdTrain, console: Console, command: str) -> Mapping[str, Any]:
    """Train as often as asked; the result of the last repeat, and of all of them under `runs`."""
    check_devices(config)
    folder = run_folder(config)
    check_place(folder, config.resume, config.report)
    if config.resume and not config.save_checkpoints and has_finished(folder):
        raise RunError(
            f"--resume: {folder} is finished and has no checkpoints; to train again give another --run-name"
        )
    data = images.load_images(config.data, console, hold_out=config.validation)
    results = []
    for repeat in range(config.repeats):
        single = replace(config, seed=config.seed + repeat, repeats=1)
        results.append(train_run(single, data, console, command))
    return {**results[-1], "runs": results} if config.repeats > 1 else results[-1]


def plan(config: VcdTrain, console: Console) -> Plan:
    """What `run` would do, and said before it: the sampler, when rates change, and memory on the device."""
    check_devices(config)
    samples = len(images.load_images(config.data, console, hold_out=config.validation).train)
    planned, job = make_plan(config, samples), model.make_job(config, samples, config.replicas)
    rates = ", ".join(f"{name} {rate:g}" for name, rate in config.rates().items())
    state = jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))
    values = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    share = config.micro_batch_size // config.replicas
    activations = 16 * 4 * share * (PIXELS + sum(config.hidden))
    memory = (2 * values + samples * PIXELS + activations) / 2**20
    gradients = 1 + config.hmc_steps * config.leapfrog_steps if config.method != "kl" else 1
    sampler = model.choose_sampler(job.model, share, config.replicas)
    device = "the device" if config.replicas == 1 else "each device"
    decay = f"{config.lr_schedule} factor"
    if config.lr_schedule == "exponential" and not config.lr_schedule_params:
        decay = f"x {config.rate_decay:g} every {config.decay_period(samples)} updates"
    console.say(
        f"method {config.method}, control variate {job.variate}, {gradients} gradients an update "
        f"({sampler} sampler on {platform()})\nrates: {rates}, {decay}\n"
        f"memory on {device}: about {memory:.0f} MiB"
    )
    return planned


def check_devices(config: VcdTrain) -> None:
    """There must be a device for each replica, and the kernel that was asked for must fit it and the networks."""
    mesh_of_replicas(config.replicas)
    if config.sampler not in ("fused", "hopper"):
        return
    if obstacle := find_fused_obstacle(config) if config.sampler == "fused" else find_hopper_obstacle(config):
        raise OptionError(f"--sampler {config.sampler}: {obstacle}; use --sampler auto")


def find_fused_obstacle(config: VcdTrain) -> str | None:
    if not fused.fits(config):
        return f"made for two hidden layers of at most {fused.WIDEST} and 64 latents"
    return None if platform() == "gpu" else f"a GPU kernel, and this is a {platform()}"


def find_hopper_obstacle(config: VcdTrain) -> str | None:
    from hotloop.families.vcd import hopper

    if not hopper.fits(config):
        return "made for two hidden layers of 191 to 206 and at most 14 latents"
    if config.replicas > 1:
        return f"works on one device, and --replicas is {config.replicas}"
    if platform() != "gpu":
        return f"a kernel for NVIDIA's Hopper cards, and this is a {platform()}"
    return paths.find_card_obstacle(hopper.count_blocks(config.micro_batch_size))


def run_folder(config: VcdTrain) -> Path:
    """RESULTS/NAME, or NAME_0, NAME_1, ... where that is taken. To resume: the run named, else the newest.

    One that was killed before its first record is no run, and its name is free.
    """
    return Path(processes.agreed(str(_find_folder(config) if processes.is_writer() else None)))


def _find_folder(config: VcdTrain) -> Path:
    # Without dots in front: a file `...yaml` must not name the folder above.
    first = config.results_dir / (config.run_name or Path(config.config_file).stem.lstrip(".") or "vcd")
    if config.resume and config.run_name:
        return first
    taken, free = [], first
    while free.exists():
        taken.append(free)
        free = first.with_name(f"{first.name}_{len(taken) - 1}")
    if not config.resume:
        killed = taken and is_only_begun(taken[-1]) and not is_held(taken[-1])
        return taken[-1] if killed else free
    if not taken:
        raise RunError(f"nothing to resume: {first} does not exist; start it without --resume")
    return taken[-1]


def train_run(config: VcdTrain, data: Images, console: Console, command: str) -> dict[str, Any]:
    folder, on_log = run_folder(config), log_pace(config.micro_batch_size)
    plan = make_plan(config, len(data.train))
    updates_per_call = min(plan.updates_per_call, config.updates_per_call or plan.total_updates)
    job = model.make_job(config, len(data.train), config.replicas)
    update = model.update(job)

    def gather(rows: Any, indices: Array) -> dict[str, Array]:
        """A batch whose rows know their image's number, where the control variates are."""
        return {"image": rows.at[indices].get(mode="promise_in_bounds"), "index": indices}

    key = seed_key(config.seed)
    feed = Resident(
        data.train,
        config.micro_batch_size,
        seed=config.seed,
        samples=len(data.train),
        gather=gather,
        sharding=job.sharding,
    )
    program = Program(update, feed, updates_per_call, key)
    say = (lambda _: None) if config.log_level in ("WARNING", "ERROR", "CRITICAL") else console.say
    again = ("--resume", "--run-name", folder.name, "--seed", str(config.seed))
    settings = to_jsonable({**asdict(config), "data": data.origin, "images": len(data.train)})
    with open_training(
        folder,
        settings,
        command=command,
        family=FAMILY,
        resume=config.resume,
        may_differ=MAY_DIFFER,
        options=VcdTrain,
        console=console,
        sinks=[ConsoleSink(say, ("checkpoint",) if config.log_level in ("NOTSET", "DEBUG") else ())],
        report=config.report,
        notice=data.notice,
        how_to_resume=f"the same command with {' '.join(again)}",
        resume_words=again,
    ) as training:
        say("Starting training...")
        state = training.train(
            program,
            plan,
            place_everywhere(model.init(job, stream(key, "init", 0)), job.mesh),
            title=f"vcd ({config.method})",
            on_log=on_log,
            latest=("learning_rate", "step_size"),
            guard="loss",
        )
        say("Finished training.")
        figures = final_figures(config, job, state, data, training.record, console)
    about = {"run": str(folder), "updates": plan.total_updates, "seed": config.seed, "method": config.method}
    return {**about, **figures}


def log_pace(batch_size: int) -> Callable[[Event, Mapping[str, Any]], dict[str, float]]:
    """Adds to each log what 10,000 updates would take, however many it is for."""

    def on_log(event: Event, figures: Mapping[str, Any]) -> dict[str, float]:
        speed = figures["throughput"]
        return {"seconds_per_10000_updates": 10_000 * batch_size / speed} if speed else {}

    return on_log


def make_plan(config: VcdTrain, images: int) -> Plan:
    """Exactly the updates that the epochs hold, rounded down once for the whole run, and twenty checkpoints."""
    batch, replicas = config.micro_batch_size, config.replicas
    if batch > images:
        raise OptionError(f"--micro-batch-size {batch}: there are only {images} training images")
    total = config.updates or config.epochs * images // batch
    return Plan.for_updates(
        total,
        log_every=min(config.log_every, total),
        checkpoint_every=max(1, total // 20) if config.save_checkpoints else 0,
        updates_per_epoch=Fraction(images, batch),
        batch=Batch.of(batch // replicas, replicas),
    )


def final_figures(
    config: VcdTrain, job: model.Job, state: Any, data: Images, record: Run, console: Console
) -> dict[str, Any]:
    """ELBO of the test images, and the log-likelihoods that were asked for, as records and as a result."""
    with console.progress("ELBO of the test images"):
        batch = {"image": data.test, "index": np.arange(len(data.test), dtype=np.int32)}
        sums = Evaluation(model.evaluate(job), batch, batch_size=500, sharding=job.sharding)(state)
    figures: dict[str, Any] = {"test_elbo": float(sums["elbo"] / sums["samples"])}
    update = make_plan(config, job.images).total_updates
    epoch = update * config.micro_batch_size / job.images
    record.event("validation", update=update, epoch=epoch, test_elbo=figures["test_elbo"])
    for name, asked in (("test", config.testing), ("validation", config.validation)):
        if asked:
            shown = getattr(data, name)[: config.test_images]
            figures[name] = evaluation.estimate_likelihoods(job, state, shown, config, config.seed, console)
            record.event("evaluation", update=update, epoch=epoch, split=name, **figures[name])
    return figures
