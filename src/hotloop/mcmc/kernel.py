"""One Hamiltonian Monte Carlo step over a batch of independent chains.

A chain at position q is given a momentum p ~ N(0, I) and follows the Hamiltonian H(q, p) = -log density(q) +
|p|^2 / 2 for a while. Exact dynamics would keep H; the leapfrog integrator nearly does, and a Metropolis
decision on the change of H makes the chain exact. Positions are [chains, z]; every chain has its own
momentum, trajectory and decision, and no arithmetic ever mixes two rows. This file knows no target and no
model, and adapts nothing but a step size.

A step size may be one number, or one for each of the z: e s is the step e with the diagonal mass 1 / s^2, its
momentum written in units of 1 / s, in which it is N(0, I) again. `axis` is the axis of the z: -1 for [chains, z], and 0
where positions, momenta and gradients are [z, chains], which is faster for many chains of a small model on a CPU.

>>> import jax, jax.numpy as jnp
>>> from hotloop.mcmc import hmc
>>> standard_normal = hmc.gradient_of(lambda z: -0.5 * (z**2).sum(-1))
>>> step = jax.jit(hmc.kernel(standard_normal, leapfrog_steps=5))
>>> state = hmc.init(jnp.zeros((1_000, 2)), standard_normal)
>>> for key in jax.random.split(jax.random.key(0), 30):
...     state, info = step(key, state, 0.3)
>>> bool(abs(state.position.std() - 1) < 0.05), bool(info.acceptance.mean() > 0.9)
(True, True)
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

LogDensity = Callable[[Array], Array]
"""positions [chains, z] -> unnormalised log density [chains], each row from its own position alone."""
StepSize = Float[Array, ""] | Float[Array, "z"] | Float[Array, "z 1"] | float
"""One for all, or one for each of the z, of a shape that goes with a position: see above."""
ValueAndGradient = Callable[[Array], tuple[Array, Array]]
"""positions [chains, z] -> (log density [chains], its gradient [chains, z])."""

UNROLLED_LEAPFROGS = 16
"""Trajectories up to this length are written out: no loop, so that the compiler fuses across leapfrogs."""


class State(NamedTuple):
    """Where the chains stand, and what is known there: a step needs L new gradients, not L + 1."""

    position: Float[Array, "chains z"]
    log_density: Float[Array, "chains"]
    gradient: Float[Array, "chains z"]


class Info(NamedTuple):
    """What happened to each chain in one step."""

    acceptance: Float[Array, "chains"]
    """The probability of moving: min(1, exp(-energy_change)), 0 where the trajectory diverged."""
    accepted: Bool[Array, "chains"]
    energy_change: Float[Array, "chains"]
    """H(proposal) - H(start): the integrator's error, 0 for exact dynamics, possibly inf or nan."""


def gradient_of(log_density: LogDensity) -> ValueAndGradient:
    """Value and gradient by one reverse pass over the sum of all rows: each row gets its own gradient."""

    def total(position: Array) -> tuple[Array, Array]:
        values = log_density(position)
        return values.sum(), values

    def value_and_gradient(position: Array) -> tuple[Array, Array]:
        (_, values), gradient = jax.value_and_grad(total, has_aux=True)(position)
        return values, gradient

    return value_and_gradient


def init(position: Float[Array, "rows columns"], value_and_gradient: ValueAndGradient) -> State:
    """The state at a starting position; the one gradient that is not part of a step."""
    return State(position, *value_and_gradient(position))


