"""From the example's options to what runs on this device: the Estimator's run config, and the plan.

`hotloop estimator`: an Estimator trained and tested on CIFAR-10, as a program to start from.
A glimpse of the family for `hotloop demo`: an Estimator learns drawn objects for a few seconds.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.data.dataset import Dataset
from hotloop.data.stand_ins import draw_objects
from hotloop.engine import device
from hotloop.engine import measure as reports
from hotloop.engine.device import platform
from hotloop.engine.plan import Batch, Plan, plan_updates
from hotloop.engine.progress import Console
from hotloop.engine.records import read_events, read_json
from hotloop.engine.run import check_makeable, default_path
from hotloop.errors import CheckpointError
from hotloop.families.estimator.cifar import dataset
from hotloop.families.estimator.cifar.config import CifarConfig
from hotloop.families.estimator.cifar.dataset import find_transform
from hotloop.families.estimator.cifar.model import PARAMETERS, model_fn
from hotloop.families.estimator.config import EvalSpec, Mode, RunConfig, TrainSpec
from hotloop.families.estimator.estimator import Estimator, train_and_evaluate
from hotloop.families.estimator.hooks import CallFigures, Hook, RunHandle
from hotloop.families.estimator.inputs import Arrays, FromArrays
from hotloop.options import to_jsonable


def make_run_config(config: CifarConfig, folder: Path, images: int, report: Path | None) -> RunConfig:
    """The options as the Estimator has them, with its folder."""
    every = config.evaluation_period(images)
    return RunConfig(
        model_dir=folder,
        batch_size=config.batch_size,
        iterations_per_call=config.batches_per_step,
        replicas=config.replicas,
        accumulation=config.gradient_accumulation_count,
        precision=pick_precision(config),
        seed=config.seed,
        log_steps=every,
        log_seconds=config.log_interval,
        summary_steps=config.summary_interval,
        checkpoint_steps=every,
        report=report,
    )


def pick_precision(config: CifarConfig) -> Any:
    """The one asked for, else the recipe's on this device."""
    half = config.chosen.half and platform() != "cpu"
    return config.precision or ("16.32" if half else "32.32")


