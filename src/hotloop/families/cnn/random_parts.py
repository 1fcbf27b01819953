"""Random parts of images that stay on the device, cut and resampled there: what `photographs` does on the host.

An own set's images are kept as squares somewhat larger than the network's. The rule of the cut is `random_crop`'s in
continuous numbers, so that nothing has to be drawn twice; resampling is `resample`'s, pixel for pixel. Each sample
draws from its own key, however a batch is split.
"""

from math import sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.families.cnn.photographs import ASPECTS, COVERED


class Parts(NamedTuple):
    """Of each image a part, in pixels, and whether it is mirrored; each [B]."""

    left: Array
    top: Array
    width: Array
    height: Array
    mirrored: Array


def draw_parts(keys: Array, side: int) -> Parts:
    """Parts of squares: aspect 0.75 to 1.33, a tenth to all of the area, anywhere.

    The height is uniform between what gives the least area and what fits, as on the host.
    """

    def draw(key: Array) -> Parts:
        aspect, tall, x, y, mirror = jax.random.uniform(key, (5,))
        aspect = ASPECTS[0] + (ASPECTS[1] - ASPECTS[0]) * aspect
        root = jnp.sqrt(aspect)
        lowest = side * sqrt(COVERED) / root
        highest = side / jnp.maximum(aspect, 1)
        height = lowest + (highest - lowest) * tall
        width = jnp.minimum(height * aspect, side)
        return Parts(x * (side - width), y * (side - height), width, height, mirror < 0.5)

    return jax.vmap(draw)(keys)


def cut_random_parts(images: Array, keys: Array, size: int) -> Array:
    """Squares of bytes [B, S, S, C] -> random parts of them, [B, size, size, C], as bytes."""
    return resample_parts(images, draw_parts(keys, images.shape[1]), size)


def resample_parts(images: Array, parts: Parts, size: int) -> Array:
    """The parts at size x size, bilinear with corners not aligned, truncated to bytes."""
    rows, columns = images.shape[1:3]

    def one(image: Array, part: Parts) -> Array:
        top, bottom, down = _neighbours(part.top, part.height / size, size, rows)
        left, right, across = _neighbours(part.left, part.width / size, size, columns)
        left, right, across = (
            jnp.where(part.mirrored, places[::-1], places) for places in (left, right, across)
        )
        upper, lower = (image[places].astype(jnp.float32) for places in (top, bottom))
        lines = upper + (lower - upper) * down[:, None, None]
        before, after = lines[:, left], lines[:, right]
        return (before + (after - before) * across[None, :, None]).astype(jnp.uint8)

    return jax.vmap(one)(images, parts)


def _neighbours(first: Array, step: Array, size: int, length: int) -> tuple[Array, Array, Array]:
    """Along an axis: the pixels before and after each place, and the weight of the second."""
    at = first + jnp.arange(size, dtype=jnp.float32) * step
    lower = jnp.floor(at)
    place = lower.astype(jnp.int32)
    return jnp.clip(place, 0, length - 1), jnp.clip(place + 1, 0, length - 1), at - lower
