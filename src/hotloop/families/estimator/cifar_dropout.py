"""Dropout drawn sample by sample: one draw of random bytes from a sample's key serves all of its dropouts.

A byte is enough where a rate is a multiple of 1/256, and what a sample loses depends on its key alone, so that it is
the same however a batch is split. It knows no network.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

LEVELS = 256


def random_bytes(keys: Array, sizes: Sequence[int]) -> list[Array]:
    """For each of the sizes an array [N, size] of uint8, where N samples bring a key each."""
    words = -(-sum(sizes) // 4)
    drawn = jax.vmap(lambda key: jax.random.bits(key, (words,), jnp.uint32))(keys)
    flat = lax.bitcast_convert_type(drawn, jnp.uint8).reshape(len(keys), 4 * words)
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return jnp.split(flat, ends, axis=1)[: len(sizes)]


def dropped(x: Array, drawn: Array, rate: float) -> Array:
    """`x` [N, ...] with a share `rate` of its values zero, the others over `1 - rate`; `drawn` has a byte for each."""
    threshold = round(rate * LEVELS)
    if threshold != rate * LEVELS:
        raise ValueError(f"dropout rate {rate}: must be a multiple of 1/{LEVELS}")
    kept = drawn.reshape(x.shape) >= threshold
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # 4/3 itself would be rounded in 16 bits
    return jnp.where(kept, (wide * (1 / (1 - rate))).astype(x.dtype), 0)
