"""`hotloop estimator`: an Estimator trained and tested on CIFAR-10, as a program to start from; and its demo."""

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hotloop.data.catalogue import known_set
from hotloop.data.dataset import IMAGE_SETS, Dataset, LabelledImages, read_images
from hotloop.data.load import load
from hotloop.data.local_files import find_set
from hotloop.data.stand_ins import draw_objects
from hotloop.engine import measure as reports
from hotloop.engine import processes
from hotloop.engine.device import device_mesh, platform
from hotloop.engine.loading import load_once
from hotloop.engine.plan import Plan
from hotloop.engine.progress import Console
from hotloop.engine.run import check_makeable, default_path, read_events, read_json
from hotloop.errors import CheckpointError
from hotloop.families.estimator.cifar.config import CifarConfig
from hotloop.families.estimator.cifar.model import CLASSES, find_transform, model_fn
from hotloop.families.estimator.cifar.network import NETWORKS
from hotloop.families.estimator.config import EvalSpec, Mode, RunConfig, TrainSpec
from hotloop.families.estimator.estimator import Estimator, train_and_evaluate
from hotloop.families.estimator.hooks import CallFigures, Hook, RunHandle
from hotloop.families.estimator.inputs import Arrays, FromArrays
from hotloop.families.estimator.training import make_plan
from hotloop.options import to_jsonable

TARGET = 0.75  # accuracy whose time is reported
# Options that a test needs as they were in training.
OPTIONS_OF_A_TEST = ("recipe", "learning_rate", "precision", "seed", "generated_data", "dataset_path")
# Options that say how the network is divided, which its checkpoints do not depend on.
STAGE_OPTIONS = ("model_shard_position", "pipeline_schedule")
IDLE_SCHEDULE = "--pipeline-schedule: there is no --model-shard-position, so it changes nothing"
DEMO_TRAIN, DEMO_TEST = 2_000, 500
DEMO_UPDATES, DEMO_POINTS = 120, 24


def run(config: CifarConfig, console: Console, given: Set[str] = frozenset()) -> Mapping[str, Any]:
    """Train, test, or both; `given` are the names of the options on the command line itself."""
    folder = config.model_dir or default_path("estimator", config.results_dir)
    report = find_report(config, folder, console)
    if config.test_only:
        config = recall_options(config, folder, given, console.say)
    else:
        check_makeable(folder)
    if not config.test_only and config.has_idle_schedule:
        console.warn(IDLE_SCHEDULE)
    config = place_replicas(config, console.say)
    if config.generated_data:
        data = generate_images(config.seed)
        console.say(f"data: {len(data.train):,} + {len(data.test):,} random images with random labels")
    else:
        with console.progress("loading images"):
            loading = partial(load, "cifar10", config.dataset_path, console.say, console.progress)
            data = load_once(loading, Dataset)
    updates = config.total_updates(len(data.train))
    stages = {name: getattr(config, name) for name in STAGE_OPTIONS if config.stages > 1}
    estimator = Estimator(
        model_fn,
        make_run_config(config, len(data.train), folder, report),
        {**_options_of_a_test(config), "updates": updates, **stages},
        say=console.say,
        progress=console.progress,
    )
    new_images = Arrays(data.test.images, data.test.labels, batch_size=500, shuffle=False)
    result = {"model_dir": str(estimator.model_dir), "recipe": config.recipe, "data": data.source}
    if not config.test_only:
        transform = find_transform(config.chosen.augmentation)
        images = Arrays(data.train.images, data.train.labels, transform=transform)
        result |= train(estimator, config, images, new_images, updates, console)
    if not config.train_only:
        result |= test(estimator, new_images, console)
        if report is not None:
            # What the compiler made of the test, and a profile of it.
            source, job = estimator._read_served(new_images, Mode.EVALUATE)
            assert isinstance(source, FromArrays)
            state = job.place(estimator._restore(job, None)[1])
            evaluation = estimator._evaluation(source, job, None)
            evaluation.compile(state)
            seconds = evaluation.lower_seconds + evaluation.compile_seconds
            if processes.is_writer():
                reports.write_program_report(report, evaluation.compiled, seconds, "evaluation")
            processes.barrier("profile")
            traced = reports.trace_program(report, "evaluation") if processes.is_writer() else nullcontext()
            with traced:
                evaluation(state)
    if data.notice:
        console.warn(data.notice)
    return result


def find_report(config: CifarConfig, folder: Path, console: Console) -> Path | None:
    """Where the report goes that process 0 writes; None for none."""
    found = None
    if processes.is_writer():
        found = reports.find_report_folder(config.report, folder, console.warn)
    named = processes.agreed(None if found is None else str(found))
    return None if named is None else Path(named)


