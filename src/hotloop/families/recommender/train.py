"""`hotloop recommender train` from beginning to end: ratings, plan, program, run, and the test after it.

What an update computes is in `model`; this is the order of things. It prints through the console that it is handed.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine import measure as reports
from hotloop.engine.checkpoint import Checkpoints, KeepLast
from hotloop.engine.device import platform
from hotloop.engine.drive import Diverged, drive, newest
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Program
from hotloop.engine.plan import Batch, Plan
from hotloop.engine.progress import Console, Progress
from hotloop.engine.run import Run, check_free, check_resumable
from hotloop.engine.sinks import ConsoleSink
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import batches, beside, model, rating_sets, saved_run, sparse_joint
from hotloop.families.recommender.config import Schedule, TrainOptions, make_schedule, warn_of_no_effect
from hotloop.families.recommender.rating_error import RatingError
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.families.recommender.validate_inline import InlineValidation
from hotloop.families.recommender.validations import Validations
from hotloop.families.recommender.validator import prediction_bounds
from hotloop.families.recommender.work import Work

MAY_DIFFER = (
    "logdir",
    "results_dir",
    "run_name",
    "resume",
    "report",
    "plan",
    "multiprocessing",
    "validation_batch_size",
)
NO_EFFECT = {"pipeline_num_parallel": 32, "validation_batches_per_step": 250, "select_ipus": "AUTO"}


def run(config: TrainOptions, console: Console, command: str) -> Mapping[str, Any]:
    """Train, or what --testing-on-checkpoint and --build-init ask for instead."""
    warn_of_no_effect(config, NO_EFFECT, console.warn)
    if config.testing_on_checkpoint is not None:
        return test_checkpoint(config, config.testing_on_checkpoint, console)
    check_free(run_folder(config), config.resume)
    config, data = prepare(config, console)
    if (fitting := fit_batch_size(config, data)) != config:
        console.warn(f"--batch-size {config.batch_size}: there are only {data.train.users} users to train with, "
                     "so that they are one batch")  # fmt: skip
    return train_run(fitting, data, console, command)


def prepare(config: TrainOptions, console: Console) -> tuple[TrainOptions, RatingSets]:
    """The ratings, checked, and the options with everything filled in that follows from them."""
    check_resumable(run_folder(config), config.resume)
    data = rating_sets.load_sets(config, console)
    check_truth(config, data)
    resolved: TrainOptions = replace(
        config.resolved(data.train.users, data.train.ratings),
        precision=model.resolve_precision(config.precision),  # type: ignore[arg-type]
    )
    if not config.named:
        console.say(
            f"--size {resolved.size} --batch-size {resolved.batch_size}: for {data.train.ratings:,} training ratings "
            f"of {data.train.users:,} users, where the options do not say otherwise"
        )
    return resolved, data


def fit_batch_size(config: TrainOptions, data: RatingSets) -> TrainOptions:
    """A batch of all users where there are fewer than a batch; one user, if that is all, trains too."""
    assert config.batch_size is not None
    return replace(config, batch_size=min(config.batch_size, data.train.users))


def check_truth(config: TrainOptions, data: RatingSets) -> None:
    """Ratings to validate or test with must be of users and items that were trained with."""
    for path, truth in (
        (config.validation_data_file, data.validation),
        (config.test_data_file, data.test),
    ):
        if truth is not None and not truth.ratings:
            raise DataError(
                f"{path}: none of its ratings has a user and an item of the training data; the ids of all files "
                "must come from one numbering"
            )


def make_plan(config: TrainOptions, data: RatingSets) -> tuple[Schedule, Plan]:
    """Calls as the old program counted them; validations, and a checkpoint with each."""
    config = fit_batch_size(config, data)
    assert config.batch_size is not None
    times = make_schedule(config, data.train.users)
    validated = data.validation is not None and not config.no_validation
    every = min(times.validate_every, times.updates)
    return times, Plan.for_updates(
        times.updates,
        log_every=min(config.steps_per_log * times.updates_per_call, times.updates),
        validate_every=every if validated else 0,
        validate_first=times.updates_per_call if validated else 0,
        checkpoint_every=every,
        updates_per_epoch=Fraction(data.train.users, config.batch_size),
        batch=Batch.of(config.batch_size),
    )


def describe(config: TrainOptions, data: RatingSets) -> str:
    """What the plan does not say: the network, its types, its rates, and memory on the device."""
    config = fit_batch_size(config, data)
    times = make_plan(config, data)[0]
    job = saved_run.make_job(config, data.train.n_items, times)
    state = jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    ratings = sum(part.nbytes for part in batches.make_rows(data.train) if part is not None)
    assert config.batch_size is not None
    dense = 24 * config.batch_size * job.items
    rates = ", ".join(f"{rate:g}" for rate in job.rates)
    drops = ", ".join(map(str, job.drops)) or "never"
    return (
        f"layers {data.train.n_items}, {', '.join(map(str, job.layers))} and back, {count:,} parameters, "
        f"{job.policy.compute}.{job.policy.update}, dropout {job.net.code_dropout:g}, re-feeding {job.net.refeeding}\n"
        f"rates {rates}, dropping at update {drops}\n"
        f"memory on the device: about {(2 * held + ratings + dense) / 2**20:.0f} MiB, of which ratings "
        f"{ratings / 2**20:.0f}"
    )


def make_feed(config: TrainOptions, job: model.Job, data: RatingSets) -> Resident:
    """Batches of users, made dense inside the loop, or left sparse where the update takes them so."""
    assert config.batch_size is not None
    sparse, capacity = takes_sparse(job, data), batches.max_ratings(data.train, config.batch_size)
    dtype = job.policy.compute

    def gather(rows: batches.DeviceRows, users: Array) -> dict[str, Any]:
        if sparse:
            return {"ratings": batches.SparseBatch(rows, users)}
        return {"ratings": batches.densify(rows, users, job.items, capacity, dtype)}

    rows = batches.make_rows(data.train)
    return Resident(rows, config.batch_size, seed=config.seed, samples=data.train.users, gather=gather)


def takes_sparse(job: model.Job, data: RatingSets) -> bool:
    """Whether an update on sparse ratings is the faster one: joint re-feeding in float32 on a CPU, few ratings."""
    net, full = job.net, data.train.ratings / (data.train.users * job.items)
    plain = net.refeeding == "joint" and not net.no_selu and job.policy.compute == jnp.float32
    return platform() == "cpu" and plain and full < sparse_joint.SPARSE_SHARE


def train_run(config: TrainOptions, data: RatingSets, console: Console, command: str) -> dict[str, Any]:
    """One run in a folder of its own."""
    times, plan = make_plan(config, data)
    work = Work(config, data, saved_run.make_job(config, data.train.n_items, times), plan, console)
    if work.validated and config.multiprocessing:
        beside.check(platform())
    folder, answers = run_folder(config), Validations(config.patience)
    report = reports.find_report_folder(config.report, folder, console.warn)
    with (
        Run.create(
            folder, work.settings, command=command, resume=config.resume, may_differ=MAY_DIFFER,
            sinks=[ConsoleSink(console.say)],
        ) as record,
        Checkpoints(
            record.checkpoints, answers | KeepLast(2), family=saved_run.FAMILY, config=work.settings
        ) as checkpoints,
        console.progress("recommender", plan.total_updates) as bar,
    ):  # fmt: skip
        if data.notice:
            record.event("warning", message=data.notice)
        if not (folder / "ratings.npz").exists():
            saved_run.write_training(folder, data.train)
        state = work.initial()
        if config.build_init:
            checkpoints.save(0, state, position={})
            checkpoints.wait()
            return {"run": str(folder), "updates": 0}
        state = trained(work, state, answers, record, checkpoints, bar, report)
        return evaluate_best(work, state, record, checkpoints)


def trained(
    work: Work,
    state: model.State,
    answers: Validations,
    record: Run,
    checkpoints: Checkpoints,
    bar: Progress,
    report: Path | None,
) -> model.State:
    """The state after the last update, every validation answered and the best checkpoint marked as such."""
    resumed = newest(checkpoints, state) if work.config.resume else None
    done = resumed.step if resumed else 0
    if work.config.resume:
        answers.remember(record.path, done)
    bar.advance(done)
    try:
        with validating(work, answers, record) as validate:
            for step in beside.left_over(record.path, done, answers.figures):
                validate.ask(step)
            last = drive(
                Program(
                    model.update(work.job),
                    make_feed(work.config, work.job, work.data),
                    work.plan.updates_per_call,
                    work.key,
                ),
                work.plan,
                state,
                record,
                checkpoints,
                resumed=resumed,
                validate=validate,
                progress=bar,
                latest=("learning_rate",),
                guard="loss",
                enough=answers.enough,
                report=report,
                how_to_resume=f"the same command with --resume --run-name {record.path.name}",
            )
            if validate is not None:
                validate.finish(work.console.say)
            return last
    except Diverged as error:
        best = checkpoints.best()
        named = "" if best is None else f", the best is step {best}"
        quarter = f"--base-learning-rate {work.config.base_learning_rate - 2:g} is a quarter of this rate"
        raise Diverged(f"{error}{named}; {quarter}") from None
    finally:
        answers.mark(checkpoints, state)


def validating(work: Work, answers: Validations, record: Run) -> AbstractContextManager[Any]:
    """Validation as the options want it: beside the training, between its calls, or None."""
    if not work.validated:
        return nullcontext()
    if work.config.multiprocessing:
        return beside.Beside(record, work, answers)
    work.console.say("Running validation...")
    return nullcontext(InlineValidation(record, work, answers))


def evaluate_best(work: Work, state: model.State, record: Run, checkpoints: Checkpoints) -> dict[str, Any]:
    """The best checkpoint's errors, as a record and as the result."""
    best = checkpoints.best()
    step = made = int(state["update"])
    if best is not None:
        state, step = checkpoints.restore(state, best).state, best
    result: dict[str, Any] = {"run": str(record.path), "updates": made, "best_step": step}
    for name, truth in (("validation", work.data.validation), ("test", work.data.test)):
        if truth is not None and not work.config.no_validation:
            with work.console.progress(f"evaluating ({name})"):
                errors = work.validation_errors if name == "validation" else work.errors(truth)
                result[name] = errors({"params": state["params"]})
            record.event("evaluation", update=step, epoch=work.epoch(step), split=name, **result[name])
            work.console.say(
                f"{name} RMSE {result[name]['rmse']:.4f}, MAE {result[name]['mae']:.4f} (step {step})"
            )
    if work.data.notice:
        work.console.warn(work.data.notice)
    return result


def test_checkpoint(config: TrainOptions, folder: Path, console: Console) -> dict[str, Any]:
    """RMSE of a run's best weights on the validation ratings; the training ratings are the run's own."""
    found = saved_run.load_run(folder, best=True)
    train = saved_run.load_training(found)
    if config.validation_data_file is None:
        raise OptionError("--testing-on-checkpoint: give the ratings to test on with --validation-data-file")
    truth = rating_sets.read_truth(config.validation_data_file, train, console)
    limits = prediction_bounds(config.clip, found.low, found.high)
    with console.progress("evaluating"):
        figures = RatingError(found.job, train, truth, config.validation_batch_size or 128, limits)(
            found.state
        )
    console.say(f"testing: RMSE {figures['rmse']:.4f}")
    return {"run": str(folder), "step": found.step, **figures}


def run_folder(config: TrainOptions) -> Path:
    """RESULTS/NAME, where the name says batch, seed and time unless it is given."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    return config.results_dir / (config.run_name or f"logs-bs{config.batch_size}-rn{config.seed}-{stamp}")
