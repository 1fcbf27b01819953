"""Stochastic rounding of float32 to bfloat16 or float16, with bits from a hash of each element's place.

A value between two neighbours of the target type goes up with a probability equal to the way it has come,
so that the mean of many roundings is the value. The work is done on the bit patterns: exact values stay,
subnormals are kept, NaN and infinities pass, and a finite value never becomes infinite (it stays at the
largest finite one). It knows nothing of parameters or optimisers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

SIGN = np.uint32(0x8000_0000)
INFINITY = np.uint32(0x7F80_0000)


def stochastic_round(x: Array, dtype: DTypeLike, key: Array, leaf: int = 0) -> Array:
    """Round `x` to `dtype` without bias; the same key and leaf number give the same result.

    Two leaves under one key, or one leaf under two keys, see unrelated bits. To any other type than bfloat16
    and float16 it is a plain cast.
    """
    target = jnp.dtype(dtype)
    if target not in ROUND_MAGNITUDE or x.dtype == target:
        return x.astype(target)
    pattern = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitude = pattern & ~SIGN
    rounded = ROUND_MAGNITUDE[target](magnitude, random_bits(x.shape, key, leaf))
    signed = rounded | ((pattern & SIGN) >> 16)
    return lax.bitcast_convert_type(signed.astype(jnp.uint16), target)


def random_bits(shape: tuple[int, ...], key: Array, leaf: int = 0) -> Array:
    """32 random bits an element: a counter with a step and a start drawn from (key, leaf), then mixed.

    Rounding needs bits that are even and unrelated to the data, no more; threefry's cost about 40 times as
    much (benchmarks/rounding.py).
    """
    start, step = _words(key)
    # Three rounds that keep all 64 bits of the key: no two keys come to the same start and step.
    start ^= _mix(step + jnp.uint32((0x9E37_79B9 * (leaf + 1)) % 2**32))
    step ^= _mix(start)
    start ^= _mix(step)
    return _mix(_place(shape) * (step | 1) + start)  # an odd step: no counter value comes twice


def _words(key: Array) -> tuple[Array, Array]:
    """Two words of a jax key, typed or raw."""
    data = jax.random.key_data(key).reshape(-1)
    return data[0], data[-1]


def _place(shape: tuple[int, ...]) -> Array:
    """The row-major number of each element, made by axis so that a sharded array is not gathered."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return place


def _mix(word: Array) -> Array:
    """Stir a word, invertibly, so that each of its bits reaches every bit of the result."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB_352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846C_A68B)
    return word ^ (word >> 16)


def _bfloat16(magnitude: Array, bits: Array) -> Array:
    """The upper half of a float32: add 16 random bits below it and cut; the carry is the rounding up."""
    rounded = jnp.minimum((magnitude + (bits >> 16)) >> 16, 0x7F7F)
    # A NaN may keep all of its payload in the half that is cut: the quiet bit stops it from turning infinite.
    special = (magnitude >> 16) | jnp.where(magnitude > INFINITY, jnp.uint32(0x40), jnp.uint32(0))
    return jnp.where(magnitude < INFINITY, rounded, special)


def _float16(magnitude: Array, bits: Array) -> Array:
    """Cut 13 bits of the significand, and one more for each power of two below the smallest normal number."""
    exponent = jnp.maximum(magnitude >> 23, 1)  # biased by 127; float32 subnormals vanish in the cut anyway
    significand = (magnitude & 0x7F_FFFF) | 0x80_0000
    below = jnp.maximum(113, exponent) - exponent  # 2^-14 is the smallest normal
    # The cut is at most 31 bits wide: smaller numbers lose low bits first, and below 2^-55 they go to zero.
    significand = significand >> jnp.minimum(jnp.maximum(below, 18) - 18, 31)
    cut = 13 + jnp.minimum(below, 18)
    carried = (significand + (bits >> (32 - cut))) >> cut
    rounded = jnp.minimum(carried + ((jnp.maximum(exponent, 113) - 113) << 10), 0x7BFF)
    special = jnp.where(magnitude > INFINITY, jnp.uint32(0x7E00), jnp.uint32(0x7C00))
    return jnp.where(magnitude < INFINITY, rounded, special)


ROUND_MAGNITUDE = {jnp.dtype(jnp.bfloat16): _bfloat16, jnp.dtype(jnp.float16): _float16}