def place_replicas(config: CifarConfig, say: Callable[[str], None]) -> CifarConfig:
    """The options with as many replicas as there will be, before data are read: too many --replicas are refused, of
    --ipus those that are missing become parts of a batch."""
    asked, parts, there = (
        config.asked_replicas,
        config.gradient_accumulation_count,
        len(jax.devices(platform())),
    )
    if config.ipus is None or asked <= there:
        fit = asked * config.stages <= there  # or they merge
        device_mesh(asked, config.stages if fit else 1, platform())
        return replace(config, replicas=asked)
    replicas = next(
        count for count in range(there, 0, -1) if asked * parts % count == count % processes.count() == 0
    )
    on = f"--ipus {config.ipus} on {there} device{'s' * (there > 1)}"
    became = (
        f"{asked} replicas become {replicas} with accumulation {asked * parts // replicas} instead of {parts}"
    )
    say(f"{on}: {became}; the batch of {config.batch_size} and the learning rate stay")
    return replace(
        config, ipus=None, replicas=replicas, gradient_accumulation_count=asked * parts // replicas
    )


def generate_images(seed: int) -> Dataset:
    """As many random images and labels as CIFAR-10 has; nothing can be learnt from them."""
    generator = np.random.default_rng(seed)
    train, test = (
        LabelledImages(
            generator.integers(0, 256, (count, 32, 32, 3), np.uint8),
            generator.integers(0, CLASSES, count, np.int32),
        )
        for count in IMAGE_SETS["cifar10"]
    )
    return Dataset(name="generated", source="random", classes=CLASSES, train=train, test=test)


def count_training_images(config: CifarConfig) -> int:
    """How many there are where the files are here already, else how many CIFAR-10 has: nothing is fetched."""
    found = None if config.generated_data else find_set(known_set("cifar10"), config.dataset_path)
    return len(read_images(found).train) if found and found.loadable else IMAGE_SETS["cifar10"][0]


def make_run_config(
    config: CifarConfig, images: int, folder: Path | None = None, report: Path | None = None
) -> RunConfig:
    """The options as the Estimator has them; on an accelerator a recipe may want half precision."""
    often = config.evaluate_every
    every = None if often is None else max(1, int(often * images / config.batch_size))
    half = config.chosen.half and platform() != "cpu"
    return RunConfig(
        model_dir=folder,
        batch_size=config.batch_size,
        iterations_per_call=config.batches_per_step,
        replicas=config.asked_replicas,
        accumulation=config.gradient_accumulation_count,
        precision=config.precision or ("16.32" if half else "32.32"),
        seed=config.seed,
        log_steps=every,
        log_seconds=config.log_interval,
        summary_steps=config.summary_interval,
        checkpoint_steps=every,
        report=report,
    )


def plan_run(config: CifarConfig) -> tuple[str, Plan]:
    """What would run: network and rule in a line, and the plan; nothing is fetched or compiled."""
    images, recipe = count_training_images(config), config.chosen
    chosen, parameters = make_run_config(config, images), NETWORKS[recipe.network].parameters
    line = (
        f"{parameters:,} parameters, recipe {config.recipe}: {recipe.rule}, learning rate {config.learning_rate:g}, "
        f"augmentation {recipe.augmentation}, precision {chosen.precision}; besides the events below a log every "
        f"{config.log_interval:g} s"
    )
    if config.stages > 1:
        line += f"; two stages, the first of {config.model_shard_position} layers, {config.pipeline_schedule}"
    if config.has_idle_schedule:
        line += f"; {IDLE_SCHEDULE}"
    evaluates = config.evaluate_every is not None
    return line, make_plan(chosen, config.batch_size, images, None, config.total_updates(images), evaluates)


def recall_options(
    config: CifarConfig, folder: Path, given: Set[str], say: Callable[[str], None]
) -> CifarConfig:
    """The options that the model was trained with, where the command line has none; what differs is said."""
    if not any(folder.glob("checkpoints/[0-9]*")):
        raise CheckpointError(
            f"--test-only --model-dir {folder}: holds no checkpoint; train first, with the same --model-dir"
        )
    params = read_json(folder / "config.json").get("params", {}) if (folder / "config.json").exists() else {}
    had = {name: params[name] for name in OPTIONS_OF_A_TEST if name in params}
    wanted = _options_of_a_test(config)
    for name in sorted(had.keys() & given):
        if wanted[name] != had[name]:
            say(f"option --{name.replace('_', '-')}: {wanted[name]} (the run had {had[name]})")
    recalled = {name: value for name, value in had.items() if name not in given}
    if recalled.get("dataset_path"):
        recalled["dataset_path"] = Path(recalled["dataset_path"])
    return replace(config, **recalled)


