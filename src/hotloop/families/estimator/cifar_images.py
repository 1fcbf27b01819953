"""Augmentation of small colour images on the device: whole-pixel shifts and mirroring, bytes in and bytes out.

Every sample draws from a key of its own, so that a batch is augmented alike however it is split. It knows neither
networks nor data sets.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from hotloop.engine.keys import sample_keys

Fill = Literal["edge", "constant"]
REACH: dict[str, tuple[int, Fill]] = {"shift": (3, "edge"), "crop": (4, "constant")}
"""How far each augmentation moves an image, and what comes in from beyond its border: the nearest pixel, or black."""
Batch = dict[str, Any]


@cache
def transform_of(augmentation: str) -> Callable[[Batch, Array], Batch] | None:
    """What an augmentation does to a batch, always the same function; None where it does nothing."""
    return partial(_transformed, *REACH[augmentation]) if augmentation in REACH else None


def _transformed(reach: int, fill: Fill, batch: Batch, key: Array) -> Batch:
    images = batch["features"]
    keys = sample_keys(key, 0, len(images))
    return {**batch, "features": augmented(images, *draws(keys, reach), reach, fill)}


def draws(keys: Array, reach: int) -> tuple[Array, Array, Array]:
    """For each key a row and a column between 0 and 2 `reach`, all as likely, and whether to mirror; [N] each."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
    places = jnp.uint32(2 * reach + 1)
    row, column = (bits[:, 0] >> 16) * places >> 16, (bits[:, 0] & 0xFFFF) * places >> 16
    return row.astype(jnp.int32), column.astype(jnp.int32), bits[:, 1] >> 31 != 0


def augmented(images: Array, row: Array, column: Array, mirrored: Array, reach: int, fill: Fill) -> Array:
    """Images [N, H, W, C] cut at (row, column) out of themselves with a border of `reach` pixels, then mirrored."""
    edges = ((0, 0), (reach, reach), (reach, reach), (0, 0))
    padded = jnp.pad(images, edges, fill)

    def cut(image: Array, y: Array, x: Array) -> Array:
        return lax.dynamic_slice(image, (y, x, 0), images.shape[1:])

    crops = jax.vmap(cut)(padded, row, column)
    return jnp.where(mirrored[:, None, None, None], crops[:, :, ::-1], crops)
