"""The example's model_fn, and the augmentation of its images, drawn from a key for each sample, so that it is the same
however a batch is split."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine.keys import sample_keys
from hotloop.engine.optim import learning_rate
from hotloop.families.cnn.images import crop_and_flip, draw_crops
from hotloop.families.estimator.cifar.config import RECIPES, Recipe
from hotloop.families.estimator.cifar.network import NETWORKS
from hotloop.families.estimator.config import Mode, ModelSpec
from hotloop.families.estimator.model import NamedBatch
from hotloop.layers.losses import correct, cross_entropy

CLASSES = 10
REACH: dict[str, tuple[int, Literal["edge", "constant"]]] = {"shift": (3, "edge"), "crop": (4, "constant")}
"""How far each augmentation moves an image, and what comes in from beyond its border: the nearest pixel, or black."""
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"momentum": 0}),
    "rmsprop": ("rmsprop_outside", {"decay": 0.9, "epsilon": 1e-7}),  # as Keras had it
    "adam": ("adam", {"b2": 0.99}),
}


def model_fn(mode: Mode, params: Mapping[str, Any]) -> ModelSpec:
    """The network for a mode; `params` are `recipe`, `learning_rate` and `updates`, the length of the whole run, and
    perhaps `model_shard_position`, the layer that begins the second of two stages, and their `pipeline_schedule`."""
    recipe = RECIPES[params["recipe"]]
    network, position = NETWORKS[recipe.network], params.get("model_shard_position")
    training = mode == Mode.TRAIN
    optimizer, rule = OPTIMIZERS[recipe.rule]
    return ModelSpec(
        init=network.init,
        apply=network.apply if position is None else None,
        stages=None if position is None else network.cut(position),
        pipeline_schedule=params.get("pipeline_schedule"),
        loss=partial(cross_entropy, smoothing=recipe.smoothing if training else 0.0),
        metrics={"accuracy": correct},
        predictions=lambda logits: {"class": logits.argmax(-1), "probabilities": jax.nn.softmax(logits)},
        optimizer=optimizer if training else None,
        learning_rate=make_rate(recipe, params["learning_rate"], params["updates"]) if training else None,
        optimizer_params=rule if training else {},
        classes=CLASSES,
    )


def make_rate(recipe: Recipe, rate: float, updates: int) -> float | Callable[[Any], Any]:
    if recipe.peak is None:
        return (lambda update: rate / (1 + recipe.rate_decay * update)) if recipe.rate_decay else rate
    cycle = {"initial_learning_rate": rate, "peak_epoch": recipe.peak, "total_epochs": 1}
    return learning_rate("one_cycle", cycle, global_batch_size=1, updates_per_epoch=updates)


@cache
def find_transform(augmentation: str) -> Callable[[NamedBatch, Array], NamedBatch] | None:
    """What an augmentation does to a batch, always the same function; None where it does nothing."""
    if augmentation not in REACH:
        return None
    reach, fill = REACH[augmentation]

    def transform(batch: NamedBatch, key: Array) -> NamedBatch:
        crops = draw_crops(sample_keys(key, 0, len(batch["features"])), reach)
        return {**batch, "features": crop_and_flip(jnp.asarray(batch["features"]), crops, reach, fill)}

    return transform