def _options_of_a_test(config: CifarConfig) -> dict[str, Any]:
    options = {name: getattr(config, name) for name in OPTIONS_OF_A_TEST}
    path = config.dataset_path and config.dataset_path.absolute()
    return dict(to_jsonable({**options, "dataset_path": path}))


def train(
    estimator: Estimator,
    config: CifarConfig,
    images: Arrays,
    new_images: Arrays,
    updates: int,
    console: Console,
) -> dict[str, Any]:
    if config.chosen.expect:
        console.say(f"to expect: {config.chosen.expect}")
    began = time.perf_counter()
    if config.evaluate_every is None:
        estimator.train(images, max_steps=updates)
    else:
        train_and_evaluate(estimator, TrainSpec(images, updates), EvalSpec(new_images))
    seconds = time.perf_counter() - began
    took = estimator.last_run
    if took:
        compiling = took["lower_seconds"] + took["compile_seconds"]
        speed = f", {took['images_per_second']:,.0f} images/s" if took["images_per_second"] else ""
        console.say(
            f"training: {seconds:.2f} s to compile and run, {compiling:.2f} s of them compiling{speed}"
        )
    result = {"seconds": seconds, "global_step": estimator.latest_checkpoint(), **took}
    if config.evaluate_every is not None:
        reached = seconds_to(TARGET, read_events(estimator.model_dir), config.batch_size)
        when = "was not reached" if reached is None else f"after {reached:.2f} s of training"
        console.say(f"test accuracy {100 * TARGET:.0f} %: {when}")
        result["seconds_to_75"] = reached
    return result


def seconds_to(target: float, events: Iterable[Mapping[str, Any]], batch_size: int) -> float | None:
    """Seconds of updates, as the logs timed them, before the first validation of this accuracy; None without one."""
    seconds, done = 0.0, 0
    for event in events:
        rate, accuracy = event.get("throughput"), event.get("accuracy")
        if event["event"] == "log" and isinstance(rate, int | float) and rate > 0:
            seconds += max(0, event["update"] - done) * batch_size / rate
            done = event["update"]
        if event["event"] == "validation" and isinstance(accuracy, int | float) and accuracy >= target:
            return seconds
    return None


def test(estimator: Estimator, images: Arrays, console: Console) -> dict[str, Any]:
    began = time.perf_counter()
    found = estimator.measure(images)
    seconds = time.perf_counter() - began
    console.say(f"test: {found['samples']:,} examples evaluated in {seconds:.2f} s")
    console.say(f"test loss: {found['loss']:g}")
    console.say(f"test accuracy: {100 * found['accuracy']:.2f}%")
    return {
        "test_loss": found["loss"],
        "test_accuracy": found["accuracy"],
        "samples": found["samples"],
        "global_step": found["global_step"],
        "test_seconds": seconds,
    }


class AccuracyCurve(Hook):
    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def after_call(self, run: RunHandle, first: int, metrics: CallFigures) -> None:
        self.accuracy += metrics["accuracy"].tolist()


def demo_run(updates: int = DEMO_UPDATES) -> dict[str, Any]:
    """The network learns drawn objects: its accuracy in a few points, on objects not seen, and images a second."""
    images, shapes, _ = draw_objects(DEMO_TRAIN + DEMO_TEST, 0)
    seen, new = slice(0, DEMO_TRAIN), slice(DEMO_TRAIN, None)
    curve = AccuracyCurve()
    with tempfile.TemporaryDirectory(prefix="hotloop-demo-") as folder:
        config = RunConfig(folder, batch_size=40, iterations_per_call=10)
        params = {"recipe": "fast", "learning_rate": 1e-3, "updates": updates}
        estimator = Estimator(model_fn, config, params, quiet=True)
        estimator.train(Arrays(images[seen], shapes[seen]), max_steps=updates, hooks=[curve])
        found = estimator.evaluate(Arrays(images[new], shapes[new], batch_size=DEMO_TEST, shuffle=False))
    return {
        "accuracy": [float(np.mean(part)) for part in np.array_split(curve.accuracy, DEMO_POINTS)],
        "updates": updates,
        "test_accuracy": found["accuracy"],
        "images": DEMO_TRAIN,
        "images_per_second": estimator.last_run["images_per_second"],
    }
