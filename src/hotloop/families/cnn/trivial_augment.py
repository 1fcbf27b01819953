"""TrivialAugment (Mueller and Hutter, 2021; the wide space): one change of each image, of any strength, drawn evenly.

A change is one of the 14 in `CHANGES`, in one of 31 strengths, to one of two sides. All arithmetic is in whole numbers,
as in pillow (affine maps in 16.16 fixed point, nearest pixels, black outside), so that every device makes the same
bytes; what pillow makes in floats may differ by one level. It knows no keys but to draw from.
"""

import math
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from hotloop.engine.keys import stream

CHANGES = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "auto_contrast", "equalize",
)  # fmt: skip
STRENGTHS = 31
MOST_SHEAR, MOST_PIXELS, MOST_DEGREES, MOST_FACTOR = 0.99, 32, 135, 0.99
ONE = 1 << 16  # of fixed point
GREY = np.array((19595, 38470, 7471), np.int32)  # of red, green and blue, of 65,536; pillow's


class Changes(NamedTuple):
    """For each sample: the number of its change, its strength (0 to 30) and whether to the other side; each [N]."""

    number: Array
    strength: Array
    negative: Array


def draw_changes(keys: Array) -> Changes:
    bits = jax.vmap(lambda key: jax.random.bits(stream(key, "trivial augment", 0), (2,), jnp.uint32))(keys)
    number = (bits[:, 0] >> 16) * jnp.uint32(len(CHANGES)) >> 16
    strength = (bits[:, 0] & 0xFFFF) * jnp.uint32(STRENGTHS) >> 16
    return Changes(number.astype(jnp.int32), strength.astype(jnp.int32), (bits[:, 1] >> 31).astype(jnp.int32))


def change(images_NHWC: Array, drawn: Changes) -> Array:
    """Bytes [N, H, W, C], of one channel or three, each changed as drawn."""
    _, height, width, _ = images_NHWC.shape
    maps = jnp.asarray(affine_maps(height, width))[drawn.number, drawn.strength, drawn.negative]
    x = _map_pixels(images_NHWC, maps).astype(jnp.int32)

    def spread(values: Array) -> Array:
        return values[:, None, None, None]

    sign = 1 - 2 * drawn.negative
    factor = spread(ONE + sign * jnp.asarray(_fixed(MOST_FACTOR * np.arange(STRENGTHS) / 30))[drawn.strength])
    lost = jnp.asarray(np.round(np.arange(STRENGTHS) / 5).astype(np.int32))[drawn.strength]
    # A pixel is below 255 - 8.5 n where twice it is below 510 - 17 n.
    is_bright = 2 * x >= spread(510 - 17 * drawn.strength)
    grey = _to_grey(x)
    made = {
        "brightness": _blend(jnp.zeros_like(x), x, factor),
        "color": _blend(grey, x, factor),
        "contrast": _blend(_mean(grey), x, factor),
        "sharpness": _blend(_smooth(x), x, factor),
        "posterize": x >> spread(lost) << spread(lost),
        "solarize": jnp.where(is_bright, 255 - x, x),
        "auto_contrast": _stretch(x),
        "equalize": _equalise(x),
    }
    for name, values in made.items():
        x = jnp.where(spread(drawn.number == CHANGES.index(name)), values, x)
    return x.astype(jnp.uint8)


