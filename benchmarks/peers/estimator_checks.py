"""Before benchmarks/peers/estimator.py times anything: one update without dropout is the same on every side.

All begin with the same weights (biases too are drawn, or their part in the forward pass would not show) and take one
batch; the float64 reference is torch's. The rate is large, so that weights before and after tell the gradient exactly.
"""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import estimator_torch
import jax
import numpy as np
import torch
from common import strictly
from estimator_ours import ByEstimator, ByHand, Weights

from hotloop.engine.keys import seed_key
from hotloop.families.estimator.cifar.network import KERAS

SAMPLES, RATE = 8, 100.0
LIMIT, TIMES = 1e-4, 3  # how far off float64: relative, or so many times as far as torch's float32


def drawn(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels at random."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (samples, 32, 32, 3), np.uint8)
    return images, generator.integers(0, 10, samples, np.int32)


def started() -> Weights:
    """The example's kernels, with small biases."""
    generator = np.random.default_rng(1)
    weights = jax.tree.map(np.asarray, KERAS.init(seed_key(0)))
    return {
        name: {
            "kernel": leaves["kernel"],
            "bias": generator.uniform(-0.1, 0.1, leaves["bias"].shape).astype("f4"),
        }
        for name, leaves in weights.items()
    }


def check(device: str, others: Collection[str]) -> dict[str, float]:
    """Every side's relative error of the gradient; where it is more than torch's can explain, the program stops.

    `others` are sides beside ours and torch: keras, nnx.
    """
    weights, (images, labels) = started(), drawn(SAMPLES)
    strictly(device, True)
    with jax.default_matmul_precision("highest"):
        moved = _ours(weights, images, labels)
        moved |= {name: {"keras": _keras, "nnx": _nnx}[name](weights, images, labels) for name in others}
    for name, dtype in (("torch", torch.float32), ("float64", torch.float64)):
        moved[name] = _torch(weights, images, labels, device, dtype)
    strictly(device, False)
    wanted = moved.pop("float64")
    errors = {side: apart(weights, found, wanted) for side, found in moved.items()}
    for side, error in errors.items():
        if not error <= max(LIMIT, TIMES * errors["torch"]):
            raise SystemExit(
                f"an update of {side} is off by {error:.2g}, of torch by {errors['torch']:.2g}: "
                "not the same computation, not timed"
            )
    return errors


def _ours(weights: Weights, images: np.ndarray, labels: np.ndarray) -> dict[str, Weights]:
    by_hand = ByHand(weights, images, labels, SAMPLES, RATE, 1, dropout=False)
    by_hand.update(1)
    with tempfile.TemporaryDirectory() as folder:
        ours = ByEstimator(Path(folder), weights, images, labels, SAMPLES, RATE, 1, dropout=False)
        ours.train(1)
        return {"ours": ours.weights(), "by hand": by_hand.state["weights"]}


def _keras(weights: Weights, images: np.ndarray, labels: np.ndarray) -> Weights:
    import estimator_keras

    model = estimator_keras.network(dropout=False)
    estimator_keras.load(model, weights)
    trainer = estimator_keras.Trainer(model, images, labels, SAMPLES, RATE, 1)
    trainer.model.fit(images, labels, batch_size=SAMPLES, verbose=0)
    return estimator_keras.weights_of(model)


def _nnx(weights: Weights, images: np.ndarray, labels: np.ndarray) -> Weights:
    import estimator_nnx

    network = estimator_nnx.Network(estimator_nnx.nnx.Rngs(0), dropout=False)
    estimator_nnx.load(network, weights)
    estimator_nnx.Trainer(network, images, labels, SAMPLES, RATE).update(1)
    return estimator_nnx.weights_of(network)


def _torch(
    weights: Weights, images: np.ndarray, labels: np.ndarray, device: str, dtype: torch.dtype
) -> Weights:
    network = estimator_torch.Network(dropout=False).to(dtype)
    estimator_torch.load(network, weights)
    estimator_torch.Trainer(network, images, labels, SAMPLES, RATE, device).update(1)
    return estimator_torch.weights_of(network)


def apart(weights: Weights, found: Mapping[str, Mapping[str, np.ndarray]], wanted: Weights) -> float:
    """The largest of all arrays' norms of the difference over that of how far they should have moved."""
    return max(
        float(np.linalg.norm(np.asarray(found[name][leaf], np.float64) - value))
        / float(np.linalg.norm(value - weights[name][leaf]))
        for name, leaves in wanted.items()
        for leaf, value in leaves.items()
    )