def leapfrog(
    value_and_gradient: ValueAndGradient,
    state: State,
    momentum: Float[Array, "rows columns"],
    step_size: StepSize,
    steps: int | Int[Array, ""],
    block: int = 1,
) -> tuple[State, Float[Array, "rows columns"]]:
    """Follow the dynamics for `steps` leapfrogs: (state, momentum) at the end of the trajectory.

    One leapfrog is half a kick p += (e/2) grad, a drift q += e p, and half a kick at the new place. Two half
    kicks that meet are one whole kick, so the map is: half a kick and a drift, then whole kick and drift
    alternating, and half a kick. Each of the three maps shears one variable by a function of the other, so volume
    is kept exactly; the composition is symmetric, so running it again with the momentum turned round leads back
    to the start. `steps` may be known only at run time; `block` of them are then written out in a turn of the loop.
    A turn begins with the gradient, which needs all of a position: kick and drift after it are one pass over the
    numbers, and the start, which a rejected chain goes back to, is read and not copied.
    """

    def kick_and_drift(_: Array | int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        position, momentum = carry
        momentum = momentum + step_size * value_and_gradient(position)[1]
        return position + step_size * momentum, momentum

    momentum = momentum + 0.5 * step_size * state.gradient
    start = state.position + step_size * momentum, momentum
    if isinstance(steps, int):
        unroll = steps <= UNROLLED_LEAPFROGS
        position, momentum = lax.fori_loop(0, steps - 1, kick_and_drift, start, unroll=unroll)
    else:
        position, momentum = repeat(kick_and_drift, start, steps - 1, block)
    end = init(position, value_and_gradient)
    return end, momentum + 0.5 * step_size * end.gradient


def repeat(
    once: Callable[[Array | int, tuple[Array, Array]], tuple[Array, Array]],
    carry: tuple[Array, Array],
    times: Int[Array, ""],
    block: int,
) -> tuple[Array, Array]:
    """`once` so many times, in turns of `block` and one choice among what may be left over."""
    if block == 1:
        return cast(tuple[Array, Array], lax.fori_loop(0, times, once, carry))

    def several(count: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        for number in range(count):
            carry = once(number, carry)
        return carry

    # Counted down: on a GPU a count from 0 to a bound is two more kernels.
    left, carry = lax.while_loop(
        lambda state: state[0] >= block,
        lambda state: (state[0] - block, several(block, state[1])),
        (times, carry),
    )
    return cast(tuple[Array, Array], lax.switch(left, [partial(several, n) for n in range(block)], carry))


def energy(state: State, momentum: Float[Array, "rows columns"], axis: int = -1) -> Float[Array, "chains"]:
    """`H = -log density + |p|^2 / 2` of each chain."""
    return 0.5 * jnp.square(momentum).sum(axis) - state.log_density


def metropolis(
    old: State,
    new: State,
    energy_change: Float[Array, "chains"],
    uniform: Float[Array, "chains"],
    axis: int = -1,
) -> tuple[State, Info]:
    """Each chain moves to its proposal with probability min(1, exp(-energy_change)), else stays bit for bit.

    A trajectory that ran away has an energy of inf or nan: its probability is 0, it is rejected, and since
    rows are selected and never blended, nothing of it reaches another chain.
    """
    acceptance = jnp.where(jnp.isfinite(energy_change), jnp.exp(jnp.minimum(-energy_change, 0.0)), 0.0)
    accepted = uniform < acceptance
    row = jnp.expand_dims(accepted, axis)
    kept = State(
        jnp.where(row, new.position, old.position),
        jnp.where(accepted, new.log_density, old.log_density),
        jnp.where(row, new.gradient, old.gradient),
    )
    return kept, Info(acceptance, accepted, energy_change)


Transition = Callable[[State, Array, Array, Array | float], tuple[State, Info]]
Kernel = Callable[[Array, State, Array | float], tuple[State, Info]]


def transition(
    value_and_gradient: ValueAndGradient, leapfrog_steps: int | Array, axis: int = -1, block: int = 1
) -> Transition:
    """One HMC step as a function of its randomness: (state, momentum, uniform, step size) -> (state, info).

    For loops that draw momentum [chains, z] ~ N(0, 1) and uniform [chains] in [0, 1) in blocks of many steps.
    """

    def step(state: State, momentum: Array, uniform: Array, step_size: Array | float) -> tuple[State, Info]:
        end, end_momentum = leapfrog(value_and_gradient, state, momentum, step_size, leapfrog_steps, block)
        change = energy(end, end_momentum, axis) - energy(state, momentum, axis)
        return metropolis(state, end, change, uniform, axis)

    return step


def kernel(value_and_gradient: ValueAndGradient, leapfrog_steps: int) -> Kernel:
    """One HMC step that draws its own randomness: (key, state, step size) -> (state, info)."""
    step = transition(value_and_gradient, leapfrog_steps)

    def one_step(key: Array, state: State, step_size: Array | float) -> tuple[State, Info]:
        momentum_key, uniform_key = jax.random.split(key)
        momentum = jax.random.normal(momentum_key, state.position.shape, state.position.dtype)
        uniform = jax.random.uniform(uniform_key, state.log_density.shape, state.log_density.dtype)
        return step(state, momentum, uniform, step_size)

    return one_step


def adaptation(
    step_size: Float[Array, ""],
    accepted: Float[Array, "chains"] | Bool[Array, "chains"],
    target: float = 0.9,
    rate: float = 0.01,
) -> Float[Array, ""]:
    """The step size that all chains share, moved toward a target: e (1 + rate (mean - target) / target).

    `accepted` is either the decisions or the probabilities of one step. It multiplies, so a step size stays
    positive for rate < 1, and at the target it stays put; freeze it before samples are kept.
    """
    mean = jnp.mean(accepted, dtype=step_size.dtype)
    return step_size * (1.0 + rate * (mean - target) / target)
