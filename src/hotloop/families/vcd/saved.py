"""A run's folder read back: its options, its model and the weights of a checkpoint.

The folder's config.json is the single source of truth; nothing is guessed from the weights. It trains and
evaluates nothing.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax

from hotloop.engine.checkpoint import Checkpoints
from hotloop.errors import CheckpointError
from hotloop.families.vcd.config import Model, Train
from hotloop.families.vcd.model import Job, init
from hotloop.families.vcd.of_run import FAMILY, options_at
from hotloop.options import build

__all__ = ["FAMILY", "Saved", "job_of", "load"]


@dataclass(frozen=True)
class Saved:
    """What a run left."""

    config: Train
    job: Job
    state: Any
    step: int
    folder: Path


def job_of(config: Train, images: int) -> Job:
    """The part of the options that a state depends on, and the number of training images."""
    return Job(Model(**{each.name: getattr(config, each.name) for each in fields(Model)}), images)


def load(folder: str | Path, step: int | None = None) -> Saved:
    """The newest whole checkpoint of a run, or that of a step."""
    folder = Path(folder)
    options = options_at(folder)
    images = options.pop("images")
    config = build(Train, options)
    job = job_of(config, images)
    if not config.save_checkpoints and not (folder / "checkpoints").exists():
        raise CheckpointError(
            f"{folder}: trained with --no-save-checkpoints, as by -c test, so its weights are gone; "
            "train with --save-checkpoints to keep them"
        )
    like = jax.eval_shape(lambda key: init(job, key), jax.random.key(0))
    restored = Checkpoints(folder / "checkpoints", family=FAMILY, config=options).restore(like, step).warned()
    return Saved(config, job, restored.state, restored.step, folder)
