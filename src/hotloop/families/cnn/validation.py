"""Validation of checkpoints, one after the other in the order of epochs, and which of them is the best.

Counts are exact: every image once, whatever the batch. It reads checkpoints, and deletes and trains nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp
from typing import Any

from hotloop.engine.evaluate import Sums
from hotloop.engine.run import Run

TARGET_WIDTH = 0.02
"""How fast the sweep's figure falls below the target."""


@dataclass(frozen=True)
class Validated:
    """One checkpoint's figures."""

    step: int
    epoch: float
    figures: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.figures["validation_accuracy"])


def figures_of(sums: Sums, top: int) -> dict[str, Any]:
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
    record: Run,
) -> Iterator[Validated]:
    """The figures of each step, told as they come."""
    for step in sorted(steps):
        epoch = step / updates_per_epoch
        figures = evaluate(restored(step))
        record.event("validation", update=step, epoch=epoch, **figures)
        yield Validated(step, epoch, figures)


def best_of(found: list[Validated]) -> Validated:
    """The highest accuracy; of equals the earliest."""
    return max(found, key=lambda each: (each.accuracy, -each.step))


def sweep_figures(found: list[Validated], target: float) -> dict[str, Any]:
    """When the target was first reached, and the figure that a sweep maximises: both by the last checkpoint's rule."""
    reached = [each.epoch for each in found if each.accuracy >= target]
    last = found[-1]
    short = min(last.accuracy - target, 0.0) / TARGET_WIDTH
    return {
        "target_accuracy": target,
        "epoch_to_target": reached[0] if reached else None,
        "optimization_metric": exp(-0.5 * short**2) / last.epoch if last.epoch else None,
    }
