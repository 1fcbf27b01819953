"""The process beside a training: `python -m hotloop.families.recommender.validator RUN PLATFORM`.

Each line of its input is a job {step, epoch, weights}; each line of its output is the answer, in the same order. When
its input ends it ends, in the middle of whatever it is doing: so it never outlives the training, however that
ended. All it knows of the run is in the run's folder; files of weights are removed by whoever wrote them.
"""

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

FOLDER = "validating"
"""Where, in the run's folder, the weights wait that are not validated yet, and the ratings to validate with."""


def load_rating_error(folder: Path) -> tuple[Any, Any]:
    """The job of a run, and its validation errors as a function of weights."""
    import numpy as np

    from hotloop.engine.records import read_json
    from hotloop.families.recommender import saved_run
    from hotloop.families.recommender.config import TrainOptions, make_schedule
    from hotloop.families.recommender.rating_error import RatingError
    from hotloop.options import build

    options = dict(read_json(folder / "config.json"))
    users, items, _, low, high = (options.pop(name) for name in saved_run.EXTRA)
    config = build(TrainOptions, options)
    job = saved_run.make_job(config, items, make_schedule(config, users))
    train, truth = (
        saved_run.load_training(
            saved_run.SavedRun(config, job, None, 0, where, np.arange(users), np.arange(items), low, high)
        )
        for where in (folder, folder / FOLDER)
    )
    assert config.validation_batch_size is not None
    return job, RatingError(
        job, train, truth, config.validation_batch_size, prediction_bounds(config.clip, low, high)
    )


def prediction_bounds(clip: bool, low: float, high: float) -> tuple[float, float]:
    """What predictions are clipped to."""
    return (low, high) if clip else (-float("inf"), float("inf"))


def write_weights(path: Path, params: Any) -> None:
    """The weights as a file that is whole or not there."""
    import numpy as np

    from hotloop.engine.checkpoint_arrays import snapshot
    from hotloop.options.files import whole_file

    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, **snapshot(params)[0])  # type: ignore[arg-type]


def read_weights(path: Path, job: Any) -> Any:
    """What was written, with the types that the job keeps weights in."""
    import jax

    from hotloop.data.content import read_npz
    from hotloop.engine.checkpoint_arrays import named_leaves
    from hotloop.families.recommender import model

    like = jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))["params"]
    arrays = read_npz(path)
    # A file of numpy's knows no bfloat16: it has two nameless bytes, which are looked at as what they are.
    leaves = [arrays[name].view(leaf.dtype) for name, leaf in named_leaves(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def main(folder: Path, platform: str) -> None:
    """Answer until there is nobody left who asks."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    answers = _own_output()
    from hotloop.engine.device import setup

    setup(platform)
    job, errors = load_rating_error(folder)
    while True:
        asked = jobs.get()
        figures = errors({"params": read_weights(Path(asked["weights"]), job)})
        print(json.dumps({**asked, "figures": figures}), file=answers, flush=True)


def _listen(jobs: "queue.SimpleQueue[dict[str, Any]]") -> None:
    try:
        for line in sys.stdin:
            jobs.put(json.loads(line))
    finally:  # a line that was torn by a kill is an end, too
        os._exit(0)  # whoever asked has gone: nobody waits for what the main thread is computing


def _own_output() -> TextIO:
    """Standard output for answers alone: what libraries print there goes to standard error instead."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


if __name__ == "__main__":
    from hotloop.errors import HotloopError

    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except HotloopError as error:
        sys.exit(str(error))
