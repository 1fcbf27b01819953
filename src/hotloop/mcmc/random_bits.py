"""Random numbers of one draw of all chains, by their place: cheap enough for a loop whose body is a few microseconds.

The generator is jax's own, Threefry-2x32 with 20 rounds, as one expression that the compiler fuses. `jax.random` keeps
one word of the two that a call of it makes and writes the rounds as a loop on a CPU: there it takes 2 to 6 times as
long (4,096 chains of 10 numbers: 794 us against 234), longer than the trajectories of a small model. The counter is
(place in the draw, number of the draw), so that no number depends on how the draws are cut into calls.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def threefry(
    key: UInt32[Array, "2"], low: UInt32[Array, "n"], high: UInt32[Array, "n"]
) -> tuple[UInt32[Array, "n"], UInt32[Array, "n"]]:
    """Two random words of each counter (Salmon et al. 2011)."""
    words = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(PARITY)
    low, high = low + words[0], high + words[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            low = low + high
            high = low ^ ((high << rotation) | (high >> (32 - rotation)))
        low, high = low + words[(group + 1) % 3], high + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return low, high


def words_of(key: Array) -> UInt32[Array, "2"]:
    """A key of any of jax's generators as a key of this one."""
    return jax.random.bits(key, (2,), jnp.uint32)


def uniforms(key: UInt32[Array, "2"], draw: Array, count: int, dtype: jnp.dtype) -> Float[Array, "count"]:
    """So many numbers in (0, 1), none of them at an end: odd multiples of half their spacing."""
    calls = count if dtype == jnp.float64 else -(-count // 2)
    low, high = threefry(key, lax.iota(jnp.uint32, calls), jnp.full(calls, draw, jnp.uint32))
    if dtype == jnp.float64:
        whole = (low.astype(jnp.uint64) << 32) | high.astype(jnp.uint64)
        return ((whole >> 12).astype(jnp.float64) + 0.5) * 2.0**-52
    fraction = jnp.concatenate([low, high])[:count] >> 9
    found: Array = (fraction.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return found


def momenta_and_uniforms(
    key: UInt32[Array, "2"], draw: Array, size: int, chains: int, dtype: jnp.dtype
) -> tuple[Float[Array, "size chains"], Float[Array, "chains"]]:
    """What one HMC step of all chains needs: normals [size, chains], and a uniform for each chain's decision."""
    numbers = uniforms(key, draw, chains * (size + 1), dtype)
    normal = jnp.sqrt(jnp.array(2, dtype)) * lax.erf_inv(2 * numbers[chains:] - 1)
    return normal.reshape(size, chains), numbers[:chains]