def _fixed(values: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.floor(values * ONE + 0.5).astype(np.int32)


@cache
def affine_maps(height: int, width: int) -> NDArray[np.int32]:
    """[14, 31, 2, 6]: a to f of every change, in fixed point: the pixel at (x, y) is the one from (ax + by + c,
    dx + ey + f). Changes of colour leave all where it is."""
    maps = np.zeros((len(CHANGES), STRENGTHS, 2, 6))
    maps[..., 0] = maps[..., 4] = 1
    level = np.arange(STRENGTHS)[:, None] / (STRENGTHS - 1) * np.array((1, -1))
    maps[CHANGES.index("shear_x"), ..., 1] = MOST_SHEAR * level
    maps[CHANGES.index("shear_y"), ..., 3] = MOST_SHEAR * level
    maps[CHANGES.index("translate_x"), ..., 2] = -np.trunc(MOST_PIXELS * level)
    maps[CHANGES.index("translate_y"), ..., 5] = -np.trunc(MOST_PIXELS * level)
    angle, turned = -np.radians(MOST_DEGREES * level), CHANGES.index("rotate")
    cosine, sine = np.cos(angle).round(15), np.sin(angle).round(15)
    across, down = width / 2, height / 2
    rotation = (
        cosine, sine, across - cosine * across - sine * down,
        -sine, cosine, down + sine * across - cosine * down,
    )  # fmt: skip
    maps[turned] = np.stack(rotation, -1)
    # Coordinates are those of the middles of pixels.
    maps[..., 2] += (maps[..., 0] + maps[..., 1]) / 2
    maps[..., 5] += (maps[..., 3] + maps[..., 4]) / 2
    return _fixed(maps)


def _map_pixels(images: Array, maps: Array) -> Array:
    count, height, width, channels = images.shape
    a, b, c, d, e, f = (maps[:, i, None, None] for i in range(6))
    down, across = jnp.arange(height)[:, None], jnp.arange(width)[None]
    column, row = (a * across + b * down + c) >> 16, (d * across + e * down + f) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    places = jnp.where(inside, row * width + column, 0).reshape(count, -1, 1)
    found = jnp.take_along_axis(images.reshape(count, -1, channels), places, 1, mode="promise_in_bounds")
    return jnp.where(inside[..., None], found.reshape(images.shape), 0)


def _blend(without: Array, full: Array, factor: Array) -> Array:
    """What has lost it where the factor is 0, the image where it is 1, and more of it beyond."""
    return jnp.clip((without * ONE + factor * (full - without)) >> 16, 0, 255)


def _to_grey(x: Array) -> Array:
    if x.shape[-1] != len(GREY):
        return x
    return jnp.broadcast_to(((x * GREY).sum(-1, keepdims=True) + ONE // 2) >> 16, x.shape)


def _mean(grey: Array) -> Array:
    """Of each image, rounded."""
    count = math.prod(grey.shape[1:3])
    total = grey[..., :1].sum((1, 2, 3), keepdims=True)
    return jnp.broadcast_to((2 * total + count) // (2 * count), grey.shape)


def _smooth(x: Array) -> Array:
    """Each pixel the mean of its neighbours, itself five times; those at the edges stay."""
    height, width = x.shape[1:3]
    inner = 4 * x[:, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            inner = inner + x[:, row : height - 2 + row, column : width - 2 + column]
    return x.at[:, 1:-1, 1:-1].set((2 * inner + 13) // 26)


def _stretch(x: Array) -> Array:
    """The darkest value of each channel becomes 0, the brightest 255."""
    low, high = x.min((1, 2), keepdims=True), x.max((1, 2), keepdims=True)
    return jnp.where(high > low, (x - low) * 255 // jnp.maximum(high - low, 1), x)


def _equalise(x: Array) -> Array:
    """Each channel's values, in their order, spread so that all ranges have as many pixels."""
    count, height, width, channels = x.shape
    rows = x.reshape(count, height * width, channels)
    samples, layers = jnp.arange(count)[:, None, None], jnp.arange(channels)
    histogram = jnp.zeros((count, 256, channels), jnp.int32).at[samples, rows, layers].add(1)
    brightest = rows.max(1, keepdims=True)
    last = jnp.take_along_axis(histogram, brightest, 1, mode="promise_in_bounds")
    step = (height * width - last) // 255
    below = jnp.cumsum(histogram, 1) - histogram
    table = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
    new = jnp.take_along_axis(table, rows, 1, mode="promise_in_bounds")
    return jnp.where(step > 0, new, rows).reshape(x.shape)
