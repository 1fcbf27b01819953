"""`hotloop recommender train` from beginning to end: ratings, plan, program, run, and the test after it.

What an update computes is in `model`; this is the order of things.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hotloop.engine import processes
from hotloop.engine.checkpoint_folder import KeepLast
from hotloop.engine.device import mesh_of_replicas, platform
from hotloop.engine.drive import Diverged, Interrupted
from hotloop.engine.feed import place_everywhere
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program
from hotloop.engine.plan import Batch, Plan
from hotloop.engine.progress import Console
from hotloop.engine.run import check_resumable
from hotloop.engine.training import TrainingRun, check_place, open_training
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import batches, model, rating_sets, saved_run
from hotloop.families.recommender.batches import Figures
from hotloop.families.recommender.commands_config import EXTRA, FAMILY
from hotloop.families.recommender.config import FILES, KS, TrainOptions, make_schedule, warn_of_no_effect
from hotloop.families.recommender.measures import check_reachable, count_likes, has_unrated_likes
from hotloop.families.recommender.saved_run import Setup
from hotloop.families.recommender.validation import (
    Validations,
    make_validation,
    measure_order,
    open_validation,
)
from hotloop.options import to_jsonable

MAY_DIFFER = (
    "logdir", "results_dir", "run_name", "resume", "report", "plan", "multiprocessing", "validation_batch_size",
    "replicas",
)  # fmt: skip


def run_folder(config: TrainOptions) -> Path:
    """RESULTS/NAME, where the name says batch, seed and time unless it is given."""
    stamp = processes.agreed(time.strftime("%Y%m%d_%H%M%S", time.gmtime()))
    return config.results_dir / (config.run_name or f"logs-bs{config.batch_size}-rn{config.seed}-{stamp}")


def prepare(config: TrainOptions, console: Console) -> Setup:
    """The ratings, checked, and all that follows from them and from the options."""
    if config.plan:
        check_resumable(run_folder(config), config.resume)
    else:
        check_place(run_folder(config), config.resume, config.report)
    mesh_of_replicas(config.replicas)  # too many are refused before data are read
    data = rating_sets.load_sets(config, console)
    parts = ((config.validation_data_file, data.validation), (config.test_data_file, data.test))
    for path, truth in parts:
        if truth is not None and not truth.ratings:
            raise DataError(
                f"{path}: none of its ratings has a user and an item of the training data; the ids of all files "
                "must come from one numbering"
            )
    if config.objective == "ranking":
        check_relevant(config, data)
    else:
        check_reachable(config.relevant, data.scale[1])
    users, ratings = data.train.users, data.train.ratings
    given, config = config, config.resolve(users, ratings)
    assert config.batch_size is not None
    if None in (given.size, given.batch_size) and given.named_sizes is None:
        console.say(
            f"--size {config.size} --batch-size {config.batch_size}: for {ratings:,} training ratings "
            f"of {users:,} users, where the options do not say otherwise"
        )
    if config.batch_size > users:
        console.warn(
            f"--batch-size {config.batch_size}: there are only {users} users to train with, so that they are one batch"
        )
    batch = min(config.batch_size, users)
    config = replace(config, batch_size=batch)
    config.check_split(batch)
    schedule = make_schedule(config, users)
    job = model.make_job(config, users, data.train.n_items, schedule.drops, *data.scale)
    if config.lr_schedule != "drops":
        model.make_rate(job)  # what cannot work with so many updates is refused before a folder is made
    every = min(schedule.validate_every, schedule.updates)
    is_validated = data.validation is not None and not config.no_validation
    plan = Plan.for_updates(
        schedule.updates,
        log_every=min(config.steps_per_log * schedule.updates_per_call, schedule.updates),
        validate_every=every if is_validated else 0,
        validate_first=schedule.updates_per_call if is_validated else 0,
        checkpoint_every=every,
        updates_per_epoch=Fraction(users, batch),
        batch=Batch.of(batch // config.replicas, config.replicas),
    )
    return Setup(replace(config, precision=job.net.precision), data, job, plan)


def check_relevant(config: TrainOptions, data: rating_sets.RatingSets) -> None:
    """A DataError where nobody likes anything: there is no order to learn, or none to validate by."""
    validation = None if config.no_validation else data.validation
    parts = (("training", data.train, data.name), ("validation", validation, data.files[0] or data.name))
    for name, part, where in parts:
        if part is not None and not (part.values() >= config.relevant).any():
            raise DataError(
                f"--relevant {config.relevant:g}: no {name} rating of {where} is as high; take a lower one"
            )
    if validation is not None and not has_unrated_likes(data.train, validation, config.relevant):
        raise DataError(
            f"{parts[1][2]}: its users have rated every item that they like there (--relevant {config.relevant:g}) in "
            "training, too, so that there is none to find; validate with other ratings"
        )


def describe(setup: Setup) -> str:
    """What the plan does not say: the network, its types, its rates, and memory on the device."""
    job = setup.job
    state = saved_run.state_shapes(job)
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    ratings = sum(part.nbytes for part in batches.make_rows(setup.data.train) if part is not None)
    assert setup.config.batch_size is not None
    # About six dense batches at a time, in float32, of each replica's users.
    dense = 6 * 4 * setup.config.batch_size // job.replicas * job.items
    device = "the device" if job.replicas == 1 else "each device"
    rates = ", ".join(f"{rate:g}" for rate in job.rates)
    rates = f"rates {rates}, dropping at update {', '.join(map(str, job.drops)) or 'never'}"
    objective = f"re-feeding {job.refeeding}"
    if job.is_ranking:
        code = f"Mult-VAE, KL up to {job.net.kl:g}" if job.net.kl else "Mult-DAE"
        objective = f"input dropout {job.input_dropout:g}, ranking by {code}"
    if job.net.lr_schedule != "drops":
        rates = f"rates by --lr-schedule {job.net.lr_schedule}"
    return (
        f"layers {job.items}, {', '.join(map(str, job.layers))} and back, {count:,} parameters, "
        f"{job.policy.compute}.{job.policy.update}, dropout {job.dropout:g}, {objective}\n"
        f"{rates}\n"
        f"memory on {device}: about {(2 * held + ratings + dense) / 2**20:.0f} MiB, of which ratings "
        f"{ratings / 2**20:.0f}"
    )


def run(config: TrainOptions, console: Console, command: str) -> Mapping[str, Any]:
    """Train, then evaluate the best checkpoint; or what --testing-on-checkpoint and --build-init ask for instead."""
    warn_of_no_effect(config, console.warn)
    if config.testing_on_checkpoint is not None:
        return test_checkpoint(config, config.testing_on_checkpoint, console)
    setup = prepare(config, console)
    config, data, job, folder = setup.config, setup.data, setup.job, run_folder(setup.config)
    batch, size = config.batch_size, config.validation_batch_size
    assert batch is not None and size is not None
    if setup.plan.has("validate") and config.multiprocessing:
        if platform() == "tpu":
            raise OptionError(
                "--multiprocessing: a TPU belongs to one process at a time; leave the option out"
            )
        if processes.count() > 1:
            raise OptionError("--multiprocessing: the processes of this run validate together; leave it out")
    # By paths that mean the same from everywhere, for evaluating the run later.
    files = {name: path.absolute() for name in FILES if (path := getattr(config, name))}
    extra = (data.train.users, job.items, job.drops, *data.scale)
    settings = to_jsonable({**asdict(config), **files, **dict(zip(EXTRA, extra, strict=True))})
    again = ("--resume", "--run-name", folder.name)
    # A process of its own gives figures after their checkpoint is saved, and a resumed run may have had one before.
    rule = saved_run.BEST[config.objective]
    validations = Validations(config.patience, late=config.multiprocessing or config.resume, rule=rule)
    with open_training(
        folder,
        settings,
        command=command,
        family=FAMILY,
        resume=config.resume,
        may_differ=MAY_DIFFER,
        options=type(config),
        keep=(validations if validations.late else rule) | KeepLast(2),
        console=console,
        report=config.report,
        notice=data.notice,
        how_to_resume=f"the same command with {' '.join(again)}",
        resume_words=again,
    ) as training:
        if processes.is_writer() and not (folder / "ratings.npz").exists():
            data.train.write(folder / "ratings.npz")
        key, is_sparse = seed_key(config.seed), model.takes_sparse(job, data.train)
        # 64-bit ids as pairs of 32 bits, which every device takes.
        users, items = (
            np.ascontiguousarray(ids).view(np.uint32).reshape(-1, 2)
            for ids in (data.train.user_ids, data.train.item_ids)
        )
        state = {**model.init(job, stream(key, "init", 0)), "ids": {"users": users, "items": items}}
        if config.build_init:
            training.checkpoints.save(0, state, position={})
            training.checkpoints.wait()
            return {"run": str(folder), "updates": 0}
        rows = model.choose_training(job, data.train)
        feed = batches.make_feed(
            rows, batch, config.seed, job.policy.compute, sparse=is_sparse, mesh=job.mesh
        )
        program = Program(model.update(job), feed, setup.plan.updates_per_call, key)
        state = place_everywhere(state, job.mesh)

        @cache  # compiled once for all of the run
        def errors_on(part: str) -> Callable[[Any], Figures]:
            return make_validation(job, data.train, getattr(data, part), size, job.mesh)

        state = make_updates(setup, program, training, state, validations, errors_on, console)
        step = made = int(state["update"])
        if (best := training.checkpoints.best()) is not None:
            state, step = training.checkpoints.restore(state, best).state, best
        result: dict[str, Any] = {"run": str(folder), "updates": made, "best_step": step}
        epoch = float(step / setup.plan.updates_per_epoch)
        parts = [part for part in ("validation", "test") if getattr(data, part) and not config.no_validation]
        is_random = config.training_data_file is None and config.data == "random"  # there is no order in them
        for part in parts:
            figures = result[part] = {}
            weights, has_order = {"params": state["params"]}, part == parts[-1] and not is_random
            if not (job.is_ranking and has_order):
                with console.progress(f"evaluating ({part})"):
                    figures |= errors_on(part)(weights)
            if has_order:  # what it is worth, and that of popularity
                with console.progress(f"ranking ({part})"):
                    likes = count_likes(data.train, config.relevant)
                    truth = getattr(data, part)
                    rates = not job.is_ranking
                    order = measure_order(job, data.train, truth, size, job.mesh, likes, rates=rates)(weights)
                    of_batches = ("rmse_mean_of_batches",)  # the old program's, which evaluate explains
                    figures |= {
                        name: value for name, value in order.items() if name not in (*figures, *of_batches)
                    }
            training.record.event("evaluation", update=step, epoch=epoch, split=part, **figures)
            for line in describe_figures(figures):
                console.say(f"{part} {line} (step {step})")
        return result


def describe_figures(figures: Figures) -> Iterator[str]:
    """Errors of ratings, and what the order of items is worth, as far as they were measured."""
    if "rmse" in figures:
        error = f" +- {figures['rmse_se']:.4f}" if "rmse_se" in figures else ""
        yield f"RMSE {figures['rmse']:.4f}{error}, MAE {figures['mae']:.4f}"
    if f"ndcg@{KS[0]}" in figures:
        ndcg, recall, coverage = (
            f"{name}@{k} {figures[f'{name.lower()}@{k}']:.4f}"
            for name, k in (("NDCG", KS[0]), ("Recall", KS[1]), ("coverage", KS[0]))
        )
        errors = [f"{figures[f'{name}_se']:.4f}" for name in (f"ndcg@{KS[0]}", f"recall@{KS[1]}")]
        popular = figures.get(f"popularity_ndcg@{KS[0]}")
        beside = "" if popular is None else f", popularity NDCG@{KS[0]} {popular:.4f}"
        yield f"{ndcg} +- {errors[0]}, {recall} +- {errors[1]}, {coverage}{beside}"


def make_updates(
    setup: Setup,
    program: Program,
    training: TrainingRun,
    state: model.State,
    validations: Validations,
    errors_on: Callable[[str], Callable[[Any], Figures]],
    console: Console,
) -> model.State:
    """Every update of the plan, from the newest checkpoint where the run is resumed; the state after the last."""
    config, plan, checkpoints = setup.config, setup.plan, training.checkpoints
    resumed = training.newest(state) if config.resume else None
    validation: Any = nullcontext()
    if plan.has("validate"):
        done = resumed.step if resumed else 0
        validation = open_validation(setup, training.record, validations, errors_on, done, console)
    try:
        with validation as validate:
            return training.train(
                program,
                plan,
                state,
                resumed=resumed,
                title=FAMILY,
                validate=validate,
                latest=("learning_rate",),
                guard="loss",
                enough=validations.enough if config.patience or validations.late else None,
            )
    except Diverged as error:
        best = checkpoints.best()
        where = "" if best is None else f", the best is step {best}"
        quarter = f"--base-learning-rate {config.base_learning_rate - 2:g} is a quarter of this rate"
        raise Diverged(f"{error}{where}; {quarter}") from None
    finally:
        checkpoints.wait()
        # Of several processes one that fails alone asks the others nothing more.
        failed_alone = not isinstance(sys.exception(), Interrupted | Diverged | None)
        if validations.late and not (processes.count() > 1 and failed_alone):
            validations.mark_best(checkpoints, state)


def test_checkpoint(config: TrainOptions, folder: Path, console: Console) -> dict[str, Any]:
    """RMSE of a run's best weights on the validation ratings; the training ratings are the run's own."""
    mesh = mesh_of_replicas(config.replicas)
    found = saved_run.load_run(folder, best=True)
    train = found.load_training()
    if config.validation_data_file is None:
        raise OptionError("--testing-on-checkpoint: give the ratings to test on with --validation-data-file")
    truth = rating_sets.read_truth(config.validation_data_file, train, console)
    # Clipped as this command says, whatever the run did.
    clipped = replace(found.config, clip=config.clip)
    job = model.make_job(clipped, found.users, found.job.items, found.job.drops, found.low, found.high)
    with console.progress("evaluating"):
        size = config.validation_batch_size or 128
        measure = make_validation(job, train, truth, size, mesh)
        figures = measure(place_everywhere(found.state, mesh))
    for line in describe_figures(figures):
        console.say(f"testing: {line.split(', MAE')[0]}")
    return {"run": str(folder), "step": found.step, **figures}