def plan_run(config: CifarConfig) -> tuple[str, Plan]:
    """What would run: network and rule in a line, and the plan; nothing is fetched or compiled."""
    images, recipe = dataset.count_training_images(config), config.chosen
    parts = config.replicas * config.gradient_accumulation_count
    total, every = config.total_updates(images), config.evaluation_period(images) or 0
    plan = plan_updates(
        total,
        log_every=every or total,
        validate_every=every,
        checkpoint_every=every or None,
        updates_per_epoch=Fraction(images, config.batch_size),
        batch=Batch(config.batch_size // parts, config.replicas, config.gradient_accumulation_count),
    )
    line = (
        f"{PARAMETERS:,} parameters, recipe {config.recipe}: {recipe.rule}, learning rate {config.learning_rate:g}, "
        f"augmentation {recipe.augmentation}, precision {pick_precision(config)}; besides the events below a log every "
        f"{config.log_interval:g} s"
    )
    # That nothing is logged before the end is not so: logs go by seconds.
    return line, replace(plan, samples=images, longest_call=config.batches_per_step, warnings=())


TARGET = 0.75
"""Accuracy whose time is told."""
TESTED_AT_ONCE = 500
OPTIONS_OF_A_TEST = ("recipe", "learning_rate", "precision", "seed", "generated_data", "dataset_path")
"""Options that a test needs as they were in training."""


def run(config: CifarConfig, console: Console, given: Set[str] = frozenset()) -> Mapping[str, Any]:
    """Train, test, or both; `given` are the names of the options on the command line itself."""
    folder = config.model_dir or default_path("estimator", config.results_dir)
    report = reports.requested(config.report, folder, console.warn)
    if config.test_only:
        check_trained(config)
        config = recall_options(config, folder, given, console.say)
    else:
        check_makeable(folder)
    if config.replicas > 1:
        device.replica_mesh(config.replicas)  # too many are refused before data are read
    data = dataset.load_images(config, console)
    updates = config.total_updates(len(data.train))
    estimator = Estimator(
        model_fn,
        make_run_config(config, folder, len(data.train), report),
        {**_kept(config), "updates": updates},
        say=console.say,
        progress=console.progress,
    )
    result: dict[str, Any] = {
        "model_dir": str(estimator.model_dir),
        "recipe": config.recipe,
        "data": data.source,
    }
    if not config.test_only:
        result |= train(estimator, config, data, updates, console)
    if not config.train_only:
        result |= test(estimator, data, console)
        if report is not None:
            report_evaluation(estimator, data, report)
    if data.notice:
        console.warn(data.notice)
    return result


def _kept(config: CifarConfig) -> dict[str, Any]:
    """The options that a model's records hold for whoever tests it later."""
    path = config.dataset_path and config.dataset_path.absolute()
    return dict(
        to_jsonable({**{name: getattr(config, name) for name in OPTIONS_OF_A_TEST}, "dataset_path": path})
    )


def recall_options(
    config: CifarConfig, folder: Path, given: Set[str], say: Callable[[str], None]
) -> CifarConfig:
    """The options that the model was trained with, where the command line has none; what differs is said."""
    params = read_json(folder / "config.json").get("params", {}) if (folder / "config.json").exists() else {}
    had = {name: params[name] for name in OPTIONS_OF_A_TEST if name in params}
    asked = _kept(config)
    for name in sorted(had.keys() & given):
        if asked[name] != had[name]:
            say(f"option --{name.replace('_', '-')}: {asked[name]} (the run had {had[name]})")
    taken = {name: value for name, value in had.items() if name not in given}
    if taken.get("dataset_path"):
        taken["dataset_path"] = Path(taken["dataset_path"])
    return replace(config, **taken)


def check_trained(config: CifarConfig) -> None:
    """To test alone there must be a checkpoint."""
    if not any(Path(str(config.model_dir)).glob("checkpoints/[0-9]*")):
        raise CheckpointError(
            f"--test-only --model-dir {config.model_dir}: holds no checkpoint; train first, with the same --model-dir"
        )


def train(
    estimator: Estimator, config: CifarConfig, data: Dataset, updates: int, console: Console
) -> dict[str, Any]:
    """Make the updates that are missing."""
    recipe = config.chosen
    if recipe.expect:
        console.say(f"to expect: {recipe.expect}")
    images = Arrays(data.train.images, data.train.labels, transform=find_transform(recipe.augmentation))
    began = time.perf_counter()
    if config.evaluate_every is None:
        estimator.train(images, max_steps=updates)
    else:
        train_and_evaluate(estimator, TrainSpec(images, updates), EvalSpec(make_test_input(data)))
    result = {
        "seconds": time.perf_counter() - began,
        "global_step": estimator.latest_checkpoint(),
        **estimator.last_run,
    }
    if estimator.last_run:
        console.say(format_training(result))
    if config.evaluate_every is not None:
        result |= announce_target_time(estimator.model_dir, config.batch_size, console)
    return result


def format_training(result: Mapping[str, Any]) -> str:
    """What the training took."""
    compiling = result["lower_seconds"] + result["compile_seconds"]
    speed = f", {result['images_per_second']:,.0f} images/s" if result.get("images_per_second") else ""
    return (
        f"training: {result['seconds']:.2f} s to compile and run, {compiling:.2f} s of them compiling{speed}"
    )


def announce_target_time(folder: Path, batch_size: int, console: Console) -> dict[str, Any]:
    """When the target was first measured."""
    seconds = seconds_to(TARGET, read_events(folder), batch_size)
    when = "was not reached" if seconds is None else f"after {seconds:.2f} s of training"
    console.say(f"test accuracy {100 * TARGET:.0f} %: {when}")
    return {"seconds_to_75": seconds}


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


def make_test_input(data: Dataset) -> Arrays:
    """All of them, as they lie."""
    return Arrays(data.test.images, data.test.labels, batch_size=TESTED_AT_ONCE, shuffle=False)


def test(estimator: Estimator, data: Dataset, console: Console) -> dict[str, Any]:
    """Every test image, by the newest checkpoint."""
    began = time.perf_counter()
    found = estimator.measure(make_test_input(data))
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


def report_evaluation(estimator: Estimator, data: Dataset, folder: Path) -> None:
    """What the compiler made of the test, and a profile of it."""
    parts = estimator.parts
    source, model = parts.served(make_test_input(data), Mode.EVALUATE)
    assert isinstance(source, FromArrays)
    _, state = parts.restored(model, None)
    evaluation = parts.evaluation(source, model, None)
    evaluation.compile(state)
    seconds = evaluation.lower_seconds + evaluation.compile_seconds
    reports.write_program_report(folder, evaluation.compiled, seconds, "evaluation")
    with reports.trace_program(folder, "evaluation"):
        evaluation(state)


DEMO_TRAIN, DEMO_TEST = 2_000, 500
DEMO_BATCH, DEMO_UPDATES, DEMO_POINTS = 40, 120, 24


class AccuracyCurve(Hook):
    """The accuracy of every update."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def after_call(self, run: RunHandle, first: int, metrics: CallFigures) -> None:
        """Take a call in."""
        self.accuracy += metrics["accuracy"].tolist()


def demo_run(updates: int = DEMO_UPDATES) -> dict[str, Any]:
    """Training accuracy in a few points, the accuracy on objects not seen, and images a second."""
    images, shapes, _ = draw_objects(DEMO_TRAIN + DEMO_TEST, 0)
    curve = AccuracyCurve()
    with tempfile.TemporaryDirectory(prefix="hotloop-demo-") as folder:
        config = RunConfig(folder, batch_size=DEMO_BATCH, iterations_per_call=10)
        params = {"recipe": "fast", "learning_rate": 1e-3, "updates": updates}
        estimator = Estimator(model_fn, config, params, quiet=True)
        estimator.train(Arrays(images[:DEMO_TRAIN], shapes[:DEMO_TRAIN]), max_steps=updates, hooks=[curve])
        found = estimator.evaluate(
            Arrays(images[DEMO_TRAIN:], shapes[DEMO_TRAIN:], batch_size=DEMO_TEST, shuffle=False)
        )
    return {
        "accuracy": [float(np.mean(part)) for part in np.array_split(curve.accuracy, DEMO_POINTS)],
        "updates": updates,
        "test_accuracy": found["accuracy"],
        "images": DEMO_TRAIN,
        "images_per_second": estimator.last_run["images_per_second"],
    }
