"""`hotloop recommender train` from beginning to end: ratings, plan, program, run, and the test after it.

What an update computes is in `model`; this is the order of things. It prints through the console that it is handed.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from jax import Array

from hotloop.engine import report as reports
from hotloop.engine.checkpoint import Checkpoints, KeepLast
from hotloop.engine.drive import drive, newest
from hotloop.engine.feed import Resident
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program
from hotloop.engine.plan import Batch, Plan, plan_updates
from hotloop.engine.records import jsonable
from hotloop.engine.run import Run, current, read_events
from hotloop.engine.sinks import ConsoleSink
from hotloop.errors import OptionError
from hotloop.families.console import Console
from hotloop.families.recommender import batches, model, saved, sets
from hotloop.families.recommender.config import Schedule, Train, schedule
from hotloop.families.recommender.errors_of import Errors
from hotloop.families.recommender.sets import Sets

MAY_DIFFER = ("logdir", "run_name", "resume", "report", "plan", "multiprocessing", "validation_batch_size")
NO_EFFECT = {"pipeline_num_parallel": 32, "validation_batches_per_step": 250, "select_ipus": "AUTO"}


def run(config: Train, console: Console, command: str) -> Mapping[str, Any]:
    """Train, or what --testing-on-checkpoint and --build-init ask for instead."""
    named = [
        f"--{name.replace('_', '-')}" for name, usual in NO_EFFECT.items() if getattr(config, name) != usual
    ]
    if named:
        console.warn(f"{', '.join(named)}: no effect here")
    config = config.resolved()
    if config.testing_on_checkpoint is not None:
        return test_only(config, config.testing_on_checkpoint, console)
    data = sets.load(config, console)
    return once(config, data, console, command)


def planned(config: Train, data: Sets) -> tuple[Schedule, Plan]:
    """Calls as the old program counted them; validations, and a checkpoint with each."""
    assert config.batch_size is not None
    times = schedule(config, data.train.users)
    validated = data.validation is not None and not config.no_validation
    every = min(times.validate_every, times.updates)
    return times, plan_updates(
        times.updates,
        log_every=min(config.steps_per_log * times.updates_per_call, times.updates),
        validate_every=every if validated else 0,
        validate_first=times.updates_per_call if validated else 0,
        checkpoint_every=every,
        updates_per_epoch=Fraction(data.train.users, config.batch_size),
        batch=Batch.of(config.batch_size),
    )


def describe(config: Train, data: Sets) -> str:
    """What the plan does not say: the network, its types, its rates, and memory on the device."""
    times = planned(config, data)[0]
    job = saved.job_of(config, data.train.n_items, times)
    state = jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    ratings = sum(part.nbytes for part in batches.rows_of(data.train) if part is not None)
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


def feed_of(config: Train, job: model.Job, data: Sets) -> Resident:
    """Batches of users, made dense inside the loop."""
    assert config.batch_size is not None
    capacity = batches.largest(data.train, config.batch_size)
    dtype = job.policy.compute

    def gather(rows: batches.Rows, users: Array) -> dict[str, Array]:
        return {"ratings": batches.densify(rows, users, job.items, capacity, dtype)}

    rows = batches.rows_of(data.train)
    return Resident(rows, config.batch_size, seed=config.seed, samples=data.train.users, gather=gather)


def once(config: Train, data: Sets, console: Console, command: str) -> dict[str, Any]:
    """One run in a folder of its own."""
    assert config.validation_batch_size is not None
    times, plan = planned(config, data)
    job = saved.job_of(config, data.train.n_items, times)
    low, high = data.scale
    bounds = (low, high) if config.clip else (-float("inf"), float("inf"))
    key = seed_key(config.seed)
    state = saved.initial(job, stream(key, "init", 0), data.train.user_ids, data.train.item_ids)
    report = reports.requested(str(config.report) if config.report else None, console.warn)
    if report is not None:
        reports.check_writable(report)
    extra = {"users": data.train.users, "items": job.items, "drops": job.drops, "low": low, "high": high}
    settings = jsonable({**asdict(config), **extra})
    folder = run_folder(config)
    keep = saved.BEST | KeepLast(2)
    with (
        Run.create(
            folder, settings, command=command, resume=config.resume, may_differ=MAY_DIFFER,
            sinks=[ConsoleSink(console.say)],
        ) as record,
        Checkpoints(record.checkpoints, keep, family=saved.FAMILY, config=settings) as checkpoints,
        console.progress("recommender", plan.total_updates) as bar,
    ):  # fmt: skip
        if data.notice:
            record.event("warning", message=data.notice)
        if not config.resume:
            saved.write_training(folder, data.train)
        if config.build_init:
            checkpoints.save(0, state, position={})
            checkpoints.wait()
            return {"run": str(folder), "updates": 0}
        resumed = newest(checkpoints, state) if config.resume else None
        bar.advance(resumed.step if resumed else 0)
        watch = Patience(config.patience, folder if config.resume else None)
        validate = None
        if data.validation is not None and not config.no_validation:
            console.say("Running validation...")
            errors = Errors(job, data.train, data.validation, config.validation_batch_size, bounds)
            validate = watch.validating(errors)
        state = drive(
            Program(model.update(job), feed_of(config, job, data), plan.updates_per_call, key),
            plan,
            state,
            record,
            checkpoints,
            resumed=resumed,
            validate=validate,
            progress=bar,
            latest=("learning_rate",),
            guard="loss",
            enough=watch.enough,
            report=report,
            how_to_resume=f"the same command with --resume --run-name {folder.name}",
        )
        return final(config, job, state, data, checkpoints, record, bounds, console)


def final(
    config: Train,
    job: model.Job,
    state: Any,
    data: Sets,
    checkpoints: Checkpoints,
    record: Run,
    bounds: tuple[float, float],
    console: Console,
) -> dict[str, Any]:
    """The best checkpoint's errors, as a record and as the result."""
    assert config.validation_batch_size is not None
    best = checkpoints.best()
    step = int(state["update"])
    if best is not None:
        state, step = checkpoints.restore(state, best).state, best
    result: dict[str, Any] = {"run": str(record.path), "updates": int(state["update"]), "best_step": step}
    for name, truth in (("validation", data.validation), ("test", data.test)):
        if truth is not None and not config.no_validation:
            result[name] = Errors(job, data.train, truth, config.validation_batch_size, bounds)(state)
            record.event("evaluation", update=step, split=name, **result[name])
            console.say(
                f"{name} RMSE {result[name]['rmse']:.4f}, MAE {result[name]['mae']:.4f} (step {step})"
            )
    if data.notice:
        console.warn(data.notice)
    return result


