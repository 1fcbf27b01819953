"""Loss scaling: multiply the loss so that small gradients survive half precision, divide before the update.

`StaticScale` keeps one factor. `AutoScale` doubles it after a row of good updates, and on a gradient that is
not finite halves it and has the update skipped. The state is three scalars that live in the family's State,
so that it is saved and resumed with everything else; all of it works inside a compiled loop.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.errors import OptionError

Tree = TypeVar("Tree")


class ScaleState(NamedTuple):
    """The factor in use, good updates since it last changed, and updates skipped in all."""

    scale: Array
    good: Array
    skipped: Array


def _start(scale: float) -> ScaleState:
    if not (scale > 0 and math.isfinite(scale)):
        raise OptionError(f"scale={scale}: must be greater than 0 and finite")
    return ScaleState(jnp.float32(scale), jnp.int32(0), jnp.int32(0))


@dataclass(frozen=True)
class StaticScale:
    """One factor for the whole run; 1 is no scaling. A gradient that is not finite is not hidden."""

    scale: float = 1.0

    def init(self) -> ScaleState:
        return _start(self.scale)

    def judge(self, state: ScaleState, gradients: Any) -> tuple[Array, ScaleState]:
        return jnp.bool_(True), state


@dataclass(frozen=True)
class AutoScale:
    """As large a factor as the gradients bear: doubled after `patience` good updates, halved on overflow."""

    initial: float = 2.0**15
    patience: int = 2000
    least: float = 2.0**-14
    most: float = 2.0**24

    def init(self) -> ScaleState:
        return _start(self.initial)

    def judge(self, state: ScaleState, gradients: Any) -> tuple[Array, ScaleState]:
        """Whether the update may be used, and the state after it."""
        finite = all_finite(gradients)
        good = jnp.where(finite, state.good + 1, 0)
        grow = good >= self.patience
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        scale = jnp.clip(state.scale * factor, self.least, self.most)
        return finite, ScaleState(
            scale, jnp.where(grow, 0, good), state.skipped + (~finite).astype(jnp.int32)
        )


def scale_loss(state: ScaleState, loss: Array) -> Array:
    """The loss to differentiate, in float32."""
    return loss.astype(jnp.float32) * state.scale


def unscale(state: ScaleState, gradients: Tree) -> Tree:
    """The gradients of the loss itself, in float32; exact for factors that are powers of two."""
    one_over = 1 / state.scale
    result: Tree = jax.tree.map(lambda gradient: gradient.astype(jnp.float32) * one_over, gradients)
    return result


def all_finite(tree: Any) -> Array:
    """Whether no leaf holds NaN or an infinity."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def choose(usable: Array, new: Tree, old: Tree) -> Tree:
    """The new state where the update may be used, else the old one, bit for bit."""
    result: Tree = jax.tree.map(lambda a, b: jnp.where(usable, a, b), new, old)
    return result
