"""Optimisers by name, with the two ways to shrink weights: L2 inside the gradient, decay beside the rule.

With O the update rule, s its state and r the rate: L2 is dW = -r O(g + l2 W, s), decay is dW = -r (O(g, s) + wd W).
They are the same for a rule without memory and differ for every other. The gradient that comes in is unscaled and
averaged over the global batch; `precision.optimise` does the arithmetic in float32. It knows no schedule: the
rate of an update is given to `Rule.at`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine.optim_keys import NON_NEGATIVE, check_optimiser, rmsprop_decay
from hotloop.engine.precision import kept_squares
from hotloop.engine.update_rules import (
    NORMS_AND_BIASES,
    SQUARES,
    Lars,
    Leaf,
    LeafRule,
    Momentum,
    Rmsprop,
    Sgd,
)
from hotloop.errors import OptionError

Path = tuple[str, ...]
KERAS_EPSILON = 1e-7  # what Keras takes for an epsilon of 0


def nothing(path: Path) -> bool:
    """Exclude no leaf: every one is decayed."""
    return False


def norms_and_biases(path: Path) -> bool:
    """Exclude the parameters of norm layers and all biases, as most recipes do."""
    return path[-1] in NORMS_AND_BIASES


@dataclass(frozen=True)
class Rule:
    """An update rule with its regularisation; leaves that `exclude` names are never decayed, in any way."""

    base: LeafRule
    weight_decay: float = 0.0
    l2: float = 0.0
    exclude: Callable[[Path], bool] = nothing

    def init(self, params: Any) -> dict[str, Any]:
        """The state before the first update: zeros like the parameters under each slot's name, squares wide enough."""

        def zeros(slot: str, leaf: Array) -> Array:
            start = jnp.zeros_like(leaf)
            return start.astype(kept_squares(start.dtype)) if slot == SQUARES else start

        return {slot: jax.tree.map(partial(zeros, slot), params) for slot in self.base.slots}

    def at(self, rate: Array) -> "AtRate":
        """The rule with the rate of this update: what `precision.optimise` takes."""
        return AtRate(self, rate)


@dataclass(frozen=True)
class AtRate:
    """One update at a given rate."""

    rule: Rule
    rate: Array

    def update(self, updates: Any, state: Any, params: Any) -> tuple[Any, dict[str, Any]]:
        """The steps to add to the parameters for the gradients `updates`, and the new state."""
        tree: Any
        leaves, tree = jax.tree.flatten_with_path(params)
        names = self.rule.base.slots
        slots = (tree.flatten_up_to(state[name]) for name in names)
        moved = [
            self._leaf(tuple(map(_name, path)), g, w, tuple(kept))
            for (path, w), g, *kept in zip(leaves, tree.flatten_up_to(updates), *slots, strict=True)
        ]
        steps, *kept = (tree.unflatten(column) for column in zip(*moved, strict=True))
        return steps, dict(zip(names, kept, strict=True))

    def _leaf(self, path: Path, g: Array, w: Array, slots: tuple[Array, ...]) -> tuple[Array, ...]:
        """The step of one leaf, then its slots."""
        rule, decayed = self.rule, not self.rule.exclude(path)
        if rule.l2 and decayed:
            g = g + rule.l2 * w
        step, slots = rule.base.step(self.rate, g, w, slots, Leaf(path, decayed))
        if rule.weight_decay and decayed:
            step = step - self.rate * (rule.weight_decay * w)
        return (step, *slots)


def _name(key: Any) -> str:
    """One entry of a path as text, for dicts, attributes and positions alike."""
    return jax.tree_util.keystr((key,), simple=True)


def rule(
    name: str,
    params: Mapping[str, Any],
    *,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    global_batch_size: int = 1,
    exclude: Callable[[Path], bool] = nothing,
) -> Rule:
    """The optimiser `name` (sgd, lars or rmsprop) with its parameters, or an OptionError."""
    check_optimiser(name, params, global_batch_size=global_batch_size)
    for argument, value in (("weight_decay", weight_decay), ("l2", l2)):
        if reason := NON_NEGATIVE(value):
            raise OptionError(f"{argument}={value}: {reason}")
    return Rule(BASES[name](params, global_batch_size), weight_decay, l2, exclude)


def _sgd(params: Mapping[str, Any], batch: int) -> LeafRule:
    return Sgd(Momentum(params["momentum"], params.get("nesterov", False)))


def _lars(params: Mapping[str, Any], batch: int) -> LeafRule:
    momentum = Momentum(params["momentum"], params.get("nesterov", False))
    return Lars(momentum, params["weight_decay"], params["eeta"], params["epsilon"] or KERAS_EPSILON)


def _rmsprop(params: Mapping[str, Any], batch: int) -> LeafRule:
    rho = rmsprop_decay(params["base_decay_exponent"], batch)
    return Rmsprop(Momentum(params["momentum"]), rho, params["epsilon"] or KERAS_EPSILON)


BASES: dict[str, Callable[[Mapping[str, Any], int], LeafRule]] = {
    "sgd": _sgd,
    "lars": _lars,
    "rmsprop": _rmsprop,
}
