"""`hotloop cnn speedrun` from beginning to end: data, one compiled program, a run of it for each seed, records."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.compiler_options import choose_options
from hotloop.data.catalogue import known_set
from hotloop.data.dataset import IMAGE_SETS, Dataset, LabelledImages, read_images
from hotloop.data.load import load
from hotloop.data.local_files import check_named_folders, find_set
from hotloop.engine import processes
from hotloop.engine.device import platform
from hotloop.engine.drive import Diverged
from hotloop.engine.interrupt import leave_threads_behind
from hotloop.engine.plan import Batch, Plan
from hotloop.engine.progress import Console, compiling
from hotloop.engine.run import Run, check_free
from hotloop.engine.sinks import ConsoleSink
from hotloop.errors import DataError, OptionError
from hotloop.families.cnn.speedrun import program
from hotloop.families.cnn.speedrun.config import Recipe, SpeedrunConfig
from hotloop.families.cnn.speedrun.network import CLASSES
from hotloop.options import to_jsonable, values_of
from hotloop.rehearsal import begin_work

TYPES = {"gpu": "float16", "cuda": "float16"}
"""The type of products by platform, where it is not float32. Gradients of a summed loss are well inside float16's
range, and its three more bits than bfloat16's count where accuracies are a tenth of a per cent apart."""

POLL_SECONDS = 0.0005


def run(config: SpeedrunConfig, console: Console, command: str) -> Mapping[str, Any]:
    """Compile once, train and test for each seed; the mean accuracy and its standard error, and every run's figures."""
    if processes.count() > 1:
        raise OptionError(
            "cnn speedrun runs in one process, on one device; start it without `hotloop launch`"
        )
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
    folder = config.results_dir / (config.run_name or f"speedrun-{stamp}")
    check_free(folder, resume=False)
    if config.expect:
        console.say(f"to expect: {config.expect}")
    with console.progress("loading images"):
        data = load("cifar10", config.dataset_path, console.say, console.progress)
    job = make_job(config, data)
    settings = to_jsonable({**values_of(config), "precision": str(job.dtype), "data": data.source})
    with Run(folder, settings, command=command, sinks=[ConsoleSink(console.say)]) as record:
        if data.notice:
            record.event("warning", message=data.notice)
        speedrun = Speedrun(job, data, console, record)
        runs = [speedrun.run(config.seed + number) for number in range(config.repeats)]
        summary = summarise(runs)
        record.event("summary", **summary)
        if config.repeats > 1:
            console.say(in_words(summary))
    if data.notice:
        console.warn(data.notice)
    return {"run": str(folder), **summary, **speedrun.compile_seconds, "runs": runs}


def plan(config: SpeedrunConfig) -> Plan:
    """One call with the test at its end, on the images that are here, else on the whole set: a plan fetches nothing."""
    check_named_folders(config.dataset_path)
    found = find_set(known_set("cifar10"), config.dataset_path)
    images = len(read_images(found).train) if found and found.loadable else IMAGE_SETS["cifar10"][0]
    recipe = make_recipe(config)
    updates = recipe.updates(images)
    planned = Plan.for_updates(
        updates,
        checkpoint_every=0,
        validate_every=updates,
        updates_per_epoch=recipe.updates_per_epoch(images),
        batch=Batch(recipe.batch_size),
    )
    return replace(planned, warnings=())  # that it is one call is what it is for


def make_recipe(config: SpeedrunConfig) -> Recipe:
    return Recipe(batch_size=config.batch_size, epochs=config.epochs)


def make_job(config: SpeedrunConfig, data: Dataset) -> program.Job:
    """OptionError or DataError where the options do not fit the images."""
    if data.classes != CLASSES or len(data.test) == 0:
        raise DataError(f"{data.name}: not {CLASSES} classes with images to test with")
    recipe = make_recipe(config)
    recipe.updates(len(data.train))  # refuses a batch that is too large
    dtype = TYPES.get(platform(), "float32") if config.precision == "auto" else config.precision
    return program.Job(recipe, len(data.train), jnp.dtype(dtype))


class Speedrun:
    """The program, compiled for the data, which stay on the device."""

    def __init__(self, job: program.Job, data: Dataset, console: Console, record: Run):
        self._job, self._record = job, record
        begin_work("compiling")
        self._data = [jax.device_put(_arrays(split)) for split in (data.train, data.test)]
        self._bar = partial(console.progress, f"{job.updates} updates and the test")
        started = time.perf_counter()
        with console.progress("speedrun"), compiling(recorded=True):
            call = jax.jit(partial(program.run, job)).lower(*self._data, program.seed_arguments(0))
            lowered = time.perf_counter()
            self._call = call.compile(compiler_options=choose_options(call, platform()))
        self.compile_seconds: dict[str, Any] = {
            "lower_seconds": lowered - started,
            "compile_seconds": time.perf_counter() - lowered,
        }
        record.event("compile", updates_per_call=job.updates, **self.compile_seconds)
        if platform() != "cpu":
            # Libraries and kernels are loaded by the first call, which does not count.
            with console.progress("warming up"):
                _await(self._call(*self._data, program.seed_arguments(0)))

    def run(self, seed: int) -> dict[str, Any]:
        """One run: its seconds from bytes on the device to the accuracy on the host."""
        arguments = jax.device_put(program.seed_arguments(seed))
        with self._bar():
            started = time.perf_counter()
            found = _await(self._call(*self._data, arguments))
            seconds = time.perf_counter() - started
        job, loss = self._job, np.asarray(found["loss"])
        if len(bad := np.flatnonzero(~np.isfinite(loss))):
            number = int(bad[0]) + 1
            raise Diverged(
                f"loss is {loss[bad[0]]} at update {number} with seed={seed}; try precision=float32", number
            )
        figures = {
            "accuracy": float(found["accuracy"]),
            "plain_accuracy": float(found["plain_accuracy"]),
            "final_loss": float(loss[-1]),
            "seconds": seconds,
            "images_per_second": job.updates * job.recipe.batch_size / seconds,
            "seed": seed,
        }
        epoch = job.updates / job.recipe.updates_per_epoch(job.images)
        self._record.event("validation", update=job.updates, epoch=epoch, **figures, losses=loss.tolist())
        return figures


def _await(results: dict[str, Any]) -> dict[str, Any]:
    """The results on the host; between looks a signal can stop the process, which a CPU may keep busy for an hour."""
    try:
        while not all(each.is_ready() for each in results.values()):
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        leave_threads_behind()  # the call goes on, and nobody can end it
        raise
    found: dict[str, Any] = jax.device_get(results)
    return found


def _arrays(split: LabelledImages) -> dict[str, Any]:
    return {"image": split.images, "label": split.labels}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean accuracy with its standard error (None for one run), the median of the seconds, and their range."""
    accuracies, seconds = ([each[name] for each in runs] for name in ("accuracy", "seconds"))
    error = statistics.stdev(accuracies) / len(runs) ** 0.5 if len(runs) > 1 else None
    return {
        "accuracy": statistics.fmean(accuracies),
        "standard_error": error,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "repeats": len(runs),
    }


def in_words(summary: Mapping[str, Any]) -> str:
    return (
        f"{summary['repeats']} runs: accuracy: {100 * summary['accuracy']:.3f} % in the mean, standard error "
        f"{100 * summary['standard_error']:.3f}; {summary['seconds']:.3f} s each "
        f"({summary['fastest']:.3f} to {summary['slowest']:.3f})"
    )
