"""Warm-up and draws of all chains as functions to compile: pure, on columns [z, chains], from one iteration to another.

Randomness depends on the number of the iteration alone and nothing on where a loop begins or stops, so that any
number of iterations may be one call. The host's part is sampler.py.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from hotloop.mcmc import adaptation, kernel, random_bits
from hotloop.mcmc.settings import Settings

Parts = TypeVar("Parts")
Numbers = Callable[..., tuple[Array, Array]]
"""`random_bits.momenta_and_uniforms`, or the same where chains are spread over devices."""

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
    """The mean length that trajectories should have, in units of the scale: step sizes times leapfrogs. Draws that
    `jitter` makes longer are cut at `max_leapfrogs`, so that the mean of what is made may be less."""


class WarmUp(NamedTuple):
    """The chains and all that they have taught so far."""

    chains: kernel.State
    averaging: adaptation.DualAveraging
    scale: Float[Array, "z"]
    moments: adaptation.Moments
    slowest: adaptation.Slowest

    @property
    def step(self) -> Float[Array, "z 1"]:
        """What draws would be made with if warm-up ended here."""
        return jnp.exp(self.averaging.log_average) * self.scale[:, None]


class Plan(NamedTuple):
    """What the draws that are kept are made with."""

    step: Float[Array, "z 1"]
    """The step size times the scale."""
    leapfrogs: Int[Array, "samples"]
    """Of each draw. Counted once, so that what is reported is what was done."""


class Drawing(NamedTuple):
    """Between two draws: what all are made with, and what there is."""

    tuning: Tuning
    plan: Plan
    chains: kernel.State
    draws: Float[Array, "samples rows chains"]

    @property
    def step(self) -> Float[Array, "z 1"]:
        return self.plan.step


class Draws(NamedTuple):
    """What is known of every draw."""

    position: Float[Array, "samples z chains"]
    log_density: Float[Array, "samples chains"]
    acceptance: Float[Array, "samples chains"]
    diverging: Bool[Array, "samples chains"]


def pack(chains: kernel.State, info: kernel.Info) -> Float[Array, "rows chains"]:
    """A draw as one array, which is put in its place by one kernel: position, log density, and acceptance.

    A trajectory that diverged has an acceptance of 0 for certain, exp(-1000) or less, and is marked by -1.
    """
    diverging = ~(info.energy_change < DIVERGENCE)
    acceptance = jnp.where(diverging, -1, info.acceptance)
    return jnp.concatenate([chains.position, chains.log_density[None], acceptance[None]])


def unpack(packed: Float[Array, "samples rows chains"]) -> Draws:
    acceptance = packed[:, -1]
    return Draws(packed[:, :-2], packed[:, -2], jnp.maximum(acceptance, 0), acceptance < 0)


def leapfrogs_of(settings: Settings, tuning: Tuning, draw: Array, most: Array | int) -> Int[Array, "..."]:
    """Leapfrogs of all chains in each draw: around their mean by a share of up to `jitter`, evenly spread."""
    mean = settings.leapfrogs or tuning.trajectory / tuning.step_size
    place = (draw.astype(jnp.uint32) * jnp.uint32(GOLDEN)).astype(jnp.float32) * 2.0**-32
    wanted = jnp.minimum(mean * (1 + settings.jitter * (2 * place - 1)), most)
    return jnp.maximum(jnp.round(wanted), 1).astype(jnp.int32)


def move(
    gradient: kernel.ValueAndGradient,
    numbers: Numbers,
    words: Array,
    chains: kernel.State,
    step: Float[Array, "z 1"],
    draw: Array,
    leapfrogs: Array | int,
    block: int,
) -> tuple[kernel.State, kernel.Info]:
    """One draw of every chain."""
    size, count = chains.position.shape
    momentum, uniform = numbers(words, draw, size, count, chains.position.dtype)
    return kernel.transition(gradient, leapfrogs, axis=0, block=block)(chains, momentum, uniform, step)


def find_first_step(
    gradient: kernel.ValueAndGradient, numbers: Numbers, chains: kernel.State, words: Array
) -> Float[Array, ""]:
    """A step size at which one leapfrog is accepted about as often as not: doubled or halved from 1 until it is."""
    size, count = chains.position.shape
    dtype = chains.position.dtype
    momentum, uniform = numbers(words, jnp.uint32(0), size, count, dtype)
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

    def __init__(
        self,
        settings: Settings,
        gradient: kernel.ValueAndGradient,
        block: int = 1,
        numbers: Numbers = random_bits.momenta_and_uniforms,
    ):
        self._settings, self._gradient, self._block, self._numbers = settings, gradient, block, numbers
        self._schedule = adaptation.schedule(settings.warmup)
        self._same_leapfrogs = None if settings.jitter else settings.leapfrogs

    def begin(self, chains: kernel.State, words: Array) -> WarmUp:
        """The chains before the first iteration."""
        position = chains.position
        scale = jnp.ones_like(position[:, 0])
        given = self._settings.step_size
        if given is None:
            step_size = find_first_step(self._gradient, self._numbers, chains, words)
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
        settings, plan = self._settings, self._schedule
        most = jnp.where(i < plan.start, min(EARLY_LEAPFROGS, settings.max_leapfrogs), settings.max_leapfrogs)
        tuning = Tuning(
            jnp.exp(state.averaging.log_step), state.scale, adaptation.trajectory_of(state.slowest)
        )
        leapfrogs = self._same_leapfrogs or leapfrogs_of(settings, tuning, i, most)
        step = tuning.step_size * tuning.scale[:, None]
        chains, info = move(
            self._gradient, self._numbers, words, state.chains, step, i, leapfrogs, self._block
        )
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
        """What warm-up ends with; a draw has its leapfrogs from `leapfrogs_of`."""
        settings = self._settings
        step_size = jnp.exp(state.averaging.log_average)
        if settings.leapfrogs is None:
            trajectory = jnp.minimum(
                adaptation.trajectory_of(state.slowest), step_size * settings.max_leapfrogs
            )
        else:
            trajectory = step_size * settings.leapfrogs
        return Tuning(step_size, state.scale, trajectory)

    def prepare(self, state: WarmUp) -> tuple[Tuning, Plan, Float[Array, "samples rows chains"]]:
        """What warm-up ends with, what follows from it for each draw, and room for all draws."""
        settings, tuning, (size, count) = self._settings, self.tuning(state), state.chains.position.shape
        numbers = jnp.arange(settings.samples, dtype=jnp.int32)
        if self._same_leapfrogs:
            leapfrogs = jnp.full_like(numbers, self._same_leapfrogs)
        else:
            leapfrogs = leapfrogs_of(settings, tuning, numbers, settings.max_leapfrogs)
        room = jnp.zeros((settings.samples, size + 2, count), state.chains.position.dtype)
        return tuning, Plan(tuning.step_size * tuning.scale[:, None], leapfrogs), room

    def draw(
        self, state: tuple[kernel.State, Array], plan: Plan, words: Array, start: Array, stop: Array
    ) -> tuple[kernel.State, Float[Array, "samples rows chains"]]:
        """Draws from `start` up to `stop`, each put in its place."""

        def once(i: Array, state: tuple[kernel.State, Array]) -> tuple[kernel.State, Array]:
            chains, draws = state
            leapfrogs = self._same_leapfrogs or plan.leapfrogs[i]
            chains, info = move(
                self._gradient, self._numbers, words, chains, plan.step, i, leapfrogs, self._block
            )
            # Else a GPU's kernel that keeps the draw makes the decision again, from a copy of what was there before.
            chains, info = lax.optimization_barrier((chains, info))  # type: ignore[no-untyped-call]
            return chains, lax.dynamic_update_index_in_dim(draws, pack(chains, info), i, 0)

        return cast(tuple[kernel.State, Array], lax.fori_loop(start, stop, once, state))


def choose(condition: Array, one: Parts, other: Parts) -> Parts:
    return cast(Parts, jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other))


def end_window(state: WarmUp) -> WarmUp:
    """The mass of the window that ends; the step size is sought anew from its average, and positions are forgotten."""
    scale = adaptation.scale_of(state.moments)
    averaging = adaptation.start_averaging(jnp.exp(state.averaging.log_average))
    slowest = adaptation.rescale_slowest(state.slowest, state.scale, scale)
    return WarmUp(state.chains, averaging, scale, adaptation.no_moments(scale), slowest)
