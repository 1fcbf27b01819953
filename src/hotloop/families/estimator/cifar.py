"""`hotloop estimator`: an Estimator trained and tested on CIFAR-10, as a program to start from.

The order of things and what is said about them; the model is in `cifar_model`, the images in `cifar_data`. It prints
through the console that it is handed.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotloop.data.dataset import Dataset
from hotloop.engine import device
from hotloop.engine import measure as reports
from hotloop.engine.progress import Console
from hotloop.engine.records import read_events, read_json
from hotloop.engine.run import check_makeable, default_path
from hotloop.errors import CheckpointError
from hotloop.families.estimator import cifar_data
from hotloop.families.estimator.cifar_config import Cifar
from hotloop.families.estimator.cifar_images import transform_of
from hotloop.families.estimator.cifar_model import model_fn
from hotloop.families.estimator.cifar_settings import run_config
from hotloop.families.estimator.estimator import Estimator, train_and_evaluate
from hotloop.families.estimator.inputs import Arrays, FromArrays
from hotloop.families.estimator.spec import EvalSpec, Mode, TrainSpec
from hotloop.options import to_jsonable

TARGET = 0.75
"""Accuracy whose time is told."""
TESTED_AT_ONCE = 500
TESTED_WITH = ("recipe", "learning_rate", "precision", "seed", "generated_data", "dataset_path")
"""Options that a test needs as they were in training."""


def run(config: Cifar, console: Console, given: Set[str] = frozenset()) -> Mapping[str, Any]:
    """Train, test, or both; `given` are the names of the options on the command line itself."""
    folder = config.model_dir or default_path("estimator", config.results_dir)
    report = reports.requested(config.report, folder, console.warn)
    if config.test_only:
        check_trained(config)
        config = as_trained(config, folder, given, console.say)
    else:
        check_makeable(folder)
    if config.replicas > 1:
        device.replica_mesh(config.replicas)  # too many are refused before data are read
    data = cifar_data.load(config, console)
    updates = config.total_updates(len(data.train))
    estimator = Estimator(
        model_fn,
        run_config(config, folder, len(data.train), report),
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


def _kept(config: Cifar) -> dict[str, Any]:
    """The options that a model's records hold for whoever tests it later."""
    path = config.dataset_path and config.dataset_path.absolute()
    return dict(to_jsonable({**{name: getattr(config, name) for name in TESTED_WITH}, "dataset_path": path}))


def as_trained(config: Cifar, folder: Path, given: Set[str], say: Callable[[str], None]) -> Cifar:
    """The options that the model was trained with, where the command line has none; what differs is said."""
    params = read_json(folder / "config.json").get("params", {}) if (folder / "config.json").exists() else {}
    had = {name: params[name] for name in TESTED_WITH if name in params}
    asked = _kept(config)
    for name in sorted(had.keys() & given):
        if asked[name] != had[name]:
            say(f"option --{name.replace('_', '-')}: {asked[name]} (the run had {had[name]})")
    taken = {name: value for name, value in had.items() if name not in given}
    if taken.get("dataset_path"):
        taken["dataset_path"] = Path(taken["dataset_path"])
    return replace(config, **taken)


def check_trained(config: Cifar) -> None:
    """To test alone there must be a checkpoint."""
    if not any(Path(str(config.model_dir)).glob("checkpoints/[0-9]*")):
        raise CheckpointError(
            f"--test-only --model-dir {config.model_dir}: holds no checkpoint; train first, with the same --model-dir"
        )


def train(
    estimator: Estimator, config: Cifar, data: Dataset, updates: int, console: Console
) -> dict[str, Any]:
    """Make the updates that are missing."""
    recipe = config.chosen
    if recipe.expect:
        console.say(f"to expect: {recipe.expect}")
    images = Arrays(data.train.images, data.train.labels, transform=transform_of(recipe.augmentation))
    began = time.perf_counter()
    if config.evaluate_every is None:
        estimator.train(images, max_steps=updates)
    else:
        train_and_evaluate(estimator, TrainSpec(images, updates), EvalSpec(tested_images(data)))
    result = {
        "seconds": time.perf_counter() - began,
        "global_step": estimator.latest_checkpoint(),
        **estimator.last_run,
    }
    if estimator.last_run:
        console.say(trained_line(result))
    if config.evaluate_every is not None:
        result |= reached(estimator.model_dir, config.batch_size, console)
    return result


def trained_line(result: Mapping[str, Any]) -> str:
    """What the training took."""
    compiling = result["lower_seconds"] + result["compile_seconds"]
    speed = f", {result['images_per_second']:,.0f} images/s" if result.get("images_per_second") else ""
    return (
        f"training: {result['seconds']:.2f} s to compile and run, {compiling:.2f} s of them compiling{speed}"
    )


def reached(folder: Path, batch_size: int, console: Console) -> dict[str, Any]:
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


def tested_images(data: Dataset) -> Arrays:
    """All of them, as they lie."""
    return Arrays(data.test.images, data.test.labels, batch_size=TESTED_AT_ONCE, shuffle=False)


def test(estimator: Estimator, data: Dataset, console: Console) -> dict[str, Any]:
    """Every test image, by the newest checkpoint."""
    began = time.perf_counter()
    found = estimator.measure(tested_images(data))
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
    source, model = parts.served(tested_images(data), Mode.EVALUATE)
    assert isinstance(source, FromArrays)
    _, state = parts.restored(model, None)
    evaluation = parts.evaluation(source, model, None)
    evaluation.compile(state)
    seconds = evaluation.lower_seconds + evaluation.compile_seconds
    reports.write_program_report(folder, evaluation.compiled, seconds, "evaluation")
    with reports.trace_program(folder, "evaluation"):
        evaluation(state)
