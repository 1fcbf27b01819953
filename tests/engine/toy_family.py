"""A family in miniature, for tests of the engine: a noisy two-layer classifier trained by Adam."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hotloop.engine.keys import sample_keys

FEATURES, CLASSES = 12, 4


@dataclass(frozen=True)
class Config:
    hidden: int = 16
    learning_rate: float = 1e-2
    dropout: float = 0.1
    dtype: str = "float32"


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    first, second = jax.random.split(key)
    params = {
        "first": jax.random.normal(first, (FEATURES, config.hidden), config.dtype) / FEATURES**0.5,
        "second": jax.random.normal(second, (config.hidden, CLASSES), config.dtype) / config.hidden**0.5,
    }
    return {"params": params, "optimiser": optax.adam(config.learning_rate).init(params), "step": 0}


def _logits(params: dict[str, jax.Array], x: jax.Array, keep: jax.Array | float) -> jax.Array:
    hidden = jnp.tanh(x.astype(params["first"].dtype) / 16 @ params["first"]) * keep
    return (hidden.astype(params["second"].dtype) @ params["second"]).astype(jnp.float32)


@cache
def update(config: Config) -> Any:
    optimiser = optax.adam(config.learning_rate)

    def one(state: dict[str, Any], batch: Any, key: jax.Array) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        keys = sample_keys(key, 0, len(batch["y"]))
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - config.dropout, (config.hidden,)))(keys)

        def loss(params: dict[str, jax.Array]) -> jax.Array:
            logits = _logits(params, batch["x"], keep)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, gradient = jax.value_and_grad(loss)(state["params"])
        change, moments = optimiser.update(gradient, state["optimiser"])
        params = optax.apply_updates(state["params"], change)
        new = {"params": params, "optimiser": moments, "step": state["step"] + 1}
        return new, {"loss": value, "step": state["step"], "gradient_norm": optax.tree.norm(gradient)}

    return one


@cache
def evaluate(config: Config) -> Any:
    def values(state: dict[str, Any], batch: Any) -> dict[str, jax.Array]:
        logits = _logits(state["params"], batch["x"], 1.0)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return {"correct": logits.argmax(-1) == batch["y"], "loss": loss}

    return values


def data(samples: int = 203, seed: int = 0) -> dict[str, np.ndarray]:
    """Four overlapping clusters of small integers."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, samples)
    centres = np.random.default_rng(7).uniform(4, 12, (CLASSES, FEATURES))
    x = np.clip(centres[labels] + rng.normal(0, 3, (samples, FEATURES)), 0, 16)
    return {"x": x.astype(np.uint8), "y": labels.astype(np.int32)}
