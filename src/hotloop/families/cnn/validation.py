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
from hotloop.engine.sinks import Recorder
from hotloop.errors import CheckpointError, OptionError
from hotloop.families.cnn import model, saved
from hotloop.families.cnn.options import Train
from hotloop.families.cnn.saved import RunCheckpoints
from hotloop.families.cnn.work import Work

TARGET_WIDTH = 0.02
"""How fast the sweep's figure falls below the target."""


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


def validate_all(
    steps: list[int],
    restored: Callable[[int], Any],
    evaluate: Callable[[Any], dict[str, Any]],
    updates_per_epoch: float,
    record: Recorder,
) -> Iterator[ValidatedStep]:
    """The figures of each step, told as they come."""
    for step in sorted(steps):
        epoch = step / updates_per_epoch
        figures = evaluate(restored(step))
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


def others_to_validate(config: Train, own: RunCheckpoints) -> RunCheckpoints | None:
    """The checkpoints that --checkpoint-input-dir names, unless they are the run's own; CheckpointError where it has
    none and nobody said that random weights will do."""
    asked = config.checkpoint_input_dir
    if asked is None or (config.training and asked.resolve() == own.folder.resolve()):
        return None
    try:
        found = RunCheckpoints.at(asked)
    except CheckpointError as error:
        raise CheckpointError(f"--checkpoint-input-dir {error}") from None
    if config.random_weights and found.made():
        raise OptionError(f"--random-weights: {asked} holds checkpoints; leave out one of them")
    if not (config.training or config.random_weights):
        found.check_any()
    return found


def validate(work: Work, record: Recorder, last: model.State | None, made: list[int]) -> dict[str, Any]:
    """Every checkpoint that there is to validate, in the order of epochs, the best marked.

    `last` is the state that the training ended with (None: there was no training), `made` are the steps it saved.
    """
    config = work.config
    assert work.settings.validation is not None
    keeping, steps = (work.others, work.others.made()) if work.others else (work.keeping, made)
    if not steps:
        lacking = (
            f"{keeping.folder} holds no checkpoint" if work.others else "there is no checkpoint to validate"
        )
        work.console.warn(f"{lacking}; {'random' if last is None else 'the last'} weights are validated")
    if work.others:
        with keeping.opened() as checkpoints:
            for line in checkpoints.damaged():
                work.console.warn(line)
    known = saved.read_saved_network(keeping.folder) if steps else work.about()
    job = replace(work.job, variant=known.network.variant)
    evaluation = work.source.evaluation(model.evaluate(job, config.top_k), work.settings.validation.batch)

    def evaluate(state: Any) -> dict[str, Any]:
        return validation_figures(evaluation(state), config.top_k)

    if not steps:
        return {"validation": [_without_checkpoint(work, record, last, evaluate)], "best": None}

    def restored(step: int) -> Any:
        with keeping.opened() as checkpoints:
            return saved.restore_weights_from(checkpoints, step, known)[1]

    found: list[ValidatedStep] = []
    with work.console.progress("validation", len(steps)) as bar:
        for each in validate_all(steps, restored, evaluate, known.updates_per_epoch, record):
            found.append(each)
            bar.advance(1)
    return _announce_best(work, record, found)


def _announce_best(work: Work, record: Recorder, found: list[ValidatedStep]) -> dict[str, Any]:
    best = choose_best(found)
    # No colon: the last "accuracy: X %" of a log is that of the last checkpoint, as old patterns mean it.
    work.console.say(
        f"best of {len(found)}: step {best.step}, epoch {best.epoch:g}, accuracy {100 * best.accuracy:.2f} %"
    )
    rows = [{"step": each.step, "epoch": each.epoch, **each.figures} for each in found]
    result: dict[str, Any] = {"validation": rows, "best": rows[found.index(best)]}
    if work.config.sweep:
        figures = sweep_figures(found, work.config.target_accuracy)
        record.event("sweep", **figures)
        result |= figures
    return result


def _without_checkpoint(
    work: Work, record: Recorder, last: model.State | None, evaluate: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """The figures of the weights in hand: the training's last, or random ones."""
    # By way of the host: they may lie on several devices, where the images do not.
    state = jax.device_get(work.initial() if last is None else last)
    step = int(state["update"])
    plan = work.settings.plan
    epoch = float(step / plan.updates_per_epoch) if plan else 0.0
    with work.console.progress("validation"):
        figures = evaluate({"params": state["params"], "statistics": state["statistics"]})
    record.event("validation", update=step, epoch=epoch, **figures)
    return {"step": step, "epoch": epoch, **figures}
