"""Our two sides of benchmarks/peers/estimator.py: the example's network through the Estimator, and by hand.

By hand is one update written out in jax and optax, in the engine's compiled loop over the same feed, with the same
keys: what a user would have without an Estimator, and the same numbers. Nothing waits between its calls, which the
Estimator does to log. It must not know the peers.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from hotloop import Arrays, Estimator, Hook, Mode, ModelSpec, RunConfig
from hotloop.engine.feed import Resident
from hotloop.engine.keys import sample_keys, seed_key, stream
from hotloop.engine.loop import Program, copy_state
from hotloop.families.estimator.cifar import model
from hotloop.families.estimator.cifar.network import KERAS

SEED = 1
START = {"cpu": 1, "gpu": 5}  # calls of a train that are not timed
Weights = dict[str, dict[str, np.ndarray]]


def model_of(weights: Weights, dropout: bool) -> Callable[..., ModelSpec]:
    """The example's model_fn, from given weights; without dropout it trains as it predicts."""

    def without(weights: Any, features: Array) -> Array:
        return KERAS.apply(weights, features)

    def model_fn(mode: Mode, params: dict[str, Any]) -> ModelSpec:
        example = model.model_fn(mode, params)
        apply = example.apply if dropout else without
        return replace(example, init=lambda key: jax.tree.map(jnp.asarray, weights), apply=apply)

    return model_fn


class Stamps(Hook):
    """When each call was done, and the losses of its updates."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[np.ndarray] = []

    def after_call(self, run: Any, first: int, metrics: Any) -> None:
        self.times.append(time.perf_counter())
        self.losses.append(np.asarray(metrics["loss"]))


class ByEstimator:
    """Estimator.train in calls of `per_call` updates with its usual logs, in a folder of its own."""

    def __init__(
        self, folder: Path, weights: Weights, images: np.ndarray, labels: np.ndarray, batch: int, rate: float,
        per_call: int, dropout: bool = True,
    ):  # fmt: skip
        config = RunConfig(model_dir=folder, batch_size=batch, iterations_per_call=per_call, seed=SEED)
        params = {"recipe": "reference", "learning_rate": rate, "updates": 1}
        self.estimator = Estimator(model_of(weights, dropout), config, params, quiet=True)
        self.images, self.labels, self.per_call = images, labels, per_call

    def input_fn(self) -> Arrays:
        return Arrays(self.images, self.labels)

    @property
    def program(self) -> Program:
        """The one that it trains with, after the first `train`."""
        return next(kept for key, kept in self.estimator._kept.items() if key[0] == "program")

    def train(self, updates: int) -> Stamps:
        stamps = Stamps()
        self.estimator.train(self.input_fn, steps=updates, hooks=[stamps])
        return stamps

    def update(self, count: int) -> float:
        """Seconds of `count` updates, a multiple of `per_call`, after some calls that are not timed.

        While the host is busy with the start, a GPU may get ahead of it by a call or two.
        """
        start = START[jax.default_backend()]
        times = self.train(count + start * self.per_call).times
        return times[-1] - times[start - 1]

    def weights(self) -> Weights:
        """As the newest checkpoint has them."""
        found: Weights = {}
        for name, value in self.estimator.weights(self.input_fn).items():
            layer, leaf = name.split("/")
            found.setdefault(layer, {})[leaf] = value
        return found


class ByHand:
    """The same update in a loop that a user writes."""

    def __init__(
        self, weights: Weights, images: np.ndarray, labels: np.ndarray, batch: int, rate: float, per_call: int,
        dropout: bool = True,
    ):  # fmt: skip
        optimiser = optax.sgd(rate)
        data = {"features": images, "labels": labels}
        feed = Resident(data, batch, seed=SEED)
        self.program = Program(_update(optimiser, batch, dropout), feed, per_call, seed_key(SEED))
        self.state = copy_state({"weights": weights, "optimiser": optimiser.init(weights)})
        self.done, self.per_call = 0, per_call

    def update(self, count: int) -> np.ndarray:
        """Make `count` updates, a multiple of `per_call`; the losses of the last call."""
        for _ in range(count // self.per_call):
            self.state, metrics = self.program(self.state, self.done, self.per_call)
            self.done += self.per_call
        return metrics["loss"]


def _update(
    optimiser: optax.GradientTransformation, batch_size: int, dropout: bool
) -> Callable[[Any, Any, Array], tuple[Any, dict[str, Array]]]:
    def update(state: Any, batch: Any, key: Array) -> tuple[Any, dict[str, Array]]:
        keys = sample_keys(stream(key, "model", 0), 0, batch_size) if dropout else None

        def objective(weights: Any) -> tuple[Array, Array]:
            logits = KERAS.apply(weights, batch["features"], train=dropout, keys=keys)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return losses.mean(), model.correct(logits, batch["labels"]).mean()

        (loss, accuracy), gradient = jax.value_and_grad(objective, has_aux=True)(state["weights"])
        steps, slots = optimiser.update(gradient, state["optimiser"], state["weights"])
        weights = optax.apply_updates(state["weights"], steps)
        return {"weights": weights, "optimiser": slots}, {"loss": loss, "accuracy": accuracy}

    return update
