"""A run's folder read back: its options, its model and the weights of a checkpoint.

The folder's config.json is the single source of truth; nothing is guessed from the weights. It trains and
evaluates nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from hotloop.engine.checkpoint import Checkpoints
from hotloop.errors import CheckpointError
from hotloop.families.vcd.config import FAMILY, VcdTrain, read_run_options
from hotloop.families.vcd.model import Job, init, make_job
from hotloop.options import build


@dataclass(frozen=True)
class TrainedRun:
    config: VcdTrain
    job: Job
    state: Any
    step: int
    folder: Path


def load_run(folder: str | Path, step: int | None = None) -> TrainedRun:
    """The newest whole checkpoint of a run, or that of a step."""
    folder = Path(folder)
    options = read_run_options(folder)
    images = options.pop("images")
    config = build(VcdTrain, options)
    job = make_job(config, images)
    if not config.save_checkpoints and not (folder / "checkpoints").exists():
        raise CheckpointError(
            f"{folder}: trained with --no-save-checkpoints, as by -c test, so its weights are gone; "
            "train with --save-checkpoints to keep them"
        )
    like = jax.eval_shape(lambda key: init(job, key), jax.random.key(0))
    restored = Checkpoints(folder / "checkpoints", family=FAMILY, config=options).restore(like, step).warn()
    return TrainedRun(config, job, restored.state, restored.step, folder)
