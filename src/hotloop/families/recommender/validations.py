"""The validations of a run: what they say about stopping and about the best checkpoint.

Figures are taken in whenever they become known: a process of its own (`validate_process`) answers when the training is
elsewhere already and the checkpoint is written. Weights that still wait for it lie in RUN/validating.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hotloop.data.content import read_npz
from hotloop.engine.checkpoint import Checkpoints, Keep, Metrics, named_leaves, snapshot
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run, current_records, read_events
from hotloop.families.recommender.model import Job
from hotloop.families.recommender.saved_run import BEST, state_shapes
from hotloop.options.files import whole_file

Figures = dict[str, Any]
FOLDER, STDERR_FILE = "validating", "stderr.txt"
"""In the run's folder: weights that are not validated yet, the ratings to validate with, what the process said."""


class Validations(Keep):
    """Validations by step, in the order of the steps, and a rule of which checkpoints to keep by them.

    A checkpoint may be saved before its validation is known, so that its own figures do not tell: those that
    still wait for it stay, and of the others the best.
    """

    def __init__(self, patience: int | None = None):
        self.patience = patience
        self.figures: dict[int, Figures] = {}
        self.waiting: tuple[int, ...] = ()
        self.error = ""
        """Why no more figures will come, where that is so."""

    def remember(self, run: Path, update: int) -> None:
        """Take in what an earlier process recorded up to `update`, where this one goes on."""
        for event in current_records(read_events(run)):
            if event["event"] == "validation" and event["update"] <= update:
                figures = {k: v for k, v in event.items() if k.startswith("validation_")}
                self.figures[event["update"]] = figures

    def record(self, run: Run, plan: Plan, step: int, figures: Figures) -> None:
        """Take in figures of weights that waited in the folder, which they need no longer."""
        self.figures[step] = figures
        run.event("validation", update=step, epoch=float(step / plan.updates_per_epoch), **figures)
        weights_path(run.path, step).unlink(missing_ok=True)

    def enough(self) -> bool:
        """Whether `patience` validations came after the best one, or none will come any more."""
        found = [figures.get(BEST.metric) for _, figures in sorted(dict(self.figures).items())]
        values = [value if value is not None and math.isfinite(value) else math.inf for value in found]
        best = min(values, default=math.inf)
        since = len(values) - 1 - values.index(best) if math.isfinite(best) else len(values)
        return bool(self.error) or (self.patience is not None and since >= self.patience)

    def choose(self, metrics: Metrics) -> set[int]:
        return BEST.choose(self._known(metrics)) | set(metrics).intersection(self.waiting)

    def best(self, metrics: Metrics) -> int | None:
        return BEST.best(self._known(metrics))

    def _known(self, metrics: Metrics) -> Metrics:
        figures = dict(self.figures)
        return {step: {**own, **figures.get(step, {})} for step, own in metrics.items()}

    def mark_best(self, checkpoints: Checkpoints, like: Any) -> None:
        """Write the best checkpoint again with its validation, for all who open the run later."""
        checkpoints.wait()
        step = checkpoints.best()
        if step is None or BEST.metric in checkpoints.metrics(step):
            return
        found = checkpoints.restore(like, step)
        metrics = {**found.metrics, **self.figures[step]}
        checkpoints.save(step, found.state, position=found.position, metrics=metrics)
        checkpoints.wait()


def weights_path(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:08d}.npz"


def find_left_over(run: Path, update: int, answered: Mapping[int, Any]) -> list[int]:
    """Steps whose weights an interrupted run left unvalidated, in order; files of no more use are deleted.

    These are weights that are answered, and those after `update`, where the run goes on: they will come again.
    """
    steps = []
    for path in (run / FOLDER).glob(".*.npz*"):
        path.unlink()  # half written by a killed process
    for path in sorted((run / FOLDER).glob("[0-9]*.npz")):
        if int(path.stem) in answered or int(path.stem) > update:
            path.unlink()
        else:
            steps.append(int(path.stem))
    return steps


def clear_folder(run: Path) -> None:
    """Delete what only validation needed, once nothing waits."""
    for name in (STDERR_FILE, "ratings.npz"):
        (run / FOLDER / name).unlink(missing_ok=True)
    with suppress(OSError):
        (run / FOLDER).rmdir()


def write_weights(path: Path, params: Any) -> None:
    """The weights as a file that is whole or not there."""
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, **snapshot(params)[0])  # type: ignore[arg-type]


def read_weights(path: Path, job: Job) -> Any:
    """What was written, with the types that the job keeps weights in."""
    like = state_shapes(job)["params"]
    arrays = read_npz(path)
    # A file of numpy's knows no bfloat16: it has two nameless bytes, which are looked at as what they are.
    leaves = [arrays[name].view(leaf.dtype) for name, leaf in named_leaves(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
