"""Validation of checkpoints, one after the other in the order of epochs, and which of them is the best.

`validate` is that phase of a run. Counts are exact: every image once, whatever the batch. It reads checkpoints, and
deletes and trains nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import exp
from typing import Any

import jax

from hotloop.engine.evaluate import Sums
from hotloop.engine.keys import stream
from hotloop.engine.progress import Console
from hotloop.engine.sinks import Recorder
from hotloop.engine.training import RunCheckpoints
from hotloop.errors import CheckpointError, OptionError
from hotloop.families.cnn import model
from hotloop.families.cnn.job import Job
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.saved import (
    SavedNetwork,
    check_any,
    checkpoints_at,
    read_saved_network,
    restore_weights,
)
from hotloop.families.cnn.sources import ImageSource

TARGET_WIDTH = 0.02  # how fast the sweep's figure falls below the target


@dataclass(frozen=True)
class ValidatedStep:
    """One checkpoint's figures."""

    step: int
    epoch: float
    figures: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.figures["validation_accuracy"])

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch, **self.figures}


def validation_figures(sums: Sums, top: int) -> dict[str, Any]:
    """Accuracies and mean loss over every image."""
    count = sums["samples"]
    return {
        "validation_accuracy": sums["correct"] / count,
        # Not "accuracy": whoever looks for the last "accuracy: X %" of a log must not find this one.
        f"validation_top_{top}": sums["correct_top"] / count,
        "validation_loss": sums["loss"] / count,
        "samples": count,
    }


def validate_steps(
    steps: list[int],
    restore: Callable[[int], Any],
    evaluate: Callable[[Any], dict[str, Any]],
    updates_per_epoch: float,
    record: Recorder,
) -> Iterator[ValidatedStep]:
    """The figures of each step in the order of epochs, recorded as they come."""
    for step in sorted(steps):
        epoch = step / updates_per_epoch
        figures = evaluate(restore(step))
        record.event("validation", update=step, epoch=epoch, **figures)
        yield ValidatedStep(step, epoch, figures)


def choose_best(found: list[ValidatedStep]) -> ValidatedStep:
    """The highest accuracy; of equals the earliest."""
    return max(found, key=lambda each: (each.accuracy, -each.step))


def sweep_figures(found: list[ValidatedStep], target: float) -> dict[str, Any]:
    """When the target was first reached, and the figure that a sweep maximises: both by the last checkpoint's rule."""
    reached = [each.epoch for each in found if each.accuracy >= target]
    last = found[-1]
    short = min(last.accuracy - target, 0.0) / TARGET_WIDTH
    return {
        "target_accuracy": target,
        "epoch_to_target": reached[0] if reached else None,
        "optimization_metric": exp(-0.5 * short**2) / last.epoch if last.epoch else None,
    }


def others_to_validate(config: TrainConfig, own: RunCheckpoints) -> RunCheckpoints | None:
    """The checkpoints that --checkpoint-input-dir names, unless they are the run's own; CheckpointError where it has
    none and nobody said that random weights will do."""
    asked = config.checkpoint_input_dir
    if asked is None or (config.training and asked.resolve() == own.folder.resolve()):
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
    checkpoints = others or own
    steps = others.steps() if others else own.steps() if last is not None else []
    if not steps:
        lacking = f"{others.folder} holds no checkpoint" if others else "there is no checkpoint to validate"
        console.warn(f"{lacking}; {'random' if last is None else 'the last'} weights are validated")
    if others:
        with others.open() as opened:
            for line in opened.damaged():
                console.warn(line)
    known = read_saved_network(checkpoints.folder) if steps else SavedNetwork.of(job)
    job = replace(job, variant=known.network.variant)
    assert job.validation is not None
    evaluation = source.evaluation(model.evaluate(job), job.validation.batch)

    def evaluate(weights: Any) -> dict[str, Any]:
        return validation_figures(evaluation(weights), job.config.top_k)

    if not steps:
        return {"validation": [_validate_state(job, console, record, last, evaluate)], "best": None}

    def restore(step: int) -> Any:
        with checkpoints.open() as opened:
            return restore_weights(opened, step, known)[1]

    found: list[ValidatedStep] = []
    with console.progress("validation", len(steps)) as bar:
        for each in validate_steps(steps, restore, evaluate, known.updates_per_epoch, record):
            found.append(each)
            bar.advance(1)
    return _announce_best(job.config, console, record, found)


def _validate_state(
    job: Job,
    console: Console,
    record: Recorder,
    last: model.State | None,
    evaluate: Callable[[Any], dict[str, Any]],
) -> dict[str, Any]:
    """The figures of the weights in hand: the training's last, or random ones."""
    # By way of the host: they may lie on several devices, where the images do not.
    state = jax.device_get(model.init(job, stream(job.key, "init", 0)) if last is None else last)
    weights, step = {name: state[name] for name in ("params", "statistics")}, int(state["update"])
    per_epoch = float(job.plan.updates_per_epoch) if job.plan else 1.0
    with console.progress("validation"):
        (found,) = validate_steps([step], lambda _: weights, evaluate, per_epoch, record)
    return found.as_dict()


def _announce_best(
    config: TrainConfig, console: Console, record: Recorder, found: list[ValidatedStep]
) -> dict[str, Any]:
    best = choose_best(found)
    # No colon: the last "accuracy: X %" of a log is that of the last checkpoint, as old patterns mean it.
    console.say(
        f"best of {len(found)}: step {best.step}, epoch {best.epoch:g}, accuracy {100 * best.accuracy:.2f} %"
    )
    result: dict[str, Any] = {"validation": [each.as_dict() for each in found], "best": best.as_dict()}
    if config.sweep:
        figures = sweep_figures(found, config.target_accuracy)
        record.event("sweep", **figures)
        result |= figures
    return result
