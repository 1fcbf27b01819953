"""The bodies of the two GPU kernels of `fused`: a leapfrog, and the decision at the end of a trajectory.

Written for one tile of chains, which are columns here, and one block of pixels; how tiles and blocks are laid
over the chains and the image is for `fused`. The mathematics is that of `mcmc.hmc` and `density`.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.mcmc import hmc


def leapfrog(
    kick: float,
    units: tuple[int, int],
    step: Any,
    position: Any,
    momentum: Any,
    force: Any,
    x: Any,
    *refs: Any,
) -> None:
    """Kick by the sum of the parts of the force, drift, and this block's part of the force at the new place.

    With one output more, this block's part of the log density as well.
    """
    w1, b1, w2, b2, w3, b3, new_position, new_momentum, new_force, *value = refs
    size = step[0]  # all is fetched before anything is computed: one wait for the memory, not ten
    q, p, total = position[...], momentum[...], _total(force)
    one, two, three = _fetch(w1, w1.shape[0], units[0]), _fetch(w2, *units), _fetch(w3, units[1], w3.shape[1])
    bias1, bias2, bias3, ones = b1[...], b2[...], b3[...], x[...].astype(jnp.float32)
    first = (pl.program_id(1) == 0).astype(jnp.float32)  # the prior is a part of the first block's
    p = p + (kick * size) * total
    q = q + size * p
    h1 = jnp.maximum(_dot(one, half(q), 0) + bias1[:, None], 0.0)
    h2 = jnp.maximum(_dot(two, half(h1), 0) + bias2[:, None], 0.0)
    logits = _dot(three, half(h2), 0) + bias3[:, None]
    small = jnp.exp(-jnp.abs(logits))
    probability = jnp.where(logits > 0, 1.0, small) / (1.0 + small)
    back = _dot(three, half(ones - probability), 1)
    back = _dot(two, half(jnp.where(h2 > 0, back, 0.0)), 1)
    back = _dot(one, half(jnp.where(h1 > 0, back, 0.0)), 1)
    new_force[0] = back - first * q

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        new_position[...] = q
        new_momentum[...] = p

    if value:
        softplus = jnp.maximum(logits, 0.0) + jnp.log(1.0 + small)
        value[0][0, :] = (ones * logits - softplus).sum(0) - first * 0.5 * (q * q).sum(0)


def decide(constant: float, step: Any, *refs: Any) -> None:
    """The last half kick, energies, and for each chain its old state or the new one."""
    old = hmc.State(*(ref[...] for ref in refs[:3]))
    momentum, position, p, force, values, uniform, *results = refs[3:]
    end = hmc.State(position[...], _total(values) - constant, _total(force))
    p = p[...] + 0.5 * step[0] * end.gradient
    change = hmc.energy(turned(end), p.T) - hmc.energy(turned(old), momentum[...].T)
    kept, info = hmc.metropolis(turned(old), turned(end), change, uniform[...])
    for ref, result in zip(results, (*turned(kept), info.acceptance, info.energy_change), strict=True):
        ref[...] = result


def _fetch(weights: Any, rows: int, columns: int) -> Array:
    """The weights, without reading those that are zero because their unit is not there."""
    if (rows, columns) == weights.shape:
        whole: Array = weights[...]
        return whole
    from jax.experimental.pallas import triton

    there = lax.broadcasted_iota(jnp.int32, weights.shape, 0) < rows
    there &= lax.broadcasted_iota(jnp.int32, weights.shape, 1) < columns
    return triton.load(weights, mask=there, other=0.0)


def _total(parts: Any) -> Array:
    total: Array = parts[0]
    for n in range(1, parts.shape[0]):
        total = total + parts[n]
    return total


def half(array: Array) -> Array:
    """In float16."""
    return array.astype(jnp.float16)


def _dot(weights: Array, columns: Array, axis: int) -> Array:
    """The product over this axis of the weights, summed in float32."""
    return lax.dot_general(weights, columns, (((axis,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def turned(state: hmc.State) -> hmc.State:
    """[chains, z] for [z, chains] and back."""
    return hmc.State(state.position.T, state.log_density, state.gradient.T)
