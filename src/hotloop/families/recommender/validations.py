"""The validations of a run, whenever they become known: what they say about stopping and about the best checkpoint.

Beside the training they are answered late, when the training is elsewhere already and the checkpoint is written.
It knows neither processes nor models.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.engine.checkpoint import Checkpoints, Keep, Metrics
from hotloop.engine.run import current_records, read_events
from hotloop.families.recommender import saved_run

Figures = dict[str, Any]


class Validations(Keep):
    """Validations by step, in the order of the steps, and a rule of which checkpoints to keep by them.

    A checkpoint may be saved before its validation is answered, so that its own figures do not tell: those that
    still wait for an answer stay, and of the others the best.
    """

    def __init__(self, patience: int | None = None):
        self.patience = patience
        self.figures: dict[int, Figures] = {}
        self.waiting: tuple[int, ...] = ()
        self.error = ""
        """Why no more answers will come, where that is so."""

    def remember(self, run: Path, update: int) -> None:
        """Take in what an earlier process recorded up to `update`, where this one goes on."""
        for event in current_records(read_events(run)):
            if event["event"] == "validation" and event["update"] <= update:
                self.figures[event["update"]] = {
                    k: v for k, v in event.items() if k.startswith("validation_")
                }

    def enough(self) -> bool:
        """Whether `patience` validations came after the best one, or none will come any more."""
        figures = dict(self.figures)
        values = [_number(figures[step].get(saved_run.BEST.metric)) for step in sorted(figures)]
        best = min(values, default=math.inf)
        since = len(values) - 1 - values.index(best) if math.isfinite(best) else len(values)
        return bool(self.error) or (self.patience is not None and since >= self.patience)

    def choose(self, metrics: Metrics) -> set[int]:
        """The best one, and those whose answer is still to come."""
        return saved_run.BEST.choose(self._known(metrics)) | set(metrics).intersection(self.waiting)

    def best(self, metrics: Metrics) -> int | None:
        """The best one."""
        return saved_run.BEST.best(self._known(metrics))

    def _known(self, metrics: Metrics) -> Metrics:
        figures = dict(self.figures)
        return {step: {**own, **figures.get(step, {})} for step, own in metrics.items()}

    def mark(self, checkpoints: Checkpoints, like: Any) -> None:
        """Write the best checkpoint again with its validation, for all who open the run later."""
        checkpoints.wait()
        step = checkpoints.best()
        if step is None or saved_run.BEST.metric in checkpoints.metrics(step):
            return
        found = checkpoints.restore(like, step)
        metrics = {**found.metrics, **self.figures[step]}
        checkpoints.save(step, found.state, position=found.position, metrics=metrics)
        checkpoints.wait()


def name_figures(figures: Mapping[str, Any]) -> Figures:
    """Errors as a record and a checkpoint name them."""
    return {f"validation_{name}": value for name, value in figures.items()}


def _number(value: float | None) -> float:
    """A record's figure; what was not finite is worse than all others."""
    return value if value is not None and math.isfinite(value) else math.inf
