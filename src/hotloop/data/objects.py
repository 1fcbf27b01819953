"""Procedural objects: 32x32 colour images of textured shapes, the stand-in for CIFAR where there is no CIFAR.

An image shows one of ten shapes with one of ten textures, turned, stretched and moved, over a background of
its own. A shape has a colour that it prefers but need not have, as a frog has: single pixels tell a little,
edges tell much. The same seed gives the same images.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SIDE = 32
_BLOCK = 128
"""Images drawn together: their planes stay in the cache."""

Plane = NDArray[np.float32]
Shape = Callable[[Plane, Plane], Plane]


def _radius(u: Plane, v: Plane) -> Plane:
    radius: Plane = np.sqrt(u * u + v * v)  # several times as fast as np.hypot
    return radius


def _box(u: Plane, v: Plane, wide: float, high: float) -> Plane:
    edge: Plane = np.maximum(np.abs(u) - np.float32(wide), np.abs(v) - np.float32(high))
    return edge


def _star(u: Plane, v: Plane) -> Plane:
    edge: Plane = _radius(u, v) - np.float32(0.3) * np.cos(5 * np.arctan2(v, u)) - np.float32(0.55)
    return edge


# Negative inside the shape, positive outside, about a distance near the edge.
_SHAPES: dict[str, Shape] = {
    "disc": lambda u, v: _radius(u, v) - np.float32(0.75),
    "square": lambda u, v: _box(u, v, 0.68, 0.68),
    "triangle": lambda u, v: np.maximum(
        -v - np.float32(0.5), np.float32(0.87) * np.abs(u) + 0.5 * v - np.float32(0.5)
    ),
    "ring": lambda u, v: np.abs(_radius(u, v) - np.float32(0.62)) - np.float32(0.2),
    "cross": lambda u, v: np.minimum(_box(u, v, 0.24, 0.85), _box(u, v, 0.85, 0.24)),
    "star": _star,
    "bar": lambda u, v: _box(u, v, 0.95, 0.3),
    "pair": lambda u, v: _radius(np.abs(u) - np.float32(0.5), v) - np.float32(0.36),
    "crescent": lambda u, v: np.maximum(
        _radius(u, v) - np.float32(0.8), np.float32(0.62) - _radius(u - np.float32(0.38), v)
    ),
    "frame": lambda u, v: np.abs(_box(u, v, 0.58, 0.58)) - np.float32(0.16),
}

# Between -1 and 1.
_TEXTURES: dict[str, Shape] = {
    "plain": lambda u, _: np.zeros_like(u),
    "shaded": lambda u, _: np.clip(u, -1, 1),
    "striped": lambda u, _: np.sin(9 * u),
    "finely striped": lambda u, _: np.sin(17 * u),
    "checked": lambda u, v: np.sign(np.sin(7 * u) * np.sin(7 * v)),
    "dotted": lambda u, v: np.sign(np.cos(10 * u) + np.cos(10 * v) - np.float32(0.8)),
    "ringed": lambda u, v: np.sin(14 * _radius(u, v)),
    "rayed": lambda u, v: np.sin(6 * np.arctan2(v, u)),
    "wavy": lambda u, v: np.sin(9 * u + 2 * np.sin(6 * v)),
    "two-faced": lambda u, _: np.sign(u),
}

_COLOURS = 0.5 + 0.3 * np.random.default_rng(0).uniform(-1, 1, (3, len(_SHAPES)))
"""The colour that each shape prefers."""

SHAPES, TEXTURES = tuple(_SHAPES), tuple(_TEXTURES)


def objects(count: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32]]:
    """`count` images [N, 32, 32, 3], the number of each one's shape and that of its texture."""
    rng = np.random.default_rng(seed)
    shapes = rng.integers(0, len(SHAPES), count, dtype=np.int32)
    textures = rng.integers(0, len(TEXTURES), count, dtype=np.int32)
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    for start in range(0, count, _BLOCK):
        block = slice(start, start + _BLOCK)
        images[block] = _draw(shapes[block], textures[block], rng)
    return images, shapes, textures


def _draw(
    shapes: NDArray[np.int32], textures: NDArray[np.int32], rng: np.random.Generator
) -> NDArray[np.uint8]:
    count = len(shapes)
    u, v = _coordinates(count, rng)
    inside = np.clip(np.float32(0.5) - _each(_SHAPES, shapes, u, v) * np.float32(8), 0, 1)
    preferred = _COLOURS[:, shapes] + rng.normal(0, 0.25, (3, count))
    front = _coloured(_each(_TEXTURES, textures, u, v), preferred, rng)
    back = _coloured(_background(count, rng), rng.uniform(0.2, 0.8, (3, count)), rng)
    front -= back
    front *= inside
    front += back
    pixels: NDArray[np.uint8] = np.clip(255 * front, 0, 255).astype(np.uint8)
    return pixels.transpose(1, 2, 3, 0)


def _coordinates(count: int, rng: np.random.Generator) -> tuple[Plane, Plane]:
    """Each pixel in the coordinates of its image's shape: turned, stretched and moved."""
    axis = np.linspace(-1.2, 1.2, SIDE, dtype=np.float32)
    move = rng.normal(0, 0.16, (2, count, 1, 1)).astype(np.float32)
    x, y = axis[None, None, :] - move[0], axis[None, :, None] - move[1]
    turn = rng.normal(0, 0.35, (count, 1, 1)).astype(np.float32)
    wide, high = np.exp(rng.normal(0.1, 0.2, (2, count, 1, 1))).astype(np.float32)
    cos, sin = np.cos(turn), np.sin(turn)
    return wide * (cos * x + sin * y), high * (cos * y - sin * x)


def _each(kinds: dict[str, Shape], chosen: NDArray[np.int32], u: Plane, v: Plane) -> Plane:
    """The chosen kind's plane for each image."""
    planes = np.empty_like(u)
    for number, kind in enumerate(kinds.values()):
        rows = np.flatnonzero(chosen == number)
        planes[rows] = kind(u[rows], v[rows])
    return planes


def _background(count: int, rng: np.random.Generator) -> Plane:
    """A wave of any direction and length in each image, from a slow shade to stripes."""
    axis = np.linspace(-1, 1, SIDE, dtype=np.float32)
    fx, fy, phase = rng.normal(0, [[2.5], [2.5], [3.0]], (3, count)).astype(np.float32)[..., None, None]
    wave: Plane = np.sin(fx * axis[None, None, :] + fy * axis[None, :, None] + phase)
    return wave


def _coloured(plane: Plane, middle: NDArray[np.float64], rng: np.random.Generator) -> Plane:
    """Planes [3, N, side, side]: the plane, with some grain, swings about each image's middle colour."""
    grain = rng.standard_normal(plane.shape, np.float32) * np.float32(0.3)
    swing = rng.uniform(-0.25, 0.25, (3, len(plane), 1, 1)).astype(np.float32)
    return middle[:, :, None, None].astype(np.float32) + swing * (plane + grain)
