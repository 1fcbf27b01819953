"""The update rules themselves, one leaf at a time: SGD with momentum, LARS, RMSprop.

A rule takes the finished gradient g of a leaf W (L2 is already in it) and returns the step to add to W and the
leaf's new slots. All three keep the rate inside the momentum, as Keras does: a change of the rate acts on new
gradients only. They know no schedule, no precision and no regularisation but what LARS itself defines.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

NORMS_AND_BIASES = frozenset({"scale", "offset", "bias"})
SQUARES = "mean_square"
"""The slot that holds squares, which 16 bits may not have the range for."""
Slots = tuple[Array, ...]


class Leaf(NamedTuple):
    """What a rule may know of a leaf: the names that lead to it, and whether it may be decayed."""

    path: tuple[str, ...]
    decayed: bool


class LeafRule(Protocol):
    """An update rule for one leaf; `slots` names the arrays it keeps for each, all zero at first."""

    @property
    def slots(self) -> tuple[str, ...]:
        """What is kept between updates, in the order in which `step` takes and returns it."""

    def step(self, rate: Array, g: Array, w: Array, slots: Slots, leaf: Leaf) -> tuple[Array, Slots]:
        """The step to add to `w`, and the new slots."""


@dataclass(frozen=True)
class Momentum:
    """v <- m v - d, W <- W + v; Nesterov's W <- W + m v - d. Without momentum nothing is kept."""

    momentum: float
    nesterov: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The velocity, where there is one."""
        return ("velocity",) if self.momentum else ()

    def step(self, descent: Array, slots: Slots) -> tuple[Array, Slots]:
        """The step for `descent`, which is rate times direction."""
        if not slots:
            return -descent, ()
        velocity = self.momentum * slots[0] - descent
        return (self.momentum * velocity - descent if self.nesterov else velocity), (velocity,)


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent: the direction is the gradient."""

    momentum: Momentum

    @property
    def slots(self) -> tuple[str, ...]:
        """The velocity."""
        return self.momentum.slots

    def step(self, rate: Array, g: Array, w: Array, slots: Slots, leaf: Leaf) -> tuple[Array, Slots]:
        """d = rate g."""
        return self.momentum.step(rate * g, slots)


@dataclass(frozen=True)
class Lars:
    """Layer-wise adaptive rates (You, Gitman and Ginsburg, 2017): each leaf moves in proportion to its own norm.

    Scales, offsets and biases take the plain rate and are not decayed.
    """

    momentum: Momentum
    weight_decay: float
    eeta: float
    epsilon: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The velocity."""
        return self.momentum.slots

    def step(self, rate: Array, g: Array, w: Array, slots: Slots, leaf: Leaf) -> tuple[Array, Slots]:
        """d = rate ratio (g + wd W), with ratio = eeta |W| / (|g| + wd |W| + epsilon)."""
        if leaf.path[-1] in NORMS_AND_BIASES:
            return self.momentum.step(rate * g, slots)
        decay = self.weight_decay if leaf.decayed else 0.0
        w_norm, g_norm = _norm(w), _norm(g)
        ratio = self.eeta * w_norm / (g_norm + decay * w_norm + self.epsilon)
        # A leaf that is all zero could never leave zero, and one without a gradient has nothing to measure by.
        ratio = jnp.where((w_norm > 0) & (g_norm > 0), ratio, 1)
        return self.momentum.step(rate * ratio * (g + decay * w), slots)


def _norm(x: Array) -> Array:
    """The Euclidean norm in float32 or wider: squares of half numbers leave their range."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))))


@dataclass(frozen=True)
class Rmsprop:
    """Gradients divided by the root of their running mean square; epsilon stands inside the root."""

    momentum: Momentum
    rho: float
    epsilon: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The mean square, and the velocity where there is one."""
        return (SQUARES, *self.momentum.slots)

    def step(self, rate: Array, g: Array, w: Array, slots: Slots, leaf: Leaf) -> tuple[Array, Slots]:
        """s <- rho s + (1 - rho) g^2, d = rate g / sqrt(s + epsilon)."""
        mean_square = self.rho * slots[0] + (1 - self.rho) * jnp.square(g)
        step, rest = self.momentum.step(rate * g / jnp.sqrt(mean_square + self.epsilon), slots[1:])
        return step, (mean_square, *rest)
