"""Warm-up and draws of all chains as functions to compile: pure, on columns [z, chains], from one iteration to another.

Randomness depends on the number of the iteration alone and nothing on where a loop begins or stops, so that any
number of iterations may be one call. The host's part is sampler.py.
"""

from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from hotloop.mcmc import adaptation, kernel, random_bits
from hotloop.mcmc.settings import Settings

Parts = TypeVar("Parts")

DIVERGENCE = 1000.0
"""Change of energy from which a trajectory counts as diverged, as in Stan."""
EARLY_LEAPFROGS = 64
"""At most so many before the first window, while neither scales nor a direction are known."""
FIRST_STEP_ACCEPTANCE = 0.8
GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio: its multiples, modulo 2^32, are spread as evenly as can be."""


class Tuning(NamedTuple):
    """What is frozen while draws are kept."""

    step_size: Float[Array, ""]
    scale: Float[Array, "z"]
    """The square root of the inverse mass."""
    trajectory: Float[Array, ""]
    """The mean length of a trajectory in units of the scale: step sizes times leapfrogs."""


class WarmUp(NamedTuple):
    """The chains and all that they have taught so far."""

    chains: kernel.State
    averaging: adaptation.DualAveraging
    scale: Float[Array, "z"]
    moments: adaptation.Moments
    slowest: adaptation.Slowest


class Draws(NamedTuple):
    """What is kept of every draw."""

    position: Float[Array, "samples z chains"]
    log_density: Float[Array, "samples chains"]
    acceptance: Float[Array, "samples chains"]
    diverging: Bool[Array, "samples chains"]
    leapfrogs: Int[Array, "samples"]


def leapfrogs_of(settings: Settings, tuning: Tuning, draw: Array, most: Array | int) -> Int[Array, ""]:
    """Leapfrogs of all chains in this draw: around their mean by a share of up to `jitter`, evenly spread."""
    mean = settings.leapfrogs or tuning.trajectory / tuning.step_size
    place = (draw.astype(jnp.uint32) * jnp.uint32(GOLDEN)).astype(jnp.float32) * 2.0**-32
    wanted = jnp.minimum(mean * (1 + settings.jitter * (2 * place - 1)), most)
    return jnp.maximum(jnp.round(wanted), 1).astype(jnp.int32)


def move(
    settings: Settings,
    gradient: kernel.ValueAndGradient,
    words: Array,
    chains: kernel.State,
    tuning: Tuning,
    draw: Array,
    most: Array | int,
    block: int,
) -> tuple[kernel.State, kernel.Info, Array]:
    """One draw of every chain, and its leapfrogs."""
    size, count = chains.position.shape
    momentum, uniform = random_bits.momenta_and_uniforms(words, draw, size, count, chains.position.dtype)
    steps: int | Array = settings.leapfrogs or 0
    if settings.leapfrogs is None or settings.jitter:
        steps = leapfrogs_of(settings, tuning, draw, most)
    chains, info = kernel.transition(gradient, steps, axis=0, block=block)(
        chains, momentum, uniform, tuning.step_size * tuning.scale[:, None]
    )
    return chains, info, jnp.asarray(steps, jnp.int32)


def find_first_step(
    gradient: kernel.ValueAndGradient, chains: kernel.State, words: Array
) -> Float[Array, ""]:
    """A step size at which one leapfrog is accepted about as often as not: doubled or halved from 1 until it is."""
    size, count = chains.position.shape
    dtype = chains.position.dtype
    momentum, uniform = random_bits.momenta_and_uniforms(words, jnp.uint32(0), size, count, dtype)
    step = kernel.transition(gradient, 1, axis=0)

    def acceptance(step_size: Array) -> Array:
        return step(chains, momentum, uniform, step_size)[1].acceptance.mean()

    one = jnp.ones((), dtype)
    grows = acceptance(one) > FIRST_STEP_ACCEPTANCE

    def goes_on(carry: tuple[Array, Array]) -> Array:
        step_size, tries = carry
        return ((acceptance(step_size) > FIRST_STEP_ACCEPTANCE) == grows) & (tries < 60)

    def change(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        step_size, tries = carry
        return step_size * jnp.where(grows, 2, 0.5).astype(dtype), tries + 1

    return lax.while_loop(goes_on, change, (one, jnp.int32(0)))[0]


class Programs:
    """The loops for one log density and its settings; `block` leapfrogs are one turn of the innermost one."""

    def __init__(self, settings: Settings, gradient: kernel.ValueAndGradient, block: int = 1):
        self._settings, self._gradient, self._block = settings, gradient, block
        self._plan = adaptation.schedule(settings.warmup)

    def begin(self, chains: kernel.State, words: Array) -> WarmUp:
        """The chains before the first iteration."""
        position = chains.position
        scale = jnp.ones_like(position[:, 0])
        given = self._settings.step_size
        if given is None:
            step_size = find_first_step(self._gradient, chains, words)
        else:
            step_size = jnp.asarray(given, position.dtype)
        averaging = adaptation.start_averaging(step_size)
        moments, slowest = adaptation.no_moments(scale), adaptation.guess_slowest(position.T)
        return WarmUp(chains, averaging, scale, moments, slowest)

    def warm(self, state: WarmUp, words: Array, start: Array, stop: Array) -> WarmUp:
        """Iterations of warm-up from `start` up to `stop`."""
        if self._settings.warmup == 0:
            return state
        found = lax.fori_loop(start, stop, lambda i, state: self._warm_once(state, words, i), state)
        return cast(WarmUp, found)

    def _warm_once(self, state: WarmUp, words: Array, i: Array) -> WarmUp:
        settings, plan = self._settings, self._plan
        most = jnp.where(i < plan.start, min(EARLY_LEAPFROGS, settings.max_leapfrogs), settings.max_leapfrogs)
        tuning = Tuning(
            jnp.exp(state.averaging.log_step), state.scale, adaptation.trajectory_of(state.slowest)
        )
        chains, info, _ = move(settings, self._gradient, words, state.chains, tuning, i, most, self._block)
        averaging = adaptation.average_step(
            state.averaging, info.acceptance.mean(), settings.target_acceptance
        )
        collects, ends = jnp.asarray(plan.collects)[i], jnp.asarray(plan.ends)[i]
        rows = chains.position.T
        added = adaptation.add_positions(state.moments, rows)
        moments = choose(collects, added, state.moments)
        followed = adaptation.follow_slowest(state.slowest, rows, state.scale)
        arrived = adaptation.forget_the_way(followed, rows)
        slowest = choose(
            i == plan.start - 1, arrived, choose(collects | (i < plan.start), followed, state.slowest)
        )
        state = WarmUp(chains, averaging, state.scale, moments, slowest)
        return cast(WarmUp, lax.cond(ends, end_window, lambda state: state, state))

    def tuning(self, state: WarmUp) -> Tuning:
        """What warm-up ends with."""
        settings = self._settings
        step_size = jnp.exp(state.averaging.log_average)
        if settings.leapfrogs is None:
            trajectory = jnp.minimum(
                adaptation.trajectory_of(state.slowest), step_size * settings.max_leapfrogs
            )
        else:
            trajectory = step_size * settings.leapfrogs
        return Tuning(step_size, state.scale, trajectory)

    def empty(self, chains: kernel.State) -> Draws:
        """Room for all draws."""
        samples, dtype = self._settings.samples, chains.position.dtype
        size, count = chains.position.shape
        return Draws(
            jnp.zeros((samples, size, count), dtype),
            jnp.zeros((samples, count), dtype),
            jnp.zeros((samples, count), dtype),
            jnp.zeros((samples, count), bool),
            jnp.zeros(samples, jnp.int32),
        )

    def draw(
        self, state: tuple[kernel.State, Draws], tuning: Tuning, words: Array, start: Array, stop: Array
    ) -> tuple[kernel.State, Draws]:
        """Draws from `start` up to `stop`, each put in its place."""

        def once(i: Array, state: tuple[kernel.State, Draws]) -> tuple[kernel.State, Draws]:
            chains, draws = state
            most = self._settings.max_leapfrogs
            chains, info, steps = move(
                self._settings, self._gradient, words, chains, tuning, i, most, self._block
            )
            diverging = ~(info.energy_change < DIVERGENCE)
            found = Draws(chains.position, chains.log_density, info.acceptance, diverging, steps)
            return chains, Draws(
                *(
                    lax.dynamic_update_index_in_dim(all_, one, i, 0)
                    for all_, one in zip(draws, found, strict=True)
                )
            )

        return cast(tuple[kernel.State, Draws], lax.fori_loop(start, stop, once, state))


def choose(condition: Array, one: Parts, other: Parts) -> Parts:
    return cast(Parts, jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other))


def end_window(state: WarmUp) -> WarmUp:
    """The mass of the window that ends; the step size is sought anew from its average, and positions are forgotten."""
    scale = adaptation.scale_of(state.moments)
    averaging = adaptation.start_averaging(jnp.exp(state.averaging.log_average))
    slowest = adaptation.rescale_slowest(state.slowest, state.scale, scale)
    return WarmUp(state.chains, averaging, scale, adaptation.no_moments(scale), slowest)
