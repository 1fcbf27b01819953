"""The example's model function: network, loss, metric and rule of a recipe, as an Estimator takes them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import optax

from hotloop.engine.schedules import learning_rate
from hotloop.families.estimator import cifar_network
from hotloop.families.estimator.cifar_recipes import RECIPES, Recipe
from hotloop.families.estimator.spec import Mode, ModelSpec
from hotloop.layers.losses import correct, cross_entropy

CLASSES = 10
Rate = float | Callable[[Any], Any]


def model_fn(mode: Mode, params: Mapping[str, Any]) -> ModelSpec:
    """The network for a mode; `params` are `recipe`, `learning_rate` and `updates`, the length of the whole run."""
    recipe = RECIPES[params["recipe"]]
    training = mode == Mode.TRAIN
    return ModelSpec(
        init=cifar_network.init,
        apply=cifar_network.apply,
        loss=partial(cross_entropy, smoothing=recipe.smoothing if training else 0.0),
        metrics={"accuracy": correct},
        predictions=lambda logits: {"class": logits.argmax(-1), "probabilities": jax.nn.softmax(logits)},
        optimizer=optimizer(recipe, rate_of(recipe, params["learning_rate"], params["updates"]))
        if training
        else None,
        classes=CLASSES,
    )


def rate_of(recipe: Recipe, rate: float, updates: int) -> Rate:
    """The learning rate, or a function that gives it by the updates made so far."""
    if recipe.peak is None:
        return (lambda update: rate / (1 + recipe.rate_decay * update)) if recipe.rate_decay else rate
    cycle = {"initial_learning_rate": rate, "peak_epoch": recipe.peak, "total_epochs": 1}
    return learning_rate("one_cycle", cycle, global_batch_size=1, updates_per_epoch=updates)


def optimizer(recipe: Recipe, rate: Rate) -> optax.GradientTransformation:
    """The recipe's rule at this rate; RMSprop as Keras had it, which adds its epsilon to the root."""
    rules: dict[str, Callable[[Rate], optax.GradientTransformation]] = {
        "sgd": optax.sgd,
        "rmsprop": lambda rate: optax.rmsprop(rate, decay=0.9, eps=1e-7, eps_in_sqrt=False),
        "adam": lambda rate: optax.adam(rate, b2=0.99),
    }
    return rules[recipe.rule](rate)
