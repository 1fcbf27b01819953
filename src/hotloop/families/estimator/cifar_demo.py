"""A glimpse of the family for `hotloop demo`: an Estimator learns drawn objects for a few seconds.

The example's network and its fast recipe, in small; a hook collects what every update of every call brought.
"""

import tempfile
from typing import Any

import numpy as np

from hotloop.data.stand_ins import draw_objects
from hotloop.families.estimator.cifar_model import model_fn
from hotloop.families.estimator.estimator import Estimator
from hotloop.families.estimator.hooks import CallFigures, Hook, Running
from hotloop.families.estimator.inputs import Arrays
from hotloop.families.estimator.run_config import RunConfig

TRAIN, TEST = 2_000, 500
BATCH, UPDATES, POINTS = 40, 120, 24


class Curve(Hook):
    """The accuracy of every update."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def after_call(self, run: Running, first: int, metrics: CallFigures) -> None:
        """Take a call in."""
        self.accuracy += metrics["accuracy"].tolist()


def glimpse(updates: int = UPDATES) -> dict[str, Any]:
    """Training accuracy in a few points, the accuracy on objects not seen, and images a second."""
    images, shapes, _ = draw_objects(TRAIN + TEST, 0)
    curve = Curve()
    with tempfile.TemporaryDirectory(prefix="hotloop-demo-") as folder:
        config = RunConfig(folder, batch_size=BATCH, iterations_per_call=10)
        params = {"recipe": "fast", "learning_rate": 1e-3, "updates": updates}
        estimator = Estimator(model_fn, config, params, quiet=True)
        estimator.train(Arrays(images[:TRAIN], shapes[:TRAIN]), max_steps=updates, hooks=[curve])
        found = estimator.evaluate(Arrays(images[TRAIN:], shapes[TRAIN:], batch_size=TEST, shuffle=False))
    return {
        "accuracy": [float(np.mean(part)) for part in np.array_split(curve.accuracy, POINTS)],
        "updates": updates,
        "test_accuracy": found["accuracy"],
        "images": TRAIN,
        "images_per_second": estimator.last_run["images_per_second"],
    }
