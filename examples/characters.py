"""A family of your own: a small transformer that learns to write Python's documentation, character by character.

    python examples/characters.py results/characters            train; Ctrl-C stops, saved
    python examples/characters.py results/characters resume     go on where it stopped or was killed

A family is a frozen config and three pure functions: `init`, `update` and `evaluate`. The compiled loop, the shuffled
batches, logs, validation, checkpoints, resuming and Ctrl-C come with one call of `train`.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from hotloop import Evaluation, Plan, Program, Resident, train

CHARACTERS = 128


@dataclass(frozen=True)
class Config:
    """Everything that the result depends on."""

    epochs: int = 10
    batch_size: int = 32
    context: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    learning_rate: float = 2e-3
    seed: int = 0


def init(config: Config, key: Array) -> dict[str, Any]:
    """Random weights, and an optimiser that has seen nothing."""
    width, layers = config.width, config.layers
    shapes = {
        "embed": (CHARACTERS, width),
        "place": (config.context, width),
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
        "head": (width, CHARACTERS),
    }
    keys = zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    params = {name: jax.random.normal(one, shape) / shape[-2] ** 0.5 for one, (name, shape) in keys}
    return {"params": params, "optimiser": optax.adamw(config.learning_rate).init(params)}


def losses(config: Config, params: dict[str, Array], text: Array) -> Array:
    """The mean loss of each row of characters, of which every one is guessed from those before it."""
    x = params["embed"][text[:, :-1]] + params["place"]
    shape = (*x.shape[:2], config.heads, config.width // config.heads)
    for layer in range(config.layers):
        parts = jnp.split(normalise(x) @ params["qkv"][layer], 3, axis=-1)
        seen = jax.nn.dot_product_attention(*(part.reshape(shape) for part in parts), is_causal=True)
        x += seen.reshape(x.shape) @ params["out"][layer]
        x += jax.nn.gelu(normalise(x) @ params["up"][layer]) @ params["down"][layer]
    scores = normalise(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:].astype(int)).mean(-1)


def normalise(x: Array) -> Array:
    """Each character's numbers, scaled to a mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def update(config: Config) -> Callable[[Any, Any, Array], tuple[Any, dict[str, Array]]]:
    """One weight update; it draws no random numbers."""
    optimiser = optax.adamw(config.learning_rate)

    def one(state: Any, batch: Any, key: Array) -> tuple[Any, dict[str, Array]]:
        params, loss_of = state["params"], lambda params: losses(config, params, batch["text"]).mean()
        loss, gradient = jax.value_and_grad(loss_of)(params)
        change, moments = optimiser.update(gradient, state["optimiser"], params)
        return {"params": optax.apply_updates(params, change), "optimiser": moments}, {"loss": loss}

    return one


def evaluate(config: Config) -> Callable[[Any, Any], dict[str, Array]]:
    """The loss of each row; the engine adds them up."""
    return lambda state, batch: {"loss": losses(config, state["params"], batch["text"])}


def train_characters(config: Config, folder: Path, resume: bool = False) -> Any:
    """Learn from nine tenths of the text, validate with the rest; the state after the last update."""
    text = np.frombuffer("\n".join(topics.values()).encode("ascii", "replace"), np.uint8)
    length = config.context + 1
    rows = text[: len(text) // length * length].reshape(-1, length)
    held_out, learned = rows[::10], np.delete(rows, np.s_[::10], axis=0)
    plan = Plan.for_epochs(len(learned), config.epochs, config.batch_size, validations_per_epoch=1)
    key = jax.random.key(config.seed)
    feed = Resident({"text": learned}, config.batch_size, seed=config.seed)
    program = Program(update(config), feed, plan.updates_per_call, key)
    evaluation = Evaluation(evaluate(config), {"text": held_out}, batch_size=100)
    return train(
        program,
        plan,
        init(config, key),
        folder,
        settings=asdict(config),
        resume=resume,
        validate=evaluation.means,
        guard="loss",
    )


if __name__ == "__main__":
    train_characters(Config(), Path(sys.argv[1]), resume="resume" in sys.argv[2:])
