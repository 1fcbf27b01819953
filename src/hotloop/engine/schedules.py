"""Learning rates as pure functions of the update number: schedule, then warm-up, then staircase.

Evaluating a schedule changes nothing, so logging it or resuming a run cannot move it. Update numbers are counted
as integers (float32 would lose them from 2^24 on) and a decay is computed from the updates that remain, so that
the last rates are as exact as the first. Rates but for `stepped` are given for one sample and grow with the
global batch. It knows no optimiser.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.engine.optim_keys import check_schedule
from hotloop.errors import OptionError

Schedule = Callable[[Array], Array]  # of uint32 update numbers
Params = Mapping[str, Any]
MOST_UPDATES = 2**32 - 2  # update numbers are uint32, and a ramp adds one


def learning_rate(
    name: str,
    params: Params,
    *,
    global_batch_size: int,
    updates_per_epoch: int,
    warmup: Params | None = None,
    staircase: bool = False,
) -> Callable[[Array | int], Array]:
    """The rate (float32) at an update number, which may be traced, or an array of them.

    Parameters name times in epochs; `int(epochs * updates_per_epoch)` updates, as Python truncates, are meant.
    """
    check_schedule(name, params, warmup)
    schedule = SCHEDULES[name](params, global_batch_size, updates_per_epoch)
    rising = delay = 0
    if warmup is not None:
        rising = _updates(warmup, "warmup_epochs", updates_per_epoch, argument="learning_rate: warmup")
        delay = rising if warmup["warmup_mode"] == "shift" else 0

    def rate(update: Array | int) -> Array:
        t = jnp.asarray(update, jnp.uint32)
        if staircase:  # the rate of an epoch's first update holds for the whole epoch
            t = t // jnp.uint32(updates_per_epoch) * jnp.uint32(updates_per_epoch)
        if warmup is None:
            return schedule(t)
        # `shift` starts the schedule after the warm-up, `mask` lets it run from the first update.
        return schedule(t - jnp.minimum(t, jnp.uint32(delay))) * _ramp(t, rising)

    return rate


def _updates(params: Params, key: str, per_epoch: int, *, argument: str = "learning_rate: params") -> int:
    """The epochs under `key` as a number of updates."""
    updates = int(params[key] * per_epoch)
    if updates > MOST_UPDATES:
        raise OptionError(f"{argument}: {key} {params[key]}: more than {MOST_UPDATES} updates")
    return updates


def _decay_updates(params: Params, key: str, per_epoch: int) -> int:
    """As `_updates`, at least 1: a decay has to take some time."""
    if not (updates := _updates(params, key, per_epoch)):
        raise OptionError(
            f"learning_rate: params: {key} {params[key]}: less than one update of {per_epoch} an epoch"
        )
    return updates


def _peak(params: Params, batch: int) -> float:
    return float(params["initial_learning_rate"]) * batch


def _const(params: Params, batch: int, per_epoch: int) -> Schedule:
    rate = _peak(params, batch)
    return lambda t: jnp.full(t.shape, rate, jnp.float32)


def _cosine(params: Params, batch: int, per_epoch: int) -> Schedule:
    """(1 + cos(pi t / T)) / 2, written as sin^2(pi / 2 (T - t) / T): nothing cancels towards the end."""
    peak, total = _peak(params, batch), _decay_updates(params, "epochs_to_total_decay", per_epoch)

    def rate(t: Array) -> Array:
        return peak * lax.integer_pow(jnp.sin(math.pi / 2 * _remaining(t, total) / float(total)), 2)

    return rate


def _stepped(params: Params, batch: int, per_epoch: int) -> Schedule:
    """Value k holds up to and with boundary k."""
    values = np.asarray(params["values"], np.float32)
    boundaries = np.asarray([int(epoch * per_epoch) for epoch in params["boundaries"]], np.uint64)
    boundaries = np.minimum(boundaries, MOST_UPDATES).astype(np.uint32)
    return lambda t: jnp.asarray(values)[(t[..., None] > boundaries).sum(-1)]


def _polynomial(params: Params, batch: int, per_epoch: int) -> Schedule:
    """(L - E) ((T - t) / T)^power + E; its T alone is not truncated to whole updates."""
    peak, power = _peak(params, batch), params["power"]
    end = peak * float(params["end_learning_rate_ratio"])
    whole = _updates(params, "epochs_to_total_decay", per_epoch)
    total = float(params["epochs_to_total_decay"] * per_epoch)

    def rate(t: Array) -> Array:
        left = jnp.where(t > jnp.uint32(whole), 0, _remaining(t, whole) + (total - whole)) / total
        shape: Array = left**power
        return (peak - end) * shape + end

    return rate


def _exponential(params: Params, batch: int, per_epoch: int) -> Schedule:
    """Multiplied by `decay_rate` after every `decay_epochs`, all at once."""
    peak, factor = _peak(params, batch), jnp.float32(params["decay_rate"])
    period = _decay_updates(params, "decay_epochs", per_epoch)
    return lambda t: peak * factor ** (t // jnp.uint32(period)).astype(jnp.float32)


def _one_cycle(params: Params, batch: int, per_epoch: int) -> Schedule:
    """Up in a straight line to the peak, then down to 0, which only the update after the last would have."""
    top = _updates(params, "peak_epoch", per_epoch)
    total = _decay_updates(params, "total_epochs", per_epoch)
    peak, fall = _peak(params, batch), float(max(total - top, 1))

    def rate(t: Array) -> Array:
        return peak * _ramp(t, top) * jnp.minimum(_remaining(t, total) / fall, 1)

    return rate


SCHEDULES: dict[str, Callable[[Params, int, int], Schedule]] = {
    "const": _const,
    "cosine": _cosine,
    "stepped": _stepped,
    "polynomial": _polynomial,
    "exponential": _exponential,
    "one_cycle": _one_cycle,
}


def _remaining(t: Array, total: int) -> Array:
    """Updates from t to `total`, 0 after it; subtracted before they are rounded to float32."""
    left: Array = jnp.uint32(total) - jnp.minimum(t, jnp.uint32(total))
    return left.astype(jnp.float32)


def _ramp(t: Array, updates: int) -> Array:
    """(t + 1) / (updates + 1), from there on 1."""
    return (jnp.minimum(t, jnp.uint32(updates)) + 1).astype(jnp.float32) / float(updates + 1)
