"""An Estimator that trains, evaluates and predicts in as many processes as are started, for tests.

Not a test: `python together.py FOLDER REPLICAS LABEL MOVED` prints what process 0 has, as JSON;
`test_estimator_processes` starts it. LABEL is the sample whose label is changed (-1: none), MOVED what weights are
moved by.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from staged_estimator import X, Y, estimator, init, pipelined, undivided, weights

from hotloop import EarlyStopping, EvalSpec, Hook, TrainSpec, train_and_evaluate
from hotloop.engine import processes
from hotloop.engine.device import setup


class Losses(Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_call(self, run: Any, first: int, metrics: Any) -> None:
        self.found += metrics["loss"].tolist()


def changed(sample: int) -> Any:
    labels = Y.copy()
    if sample >= 0:
        labels[sample] = (labels[sample] + 1) % 3
    return labels


def moved_by(step: float, model: Any) -> Any:
    """A model with one weight moved before the first update."""

    def start(key: Any) -> Any:
        drawn = init(key)
        return {**drawn, "one": {**drawn["one"], "bias": drawn["one"]["bias"].at[0].add(step)}}

    return lambda params: replace(model(params), init=start)


def everything(folder: Path, replicas: int, label: int = -1, moved: float = 0.0) -> dict[str, Any]:
    """Losses and weights of four updates from arrays and of four from batches, an evaluation and rows of both."""
    labels, found = changed(label), {}
    batches = [(X[at : at + 24], labels[at : at + 24]) for at in range(0, 96, 24)]
    model = moved_by(moved, undivided) if moved else undivided
    for name, input_fn in (("arrays", (X, labels)), ("batches", batches)):
        losses = Losses()
        made = estimator(folder / name, model, replicas=replicas, checkpoint_steps=2)
        result = train_and_evaluate(made, TrainSpec(input_fn, 4, (losses,)), EvalSpec(batches))
        rows = np.array(
            [row["logits"] if isinstance(row, dict) else row for row in made.predict(lambda: X[:30])]
        )
        found[name] = {
            "losses": losses.found,
            "weights": {key: value.tolist() for key, value in weights(made).items()},
            "result": result,
            "rows": rows.tolist(),
        }
    found["early"] = stopped_early(folder, replicas)
    return {**found, "processes": processes.count()}


def stopped_early(folder: Path, replicas: int) -> dict[str, Any]:
    """A training that its second evaluation ends, at update 4 of 20, with the weights of the first."""
    hook = EarlyStopping("loss", patience=1, min_delta=100.0, restore_best=True)
    made = estimator(folder / "early", undivided, replicas=replicas, checkpoint_steps=2)
    result = train_and_evaluate(made, TrainSpec((X, Y), 20, (hook,)), EvalSpec((X, Y)))
    return {"result": result, "weights": {key: value.tolist() for key, value in weights(made).items()}}


def in_stages(folder: Path, label: int = -1, moved: float = 0.0) -> dict[str, Any]:
    """The same model in two stages, each of which may lie in a process of its own."""
    spec = {"spec": {"device_mapping": [0, 0, 1], "gradient_accumulation_count": 4}}
    model, losses = moved_by(moved, pipelined) if moved else pipelined, Losses()
    made = estimator(folder / "stages", model, spec).train((X, changed(label)), steps=4, hooks=[losses])
    found = {key: value.tolist() for key, value in weights(made).items()}
    return {"losses": losses.found, "weights": found, "result": made.measure((X, Y))}


if __name__ == "__main__":
    setup("cpu")
    place, replicas, label, moved = sys.argv[1:]
    answer = everything(Path(place), int(replicas), int(label), float(moved))
    if processes.count() > 1:
        answer["stages"] = in_stages(Path(place))
    if processes.is_writer():
        print(json.dumps(answer))
