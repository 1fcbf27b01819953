"""Procedural digits: 28x28 grey images of pen strokes, the stand-in for MNIST where there is no MNIST.

Each digit is a few strokes. A distance field is drawn for many crooked versions of every digit, and each
image is one of them seen through its own affine map, pen width, ink and noise: learnable, but not trivial.
The same seed gives the same images; none of them is anyone's handwriting.
"""

import numpy as np
from numpy.typing import NDArray

SIDE = 28
CLASSES = 10
_FIELD = 64
"""Pixels a side of a distance field: fine enough, under a soft pen, that the nearest one will do."""
_REACH = 1.5
"""Half the side of the box that a field covers; further out there is only paper."""
_SOFTNESS = np.float32(0.08)
"""How far the ink fades at the edge of a stroke."""
_VERSIONS = 40
"""Crooked versions of each digit."""
_BLOCK = 4096

Points = NDArray[np.float32]


def _arc(x: float, y: float, rx: float, ry: float, start: float, end: float, points: int = 9) -> Points:
    """Points of an elliptic arc, angles in turns, anticlockwise from the right."""
    angle = 2 * np.pi * np.linspace(start, end, points)
    return np.stack([x + rx * np.cos(angle), y - ry * np.sin(angle)], axis=1).astype(np.float32)


def _line(*points: tuple[float, float]) -> Points:
    return np.array(points, np.float32)


# Strokes in a box from (-1, -1) at the top left to (1, 1) at the bottom right.
_GLYPHS: tuple[tuple[Points, ...], ...] = (
    (_arc(0, 0, 0.55, 0.9, 0, 1, 17),),
    (_line((-0.35, -0.55), (0.1, -0.9), (0.1, 0.9)),),
    (np.concatenate([_arc(0, -0.4, 0.55, 0.5, 0.45, -0.1), _line((-0.55, 0.9), (0.6, 0.9))]),),
    (np.concatenate([_arc(-0.05, -0.45, 0.5, 0.45, 0.4, -0.25), _arc(-0.05, 0.43, 0.58, 0.47, 0.25, -0.4)]),),
    (_line((0.15, -0.9), (-0.6, 0.3), (0.65, 0.3)), _line((0.3, -0.3), (0.3, 0.9))),
    (
        np.concatenate(
            [_line((0.5, -0.9), (-0.4, -0.9), (-0.45, -0.1)), _arc(-0.05, 0.35, 0.58, 0.55, 0.3, -0.4)]
        ),
    ),
    (np.concatenate([_arc(0.35, 0.1, 0.85, 1.0, 0.27, 0.5, 5), _arc(0, 0.4, 0.5, 0.5, 0.5, 1.5, 13)]),),
    (_line((-0.55, -0.85), (0.55, -0.85), (-0.1, 0.9)),),
    (_arc(0, -0.45, 0.42, 0.42, -0.25, 0.75, 13), _arc(0, 0.43, 0.52, 0.46, 0.25, 1.25, 13)),
    (np.concatenate([_arc(0, -0.4, 0.5, 0.48, 0.0, 1.0, 13), _line((0.45, 0.2), (0.2, 0.9))]),),
)


def digits(count: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """`count` images [N, 28, 28, 1] and their labels."""
    rng = np.random.default_rng(seed)
    fields = _fields(rng)
    labels = rng.integers(0, CLASSES, count, dtype=np.int32)
    version = labels * _VERSIONS + rng.integers(0, _VERSIONS, count, dtype=np.int32)
    images = np.empty((count, SIDE, SIDE, 1), np.uint8)
    for start in range(0, count, _BLOCK):
        block = slice(start, start + _BLOCK)
        images[block, :, :, 0] = _draw(fields, version[block], rng)
    return images, labels


def _fields(rng: np.random.Generator) -> NDArray[np.float32]:
    """Distance from every point of the box to the nearest stroke: [classes * versions, field * field]."""
    axis = np.linspace(-_REACH, _REACH, _FIELD, dtype=np.float32)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    fields = [
        np.min([_distance(grid, _crooked(stroke, rng)) for stroke in glyph], axis=0)
        for glyph in _GLYPHS
        for _ in range(_VERSIONS)
    ]
    return np.stack(fields)


def _crooked(stroke: Points, rng: np.random.Generator) -> Points:
    """The stroke bent by a low wave and shaken at its points."""
    phase, size = rng.uniform(0, 2 * np.pi, 2), rng.normal(0, 0.17, 2)
    wave = size * np.sin(2.0 * stroke[:, ::-1] + phase)
    return (stroke + wave + rng.normal(0, 0.045, stroke.shape)).astype(np.float32)


def _distance(grid: Points, stroke: Points) -> NDArray[np.float32]:
    """Distance of each grid point to a chain of segments."""
    x, y = np.ascontiguousarray(grid.T)
    nearest = np.full(len(grid), np.inf, np.float32)
    for (x0, y0), (dx, dy) in zip(stroke[:-1], np.diff(stroke, axis=0), strict=True):
        share = np.clip(((x - x0) * dx + (y - y0) * dy) / max(dx * dx + dy * dy, np.float32(1e-9)), 0, 1)
        np.minimum(nearest, (x - x0 - share * dx) ** 2 + (y - y0 - share * dy) ** 2, out=nearest)
    return np.sqrt(nearest)


def _draw(
    fields: NDArray[np.float32], version: NDArray[np.int32], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """One image for each version: where a pixel falls in the distance field decides its ink."""
    count = len(version)
    matrix, shift = _affine(count, rng)
    axis = np.linspace(-1, 1, SIDE, dtype=np.float32) * 1.4
    pixels = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    places = (pixels @ matrix + shift) * ((_FIELD - 1) / (2 * _REACH)) + (_FIELD - 1) / 2
    cells = np.clip(np.rint(places), 0, _FIELD - 1).astype(np.int32)
    distance = fields.ravel()[version[:, None] * _FIELD**2 + cells[:, :, 1] * _FIELD + cells[:, :, 0]]
    width, strength = rng.uniform([0.07, 0.7], [0.19, 1.0], (count, 2)).astype(np.float32).T[:, :, None]
    ink = np.clip((width - distance) / _SOFTNESS + np.float32(0.5), 0, 1) * strength
    ink += rng.standard_normal(ink.shape, np.float32) * np.float32(0.08) * (ink > 0)
    grey: NDArray[np.uint8] = np.rint(255 * np.clip(ink, 0, 1)).astype(np.uint8)
    return grey.reshape(-1, SIDE, SIDE)


def _affine(count: int, rng: np.random.Generator) -> tuple[Points, Points]:
    """Maps from the image to the field: each turns, slants, stretches and moves in its own way."""
    turn, slant = rng.normal(0, 0.19, count), rng.normal(0, 0.24, count)
    wide, high = np.exp(rng.normal(0.05, 0.17, (2, count)))
    cos, sin = np.cos(turn), np.sin(turn)
    matrix = np.stack([wide * cos, high * sin, wide * (slant * cos - sin), high * (cos + slant * sin)])
    shift = rng.normal(0, 0.12, (count, 1, 2))
    return matrix.T.reshape(-1, 2, 2).astype(np.float32), shift.astype(np.float32)
