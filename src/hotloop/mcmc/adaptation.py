"""What warm-up learns: step size by dual averaging, diagonal mass, and the length of trajectories.

All chains share what is learnt, and every chain teaches it: means over the chains take the place of one chain's values.
It is frozen when warm-up ends, so that the draws that are kept are those of plain, valid HMC chains. The windows are
Stan's. Positions here are [chains, z]; nothing knows the target.

Length of trajectories: on a Gaussian a trajectory of length t keeps cos(t / s) of where it began in a direction of
scale s, and of its square cos^2. A leapfrog does most where sin^2(t / s) / t is largest: t = 1.17 s. The slowest
direction, the one of the largest scale once the mass has been divided out, is followed as the chains go (a running
power iteration), and t is `TURN` times its scale. One chain's own history is enough; thousands find it sooner.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

# Hoffman & Gelman 2014, section 3.2, and Stan's defaults, but for GAMMA: Stan's 0.05 follows one chain's acceptance so
# closely that the averaged step ends too short (50 numbers, target 0.80: acceptance 0.90, and 0.84 with 0.1).
GAMMA, OFFSET, KAPPA = 0.1, 10.0, 0.75
START_BUFFER, FIRST_WINDOW, END_BUFFER = 75, 25, 50
SHRINK_COUNT, SHRINK_VARIANCE = 5.0, 1e-3

TURN = 1.1656
"""Mean length of a trajectory in scales of the slowest direction: the root of tan(t) = 2 t."""
PRIOR_WORTH = 5.0
"""Iterations that the first guess of the slowest direction's scale, 1, is worth."""
REMEMBERED = 0.1
"""What a window's iterations are worth in the next one: chains may still have been on their way."""


class Schedule(NamedTuple):
    """For each iteration of warm-up: is it in a window of the mass, and does a window end with it?"""

    collects: Bool[np.ndarray, "warmup"]
    ends: Bool[np.ndarray, "warmup"]
    start: int
    """Iterations before the first window, on the way from the start."""


def schedule(warmup: int) -> Schedule:
    """Stan's: a start, windows that double, and an end for the step size alone; below 20 iterations only that."""
    collects, ends = np.zeros(warmup, bool), np.zeros(warmup, bool)
    start, window, end = START_BUFFER, FIRST_WINDOW, END_BUFFER
    if warmup < 20:
        return Schedule(collects, ends, warmup)
    if warmup < start + window + end:
        start, end = int(0.15 * warmup), int(0.1 * warmup)
        window = warmup - start - end
    place = start
    while place < warmup - end:
        following = place + 3 * window  # where the window after this one would end
        stop = place + window if following <= warmup - end else warmup - end
        ends[stop - 1] = True
        place, window = stop, 2 * window
    collects[start : warmup - end] = True
    return Schedule(collects, ends, start)


class DualAveraging(NamedTuple):
    """The logarithm of the step size that is tried now, of its average, and what moves them."""

    log_step: Float[Array, ""]
    log_average: Float[Array, ""]
    shortfall: Float[Array, ""]
    """Running mean of (target - acceptance)."""
    updates: Float[Array, ""]
    centre: Float[Array, ""]
    """The logarithm toward which steps are drawn: ten times the first one."""


def start_averaging(step_size: Float[Array, ""]) -> DualAveraging:
    log, zero = jnp.log(step_size), jnp.zeros_like(step_size)
    return DualAveraging(log, log, zero, zero, log + math.log(10))


def average_step(
    state: DualAveraging, acceptance: Float[Array, ""], target: float | Float[Array, ""]
) -> DualAveraging:
    """One update of Nesterov's dual averaging toward a mean acceptance of `target`."""
    count = state.updates + 1
    weight = 1 / (count + OFFSET)
    shortfall = (1 - weight) * state.shortfall + weight * (target - acceptance)
    log_step = state.centre - jnp.sqrt(count) / GAMMA * shortfall
    share = count**-KAPPA
    log_average = share * log_step + (1 - share) * state.log_average
    return DualAveraging(log_step, log_average, shortfall, count, state.centre)


class Moments(NamedTuple):
    """Running mean and sum of squared deviations of all chains' positions (Welford, Chan et al.)."""

    seen: Float[Array, ""]
    mean: Float[Array, "z"]
    squares: Float[Array, "z"]


def no_moments(like: Float[Array, "z"]) -> Moments:
    return Moments(jnp.zeros((), like.dtype), jnp.zeros_like(like), jnp.zeros_like(like))


def add_positions(moments: Moments, position: Float[Array, "chains z"]) -> Moments:
    chains = position.shape[0]
    mean = position.mean(0)
    count = moments.seen + chains
    difference = mean - moments.mean
    squares = jnp.square(position - mean).sum(0) + jnp.square(difference) * moments.seen * chains / count
    return Moments(count, moments.mean + difference * chains / count, moments.squares + squares)


def scale_of(moments: Moments) -> Float[Array, "z"]:
    """Standard deviations, shrunk as Stan does: the square root of the inverse mass."""
    variance = moments.squares / jnp.maximum(moments.seen - 1, 1)
    weight = moments.seen / (moments.seen + SHRINK_COUNT)
    return jnp.sqrt(weight * variance + (1 - weight) * SHRINK_VARIANCE)


class Slowest(NamedTuple):
    """The direction of largest variance once each coordinate is divided by its scale, as far as is known."""

    mean: Float[Array, "z"]
    """Of positions, undivided."""
    direction: Float[Array, "z"]
    variance: Float[Array, ""]
    worth: Float[Array, ""]
    """Iterations that all this is worth."""


def guess_slowest(position: Float[Array, "chains z"]) -> Slowest:
    size, dtype = position.shape[1], position.dtype
    # Any direction that no model singles out: a power iteration cannot leave one that is orthogonal to the answer.
    direction = jnp.cos(jnp.arange(1, size + 1, dtype=dtype) ** 2)
    one = jnp.ones((), dtype)
    return Slowest(position.mean(0), direction / jnp.linalg.norm(direction), one, one * PRIOR_WORTH)


def forget_the_way(slowest: Slowest, position: Float[Array, "chains z"]) -> Slowest:
    """Once the chains have come from where they started: their spread on the way says nothing, its direction may."""
    return guess_slowest(position)._replace(direction=slowest.direction)


def follow_slowest(slowest: Slowest, position: Float[Array, "chains z"], scale: Float[Array, "z"]) -> Slowest:
    """One power iteration with the chains' positions; the variance is measured before the direction sees them."""
    count = slowest.worth + 1
    weight = 1 / count
    mean = slowest.mean + weight * (position.mean(0) - slowest.mean)
    away = (position - mean) / scale
    along = away @ slowest.direction
    variance = slowest.variance + weight * (jnp.square(along).mean() - slowest.variance)
    turned = (1 - weight) * slowest.variance * slowest.direction + weight * (along @ away) / along.shape[0]
    length = jnp.linalg.norm(turned)
    direction = jnp.where(length > 0, turned / length, slowest.direction)
    return Slowest(mean, direction, variance, count)


def rescale_slowest(slowest: Slowest, old: Float[Array, "z"], new: Float[Array, "z"]) -> Slowest:
    """The same in coordinates of another scale, for the next window."""
    direction = slowest.direction * old / new
    length = jnp.linalg.norm(direction)
    variance = slowest.variance * jnp.square(length)
    return Slowest(slowest.mean, direction / length, variance, slowest.worth * REMEMBERED)


def trajectory_of(slowest: Slowest) -> Float[Array, ""]:
    return TURN * jnp.sqrt(slowest.variance)
