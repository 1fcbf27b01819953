"""Named streams of random keys: who draws what, from nothing but the run's key and a number.

Every draw of a run belongs to a stream ("update", "transform", "init", ...) and a place in it (the update,
the epoch, the sample), so that a resumed run, another number of updates a call or another split of the batch
sees the same numbers. This file knows nothing of what is drawn.
"""

from zlib import crc32

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def stream(key: Array, name: str, n: ArrayLike) -> Array:
    """The key at place `n` (0 <= n < 2**32) of the stream called `name`.

    Folding the name in first keeps streams apart: epoch 3 and update 3 never share a key, which they would if
    both were folded straight into the run's key.
    """
    return jax.random.fold_in(jax.random.fold_in(key, crc32(name.encode())), n)


def sample_keys(key: Array, first: ArrayLike, count: int) -> Array:
    """One key for each of `count` samples, the first of which is number `first` of the global batch.

    A micro-batch or replica that holds samples `first .. first + count - 1` draws what the undivided batch
    would have drawn for them.
    """
    places = jnp.asarray(first, jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
    keys: Array = jax.vmap(jax.random.fold_in, (None, 0))(key, places)
    return keys


def seed_key(seed: int) -> Array:
    """The run's key for a seed of up to 64 bits; `jax.random.key` alone would ignore the upper 32."""
    return jax.random.fold_in(jax.random.key(seed & 0xFFFFFFFF), (seed >> 32) & 0xFFFFFFFF)
