"""The example's CIFAR network in Keras 3 on its jax backend, trained by `model.fit` as its users do.

Imported after KERAS_BACKEND is set. Bytes go in as numpy arrays and the model widens them; `steps_per_execution` is as
long as a call of ours: one compiled loop in releases that have it (Keras' pull request 23527), before that a loop in
Python over compiled steps, as `describe_execution` says. Seconds are counted from the end of a fit's first execution,
so that neither compiling nor the start of a fit is in them. It must not know hotloop.
"""

import inspect
import time
from typing import Any

import keras
import numpy as np
from keras import layers

Weights = dict[str, dict[str, np.ndarray]]


def network(dropout: bool = True) -> keras.Sequential:
    """Four convolutions and two dense layers with our names; logits out."""

    def conv(name: str, filters: int, padding: str) -> layers.Layer:
        return layers.Conv2D(filters, 3, padding=padding, activation="relu", name=name)

    quarter, half = (0.25, 0.5) if dropout else (0.0, 0.0)
    return keras.Sequential(
        [
            keras.Input((32, 32, 3), dtype="uint8"),
            layers.Rescaling(1 / 255),
            conv("conv1", 32, "same"),
            conv("conv2", 32, "valid"),
            layers.MaxPooling2D(),
            layers.Dropout(quarter),
            conv("conv3", 64, "same"),
            conv("conv4", 64, "valid"),
            layers.MaxPooling2D(),
            layers.Dropout(quarter),
            layers.Flatten(),
            layers.Dense(512, activation="relu", name="dense1"),
            layers.Dropout(half),
            layers.Dense(10, name="dense2"),
        ]
    )


def load(model: keras.Sequential, weights: Weights) -> None:
    for name, leaves in weights.items():
        model.get_layer(name).set_weights([leaves["kernel"], leaves["bias"]])


def weights_of(model: keras.Sequential) -> Weights:
    return {
        layer.name: {"kernel": np.asarray(layer.kernel.value), "bias": np.asarray(layer.bias.value)}
        for layer in model.layers
        if layer.weights
    }


def describe_execution() -> str:
    """What this release makes of `steps_per_execution` on jax."""
    from keras.src.backend.jax import trainer  # no public name has its source

    if "lax.scan" in inspect.getsource(trainer):
        return "one compiled loop"
    return "a loop in Python over compiled steps"


class Stamps(keras.callbacks.Callback):
    """When the first and the last execution were done; waits for these two and no other, and ends the fit."""

    def __init__(self, executions: int):
        super().__init__()
        self.last, self.seen, self.times = executions, 0, []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.seen += 1
        if self.seen in (1, self.last):
            float(logs["loss"])
            self.times.append(time.perf_counter())
        self.model.stop_training = self.seen == self.last


class Trainer:
    """A compiled model with the whole data set, which takes whole executions of `per_call` updates."""

    def __init__(
        self, model: keras.Sequential, images: np.ndarray, labels: np.ndarray, batch: int, rate: float,
        per_call: int,
    ):  # fmt: skip
        self.model, self.images, self.labels, self.batch, self.per_call = (
            model,
            images,
            labels,
            batch,
            per_call,
        )
        model.compile(
            optimizer=keras.optimizers.SGD(rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=per_call,
        )

    def update(self, count: int) -> float:
        """Seconds of `count` updates, a multiple of `per_call`, after another `per_call` that are not timed."""
        stamps = Stamps(count // self.per_call + 1)
        samples = (count + self.per_call) * self.batch
        self.model.fit(
            self.images,
            self.labels,
            batch_size=self.batch,
            epochs=-(-samples // len(self.images)),
            verbose=0,
            callbacks=[stamps],
        )
        first, last = stamps.times
        return last - first
