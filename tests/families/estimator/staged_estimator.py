"""A small model in three stages for the tests of pipelined specs: dropout in two of them, two values between the first
two, and the same network undivided."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hotloop import Estimator, ModelSpec, RunConfig

RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(96, 6)).astype(np.float32)
Y = (np.abs(X).sum(1) > 4.5).astype(np.int32) + (X[:, 0] > 0)
CLASSES = 3


def data() -> tuple[Any, Any]:
    return X, Y


def init(key: Any) -> Any:
    keys = jax.random.split(key, 4)
    shapes = {"one": (6, 8), "two": (8, 7), "skip": (6, 7), "three": (7, CLASSES)}
    return {
        name: {"kernel": 0.4 * jax.random.normal(each, shape), "bias": jnp.full(shape[-1:], 0.1)}
        for each, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def dense(layer: Any, x: Any) -> Any:
    return x @ layer["kernel"] + layer["bias"]


def drop(x: Any, keys: Any, layer: int) -> Any:
    """Half of the values, by a key for each sample and the number of the layer."""
    own = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, layer), 0.5, x.shape[1:]))(keys)
    return jnp.where(own, 2 * x, 0)


def first(weights: Any, x: Any, *, train: bool, keys: Any) -> Any:
    y = jax.nn.tanh(dense(weights["one"], x))
    return {"y": drop(y, keys, 1) if train else y, "x": x}


def second(weights: Any, values: Any, *, train: bool, keys: Any) -> Any:
    y = jax.nn.tanh(dense(weights["two"], values["y"]) + dense(weights["skip"], values["x"]))
    return drop(y, keys, 2) if train else y


def third(weights: Any, y: Any) -> Any:
    return dense(weights["three"], y)


def whole(weights: Any, x: Any, *, train: bool, keys: Any) -> Any:
    first_values = first(weights, x, train=train, keys=keys)
    return third(weights, second(weights, first_values, train=train, keys=keys))


def right(outputs: Any, labels: Any) -> Any:
    return outputs.argmax(-1) == labels


def undivided(params: Any) -> ModelSpec:
    return ModelSpec(
        init=init,
        apply=whole,
        metrics={"accuracy": right},
        predictions=lambda outputs: {"class": outputs.argmax(-1), "logits": outputs},
        optimizer=params.get("optimizer", optax.sgd(0.2, momentum=0.9)),
    )


def pipelined(params: Any) -> ModelSpec:
    """The same in stages; `params` may have fields of the spec under `spec`."""
    fields = {
        "stages": [first, second, third],
        "metrics": {"accuracy": right},
        "predictions": lambda outputs: {"class": outputs.argmax(-1), "logits": outputs},
        "optimizer": params.get("optimizer", optax.sgd(0.2, momentum=0.9)),
        **params.get("spec", {}),
    }
    return ModelSpec(init=init, **fields)


def estimator(folder: Path, model: Any, params: Any = None, say: Any = None, **config: Any) -> Estimator:
    chosen = {"batch_size": 24, "iterations_per_call": 4, "checkpoint_seconds": None, **config}
    return Estimator(
        model, RunConfig(model_dir=folder, **chosen), params or {}, say=say or (lambda line: None)
    )


def weights(estimator: Estimator) -> dict[str, Any]:
    return estimator.weights(lambda: X)
