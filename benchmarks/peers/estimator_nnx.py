"""The example's CIFAR network in flax.nnx, trained by the loop that its documentation shows.

A module, an `nnx.Optimizer`, metrics, and a step under `nnx.jit` that Python calls for each batch. Bytes lie in numpy
arrays; each update takes the next rows of a fresh permutation and the model widens them. XLA compiles the step as a
program of its own, so its convolutions are in the entry computation, where they are fast. It must not know hotloop.
"""

from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import nnx
from jax import Array

LAYERS = ("conv1", "conv2", "conv3", "conv4", "dense1", "dense2")
Weights = dict[str, dict[str, np.ndarray]]


class Network(nnx.Module):
    """Four convolutions and two dense layers; logits out."""

    def __init__(self, rngs: nnx.Rngs, dropout: bool = True):
        self.conv1 = nnx.Conv(3, 32, (3, 3), padding="SAME", rngs=rngs)
        self.conv2 = nnx.Conv(32, 32, (3, 3), padding="VALID", rngs=rngs)
        self.conv3 = nnx.Conv(32, 64, (3, 3), padding="SAME", rngs=rngs)
        self.conv4 = nnx.Conv(64, 64, (3, 3), padding="VALID", rngs=rngs)
        self.dense1 = nnx.Linear(6 * 6 * 64, 512, rngs=rngs)
        self.dense2 = nnx.Linear(512, 10, rngs=rngs)
        self.after_pool = nnx.Dropout(0.25 if dropout else 0.0, rngs=rngs)
        self.after_dense = nnx.Dropout(0.5 if dropout else 0.0, rngs=rngs)

    def __call__(self, pixels_NHWC: Array) -> Array:
        x = pixels_NHWC.astype("float32") / 255
        for first, second in ((self.conv1, self.conv2), (self.conv3, self.conv4)):
            x = nnx.relu(second(nnx.relu(first(x))))
            x = self.after_pool(nnx.max_pool(x, (2, 2), strides=(2, 2)))
        x = nnx.relu(self.dense1(x.reshape(len(x), -1)))
        return self.dense2(self.after_dense(x))


def load(network: Network, weights: Weights) -> None:
    for name, leaves in weights.items():
        for leaf, value in leaves.items():
            getattr(getattr(network, name), leaf)[...] = value


def weights_of(network: Network) -> Weights:
    return {
        name: {leaf: np.asarray(getattr(getattr(network, name), leaf)[...]) for leaf in ("kernel", "bias")}
        for name in LAYERS
    }


def loss_of(network: Network, images: Array, labels: Array) -> tuple[Array, Array]:
    logits = network(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


@nnx.jit
def train_step(
    network: Network, optimiser: nnx.Optimizer, metrics: nnx.MultiMetric, images: Array, labels: Array
) -> None:
    (loss, logits), gradients = nnx.value_and_grad(loss_of, has_aux=True)(network, images, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)
    optimiser.update(network, gradients)


class Trainer:
    """A network, its optimiser and metrics, and the whole data set on the host."""

    def __init__(self, network: Network, images: np.ndarray, labels: np.ndarray, batch: int, rate: float):
        network.train()
        self.network, self.images, self.labels, self.batch = network, images, labels, batch
        self.optimiser = nnx.Optimizer(network, optax.sgd(rate), wrt=nnx.Param)
        self.metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        self.rows = self._rows()

    def _rows(self) -> Iterator[np.ndarray]:
        """Every sample once a pass; the last few of a pass are left out where the batch does not divide them."""
        generator = np.random.default_rng(0)
        while True:
            order = generator.permutation(len(self.images))
            yield from order[: len(order) // self.batch * self.batch].reshape(-1, self.batch)

    def update(self, count: int) -> None:
        """Make so many updates; done when this returns."""
        for _ in range(count):
            rows = next(self.rows)
            train_step(self.network, self.optimiser, self.metrics, self.images[rows], self.labels[rows])
        jax.block_until_ready(nnx.state(self.network, nnx.Param))
