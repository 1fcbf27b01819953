"""Max pooling that remembers where each window's largest value was, and its gradient from those places, each one pass.

XLA's own gradient on a GPU writes four numbers of 32 bits for every window and scatters by them. Here a window's place
is one byte, found with the largest value itself, and every pixel looks at the few windows that reach it: nothing is
scattered, so that both passes are loops that XLA fuses with what lies before and after them. It knows pixels and
windows alone: `conv.py` says on which platforms this is the way.
"""

from collections.abc import Iterator
from itertools import product

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def find_largest(x_NHWC: Array, size: int, stride: int, padding: int) -> tuple[Array, Array]:
    """The largest value of each whole window, and the number of its first pixel with it, counted row by row."""
    edge = (padding, padding, 0)
    padded = lax.pad(x_NHWC, np.array(-np.inf, x_NHWC.dtype), [(0, 0, 0), edge, edge, (0, 0, 0)])
    ends = [(length - size) // stride * stride + 1 for length in padded.shape[1:3]]
    largest: Array = jnp.full((), -np.inf, x_NHWC.dtype)
    place: Array = jnp.zeros((), np.min_scalar_type(size * size))
    for number, (i, j) in enumerate(product(range(size), repeat=2)):
        value = padded[:, i : i + ends[0] : stride, j : j + ends[1] : stride]
        place = jnp.where(value > largest, place.dtype.type(number), place)
        largest = jnp.maximum(largest, value)
    return largest, place


def give_to_largest(
    place: Array, dy: Array, image: tuple[int, int], size: int, stride: int, padding: int
) -> Array:
    """The gradient in an image of so many rows and columns: each pixel's sum over the windows whose largest it is."""
    blocks = [-(-(length + padding) // stride) for length in image]
    further = -(-size // stride) - 1  # windows that begin before it a pixel may lie in, beside the last one
    edges = [(further, count - windows, 0) for count, windows in zip(blocks, dy.shape[1:3], strict=True)]
    filled = [
        lax.pad(array, np.zeros((), array.dtype), [(0, 0, 0), *edges, (0, 0, 0)]) for array in (place, dy)
    ]

    def at_pixels(array: Array, back: tuple[int, int]) -> Array:
        """For each pixel, what the window so many before its last one has."""
        starts = [further - steps for steps in back]
        rows, columns = (slice(start, start + count) for start, count in zip(starts, blocks, strict=True))
        part = array[:, rows, columns][:, :, None, :, None]
        shape = (len(array), blocks[0], stride, blocks[1], stride, array.shape[-1])
        whole = jnp.broadcast_to(part, shape).reshape(
            len(array), blocks[0] * stride, blocks[1] * stride, array.shape[-1]
        )
        return whole[:, padding : padding + image[0], padding : padding + image[1]]

    total: Array = jnp.zeros((), dy.dtype)
    for back, numbers in _numbers_in_windows(image, size, stride, padding):
        mine = numbers.astype(place.dtype)[None, :, :, None]
        total += jnp.where(at_pixels(filled[0], back) == mine, at_pixels(filled[1], back), 0)
    return total


def _numbers_in_windows(
    image: tuple[int, int], size: int, stride: int, padding: int
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Windows back from each pixel's last one, by rows and columns, and each pixel's number there: size * size, which
    no place has, where it lies beyond the window."""
    further = -(-size // stride) - 1
    for back in product(range(further + 1), range(further + 1)):
        down, right = (
            np.arange(padding, padding + length) % stride + stride * steps
            for length, steps in zip(image, back, strict=True)
        )
        inside = (down[:, None] < size) & (right[None] < size)
        if inside.any():
            yield back, np.where(inside, down[:, None] * size + right[None], size * size)
