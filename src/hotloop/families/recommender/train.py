"""`hotloop recommender train` from beginning to end: ratings, plan, program, run, and the test after it.

What an update computes is in `model`; this is the order of things. It prints through the console that it is handed.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.checkpoint import KeepLast
from hotloop.engine.device import platform
from hotloop.engine.drive import Diverged
from hotloop.engine.feed import Resident
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program
from hotloop.engine.plan import Batch, Plan
from hotloop.engine.progress import Console
from hotloop.engine.run import Run, check_resumable
from hotloop.engine.training import TrainingRun, check_place, open_training
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import batches, model, rating_sets, saved_run, validate_process
from hotloop.families.recommender.commands_config import EXTRA, FAMILY
from hotloop.families.recommender.config import FILES, TrainOptions, make_schedule, warn_of_no_effect
from hotloop.families.recommender.measures import make_rating_error
from hotloop.families.recommender.rating_sets import RatingSets
from hotloop.families.recommender.validations import (
    Figures,
    Validations,
    clear_folder,
    find_left_over,
    read_weights,
    weights_path,
)
from hotloop.options import to_jsonable

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
Measure = Callable[[Any], dict[str, float]]


@dataclass(frozen=True, eq=False)
class Setup:
    """A training that could begin: options with everything filled in, ratings, and what follows from them."""

    config: TrainOptions
    data: RatingSets
    job: model.Job
    plan: Plan

    @property
    def key(self) -> Array:
        return seed_key(self.config.seed)

    @property
    def is_validated(self) -> bool:
        """Whether there is something to validate with, and it is wanted."""
        return self.data.validation is not None and not self.config.no_validation

    @cached_property
    def validation_error(self) -> Measure:
        """Compiled once for all of the run."""
        assert self.data.validation is not None
        return self.rating_error(self.data.validation)

    def rating_error(self, truth: RatingMatrix) -> Measure:
        """Errors on these ratings as a function of {"params": weights}."""
        size = self.config.validation_batch_size
        assert size is not None
        return make_rating_error(model.evaluate(self.job), self.data.train, truth, size)


def run(config: TrainOptions, console: Console, command: str) -> Mapping[str, Any]:
    """Train, or what --testing-on-checkpoint and --build-init ask for instead."""
    folder = run_folder(config)
    warn_of_no_effect(config, console.warn)
    if config.testing_on_checkpoint is not None:
        return test_checkpoint(config, config.testing_on_checkpoint, console)
    check_place(folder, config.resume, config.report)
    return train_run(prepare(config, console), console, command)


def prepare(config: TrainOptions, console: Console) -> Setup:
    """The ratings, checked, and all that follows from them and from the options."""
    check_resumable(run_folder(config), config.resume)
    data = rating_sets.load_sets(config, console)
    parts = ((config.validation_data_file, data.validation), (config.test_data_file, data.test))
    for path, truth in parts:
        if truth is not None and not truth.ratings:
            raise DataError(
                f"{path}: none of its ratings has a user and an item of the training data; the ids of all files "
                "must come from one numbering"
            )
    users, ratings = data.train.users, data.train.ratings
    resolved = config.resolve(users, ratings)
    assert resolved.batch_size is not None
    if not config.has_sizes:
        console.say(
            f"--size {resolved.size} --batch-size {resolved.batch_size}: for {ratings:,} training ratings "
            f"of {users:,} users, where the options do not say otherwise"
        )
    if resolved.batch_size > users:
        console.warn(
            f"--batch-size {resolved.batch_size}: there are only {users} users to train with, so that they are one "
            "batch"
        )
    return make_setup(replace(resolved, batch_size=min(resolved.batch_size, users)), data)


def make_setup(config: TrainOptions, data: RatingSets) -> Setup:
    """Calls as the old program counted them; validations, and a checkpoint with each."""
    mode: Any = model.resolve_precision(config.precision)
    config = replace(config, precision=mode)
    assert config.batch_size is not None
    schedule = make_schedule(config, data.train.users)
    is_validated = data.validation is not None and not config.no_validation
    every = min(schedule.validate_every, schedule.updates)
    plan = Plan.for_updates(
        schedule.updates,
        log_every=min(config.steps_per_log * schedule.updates_per_call, schedule.updates),
        validate_every=every if is_validated else 0,
        validate_first=schedule.updates_per_call if is_validated else 0,
        checkpoint_every=every,
        updates_per_epoch=Fraction(data.train.users, config.batch_size),
        batch=Batch.of(config.batch_size),
    )
    return Setup(config, data, model.make_job(config, data.train.n_items, schedule.drops, *data.scale), plan)


def describe(setup: Setup) -> str:
    """What the plan does not say: the network, its types, its rates, and memory on the device."""
    job, train = setup.job, setup.data.train
    state = saved_run.state_shapes(job)
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    ratings = sum(part.nbytes for part in batches.make_rows(train) if part is not None)
    assert setup.config.batch_size is not None
    dense = 6 * 4 * setup.config.batch_size * job.items  # about six dense batches at a time, in float32
    rates = ", ".join(f"{rate:g}" for rate in job.rates)
    drops = ", ".join(map(str, job.drops)) or "never"
    return (
        f"layers {job.items}, {', '.join(map(str, job.layers))} and back, {count:,} parameters, "
        f"{job.policy.compute}.{job.policy.update}, dropout {job.net.code_dropout:g}, re-feeding {job.net.refeeding}\n"
        f"rates {rates}, dropping at update {drops}\n"
        f"memory on the device: about {(2 * held + ratings + dense) / 2**20:.0f} MiB, of which ratings "
        f"{ratings / 2**20:.0f}"
    )


def make_feed(setup: Setup) -> Resident:
    """Batches of users, made dense inside the loop, or left sparse where the update takes them so."""
    job, train, batch_size = setup.job, setup.data.train, setup.config.batch_size
    assert batch_size is not None
    sparse, capacity = takes_sparse(job, train), batches.max_ratings(train, batch_size)

    def gather(rows: batches.DeviceRows, users: Array) -> dict[str, Any]:
        if sparse:
            return {"ratings": batches.SparseBatch(rows, users)}
        return {"ratings": batches.densify(rows, users, job.items, capacity, job.policy.compute)}

    rows = batches.make_rows(train)
    return Resident(rows, batch_size, seed=setup.config.seed, samples=train.users, gather=gather)


def takes_sparse(job: model.Job, train: RatingMatrix) -> bool:
    """Whether an update on sparse ratings is the faster one: joint re-feeding in float32 on a CPU, few ratings."""
    net, full = job.net, train.ratings / (train.users * job.items)
    plain = net.refeeding == "joint" and not net.no_selu and job.policy.compute == jnp.float32
    return platform() == "cpu" and plain and full < model.SPARSE_SHARE


def train_run(setup: Setup, console: Console, command: str) -> dict[str, Any]:
    config, data = setup.config, setup.data
    if setup.is_validated and config.multiprocessing:
        validate_process.check_shareable(platform())
    folder, validations = run_folder(config), Validations(config.patience)
    # By paths that mean the same from everywhere, for whoever evaluates the run later.
    files = {name: path.absolute() for name in FILES if (path := getattr(config, name))}
    extra = (data.train.users, setup.job.items, setup.job.drops, *data.scale)
    settings = to_jsonable({**asdict(config), **files, **dict(zip(EXTRA, extra, strict=True))})
    with open_training(
        folder,
        settings,
        command=command,
        family=FAMILY,
        resume=config.resume,
        may_differ=MAY_DIFFER,
        options=type(config),
        keep=validations | KeepLast(2),
        console=console,
        report=config.report,
        notice=data.notice,
    ) as training:
        if not (folder / "ratings.npz").exists():
            data.train.write(folder / "ratings.npz")
        # 64-bit ids as pairs of 32 bits, which every device takes.
        users, items = (
            np.ascontiguousarray(ids).view(np.uint32).reshape(-1, 2)
            for ids in (data.train.user_ids, data.train.item_ids)
        )
        state = {
            **model.init(setup.job, stream(setup.key, "init", 0)),
            "ids": {"users": users, "items": items},
        }
        if config.build_init:
            training.checkpoints.save(0, state, position={})
            training.checkpoints.wait()
            return {"run": str(folder), "updates": 0}
        resumed = training.newest(state) if config.resume else None
        done = resumed.step if resumed else 0
        if config.resume:
            validations.remember(folder, done)
        left_over = find_left_over(folder, done, validations.figures)
        program = Program(model.update(setup.job), make_feed(setup), setup.plan.updates_per_call, setup.key)
        try:
            with open_validation(setup, validations, training.record, left_over, console) as validate:
                last = training.train(
                    program,
                    setup.plan,
                    state,
                    resumed=resumed,
                    title=FAMILY,
                    how_to_resume=f"the same command with --resume --run-name {folder.name}",
                    validate=validate,
                    latest=("learning_rate",),
                    guard="loss",
                    enough=validations.enough,
                )
        except Diverged as error:
            best = training.checkpoints.best()
            where = "" if best is None else f", the best is step {best}"
            quarter = f"--base-learning-rate {config.base_learning_rate - 2:g} is a quarter of this rate"
            raise Diverged(f"{error}{where}; {quarter}") from None
        finally:
            validations.mark_best(training.checkpoints, state)
        return evaluate_best(setup, last, training, console)


@contextmanager
def open_validation(
    setup: Setup, validations: Validations, record: Run, left_over: list[int], console: Console
) -> Iterator[Callable[[model.State], Figures] | None]:
    """Validation as the options want it, at first of weights that an earlier process left; None where none is wanted.

    In a process of its own, or between calls, while the training waits.
    """
    if not setup.is_validated:
        yield None
    elif setup.config.multiprocessing:
        assert setup.data.validation is not None
        truth = setup.data.validation
        with validate_process.ProcessValidation(
            record, setup.plan, validations, truth, console.say
        ) as process:
            for step in left_over:
                process.queue(step)
            yield process
            process.finish()
    else:
        console.say("Running validation...")

        def measure(params: Any) -> Figures:
            with console.progress("validating"):
                figures = setup.validation_error({"params": params})
            return {f"validation_{name}": value for name, value in figures.items()}

        def validate(state: model.State) -> Figures:
            figures = validations.figures[int(state["update"])] = measure(state["params"])
            return figures

        for step in left_over:
            weights = read_weights(weights_path(record.path, step), setup.job)
            validations.record(record, setup.plan, step, measure(weights))
        yield validate
        clear_folder(record.path)


def evaluate_best(
    setup: Setup, state: model.State, training: TrainingRun, console: Console
) -> dict[str, Any]:
    """The best checkpoint's errors, as a record and as the result."""
    best = training.checkpoints.best()
    step = made = int(state["update"])
    if best is not None:
        state, step = training.checkpoints.restore(state, best).state, best
    result: dict[str, Any] = {"run": str(training.record.path), "updates": made, "best_step": step}
    for name, truth in (("validation", setup.data.validation), ("test", setup.data.test)):
        if truth is not None and not setup.config.no_validation:
            with console.progress(f"evaluating ({name})"):
                measure = setup.validation_error if name == "validation" else setup.rating_error(truth)
                figures = result[name] = measure({"params": state["params"]})
            epoch = float(step / setup.plan.updates_per_epoch)
            training.record.event("evaluation", update=step, epoch=epoch, split=name, **figures)
            console.say(f"{name} RMSE {figures['rmse']:.4f}, MAE {figures['mae']:.4f} (step {step})")
    return result


def test_checkpoint(config: TrainOptions, folder: Path, console: Console) -> dict[str, Any]:
    """RMSE of a run's best weights on the validation ratings; the training ratings are the run's own."""
    found = saved_run.load_run(folder, best=True)
    train = found.load_training()
    if config.validation_data_file is None:
        raise OptionError("--testing-on-checkpoint: give the ratings to test on with --validation-data-file")
    truth = rating_sets.read_truth(config.validation_data_file, train, console)
    # Clipped as this command says, whatever the run did.
    clipped = replace(found.config, clip=config.clip)
    job = model.make_job(clipped, found.job.items, found.job.drops, found.low, found.high)
    with console.progress("evaluating"):
        size = config.validation_batch_size or 128
        measure = make_rating_error(model.evaluate(job), train, truth, size)
        figures = measure(found.state)
    console.say(f"testing: RMSE {figures['rmse']:.4f}")
    return {"run": str(folder), "step": found.step, **figures}


def run_folder(config: TrainOptions) -> Path:
    """RESULTS/NAME, where the name says batch, seed and time unless it is given."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    return config.results_dir / (config.run_name or f"logs-bs{config.batch_size}-rn{config.seed}-{stamp}")
