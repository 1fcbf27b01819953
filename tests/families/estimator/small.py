"""A small model and data that every test of the estimator shares: two classes of five numbers, dropout on."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hotloop import Estimator, ModelSpec, RunConfig

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(200, 5)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
traces = [0]
"""How often the model was traced."""


def data() -> tuple[Any, Any]:
    return X, Y


def init(key: Any) -> Any:
    return {"kernel": 0.1 * jax.random.normal(key, (5, 2)), "bias": jnp.zeros(2)}


def apply(weights: Any, x: Any, *, train: bool, keys: Any) -> Any:
    traces[0] += 1
    if train:
        x = x * jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (5,)))(keys).astype(x.dtype)
    return x @ weights["kernel"] + weights["bias"]


def right(outputs: Any, labels: Any) -> Any:
    return outputs.argmax(-1) == labels


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> ModelSpec:
    return ModelSpec(
        init=init,
        apply=apply,
        metrics={"accuracy": right},
        predictions=lambda outputs: {"class": outputs.argmax(-1), "logits": outputs},
        optimizer=optax.sgd(params.get("rate", 0.1), momentum=0.9),
    )


def small(
    folder: Path, model: Any = model_fn, params: Any = None, voice: Any = None, **config: Any
) -> Estimator:
    chosen = {"batch_size": 16, "iterations_per_call": 10, "checkpoint_seconds": None, **config}
    return Estimator(model, RunConfig(model_dir=folder, **chosen), params or {}, **(voice or {}))


def weights(estimator: Estimator) -> dict[str, Any]:
    return estimator.weights(lambda: X)


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
