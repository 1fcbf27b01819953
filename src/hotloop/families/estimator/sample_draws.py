"""A random key for a whole batch that draws for each sample by the sample's own key: code that draws once for all, as
the layers of Keras do, then draws the same for every split of the batch. What it draws without a row for each sample (a
mask that all share) comes from the first one's key. It knows nothing of who draws."""

from collections.abc import Hashable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import define_prng_impl


def join_keys(keys: Array) -> Array:
    """One key of the keys of so many samples."""
    data = jax.random.key_data(keys)
    kind = _implementation(*data.shape, str(jax.random.key_impl(keys)))
    joined: Array = jax.random.wrap_key_data(data, impl=kind)
    return joined


@cache
def _implementation(samples: int, words: int, kind: str) -> Hashable:
    def wrap(data: Array) -> Any:
        return jax.random.wrap_key_data(data, impl=kind)

    def seed(number: Array) -> Array:
        first = jax.random.key_data(jax.random.key(number, impl=kind))
        return jnp.broadcast_to(first, (samples, words))

    def split(data: Array, shape: tuple[int, ...]) -> Array:
        parts = jax.vmap(lambda one: jax.random.key_data(jax.random.split(wrap(one), shape)))(data)
        return jnp.moveaxis(parts, 0, len(shape))

    def fold_in(data: Array, number: Any) -> Array:
        folded: Array = jax.vmap(lambda one: jax.random.key_data(jax.random.fold_in(wrap(one), number)))(data)
        return folded

    def random_bits(data: Array, width: int, shape: tuple[int, ...]) -> Array:
        kinds = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}
        if tuple(shape[:1]) != (samples,):
            return jax.random.bits(wrap(data[0]), shape, kinds[width])
        bits: Array = jax.vmap(lambda one: jax.random.bits(wrap(one), shape[1:], kinds[width]))(data)
        return bits

    name = f"hotloop_{samples}_samples_{kind}"
    shape = (samples, words)
    return define_prng_impl(
        key_shape=shape,
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=name,
        tag="rows",
    )