class Patience:
    """Remembers the best validation and how many came after it; a resumed run remembers from its records."""

    def __init__(self, patience: int | None, folder: Path | None):
        self.patience, self.best, self.since = patience, float("inf"), 0
        for event in current(read_events(folder)) if folder else ():
            if event["event"] == "validation" and event.get("validation_rmse") is not None:
                self.take(event["validation_rmse"])

    def take(self, rmse: float) -> None:
        """One more validation."""
        self.since = 0 if rmse < self.best else self.since + 1
        self.best = min(self.best, rmse)

    def validating(self, errors: Errors) -> Any:
        """A validation that is remembered."""

        def validate(state: Any) -> dict[str, float]:
            found = errors(state)
            self.take(found["rmse"])
            return {f"validation_{name}": value for name, value in found.items()}

        return validate

    def enough(self) -> bool:
        """Whether so many validations were no better."""
        return self.patience is not None and self.since >= self.patience


def test_only(config: Train, folder: Path, console: Console) -> dict[str, Any]:
    """RMSE of a run's best weights on the validation ratings; the training ratings are the run's own."""
    found = saved.load(folder, best=True)
    train = saved.load_training(found)
    if config.validation_data_file is None:
        raise OptionError("--testing-on-checkpoint: give the ratings to test on with --validation-data-file")
    truth = sets.truth(config.validation_data_file, train, console)
    bounds = (found.low, found.high) if config.clip else (-float("inf"), float("inf"))
    figures = Errors(found.job, train, truth, config.validation_batch_size or 128, bounds)(found.state)
    console.say(f"testing: RMSE {figures['rmse']:.4f}")
    return {"run": str(folder), "step": found.step, **figures}


def run_folder(config: Train) -> Path:
    """LOGDIR/NAME, where the name says batch, seed and time unless it is given."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    return config.logdir / (config.run_name or f"logs-bs{config.batch_size}-rn{config.seed}-{stamp}")
