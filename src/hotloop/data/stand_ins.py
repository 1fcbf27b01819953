"""Sets that are drawn: those that stand in where real data cannot be had, each with the line that says so, and ratings
without any sense. The same seed gives the same set."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.dataset import Dataset, LabelledImages, RatingSet
from hotloop.data.ratings import SCALE, Ratings

SOURCE = "procedural stand-in"
DIGIT_COUNTS = (60_000, 10_000)  # images to train and to test with
OBJECT_COUNTS = (20_000, 4_000)  # fewer than CIFAR has, since drawing them takes time at every start
DIGIT_SIDE = 28
DIGIT_CLASSES = 10
_FIELD = 64  # pixels a side of a distance field: fine enough, under a soft pen, that the nearest one will do
_REACH = 1.5  # half the side of the box that a field covers; further out there is only paper
_SOFTNESS = 0.08  # how far the ink fades at the edge of a stroke
_VERSIONS = 40  # crooked versions of each digit
_DIGIT_BLOCK = 4096
OBJECT_SIDE = 32
_OBJECT_BLOCK = 128  # images drawn together: their planes stay in the cache
_TASTES = 4
_FIRST_SECOND = 874_724_710  # some moment in 1997, when MovieLens-100K begins
Points = NDArray[np.float32]
Plane = NDArray[np.floating[Any]]  # float32
Shape = Callable[[Plane, Plane], Plane]


def stand_in_images(name: str, why: str) -> Dataset:
    if name.startswith("cifar"):
        what, train, test = "objects", *OBJECT_COUNTS
        images, shapes, textures = draw_objects(train + test)
        fine = name == "cifar100"
        labels = shapes * len(TEXTURES) + textures if fine else shapes
        classes = len(SHAPES) * (len(TEXTURES) if fine else 1)
    else:
        what, train, test = "digits", *DIGIT_COUNTS
        images, labels = draw_digits(train + test)
        classes = DIGIT_CLASSES
    return Dataset(
        name=name,
        source=SOURCE,
        stand_in=True,
        notice=_notice(name, f"{train:,} + {test:,} procedural {what}", why),
        classes=classes,
        train=LabelledImages(images[:train], labels[:train]),
        test=LabelledImages(images[train:], labels[train:]),
    )


def stand_in_ratings(name: str, why: str) -> RatingSet:
    ratings = draw_taste_ratings()
    users = len(np.unique(ratings.users))
    notice = _notice(name, f"{len(ratings):,} procedural ratings of {users:,} users", why)
    return RatingSet(name=name, source=SOURCE, stand_in=True, notice=notice, ratings=ratings)


def _notice(name: str, what: str, why: str) -> str:
    return f"STAND-IN DATA: {what}, not {name}, which is not on this machine and cannot be fetched ({why})"


def _arc(x: float, y: float, rx: float, ry: float, start: float, end: float, points: int = 9) -> Points:
    """Points of an elliptic arc, angles in turns, anticlockwise from the right."""
    angle = 2 * np.pi * np.linspace(start, end, points)
    return np.stack([x + rx * np.cos(angle), y - ry * np.sin(angle)], axis=1).astype(np.float32)


def _line(*points: tuple[float, float]) -> Points:
    return np.array(points, np.float32)


def _join(*strokes: Points) -> Points:
    return np.concatenate(strokes)


# Strokes in a box from (-1, -1) at the top left to (1, 1) at the bottom right.
_GLYPHS: tuple[tuple[Points, ...], ...] = (
    (_arc(0, 0, 0.55, 0.9, 0, 1, 17),),
    (_line((-0.35, -0.55), (0.1, -0.9), (0.1, 0.9)),),
    (_join(_arc(0, -0.4, 0.55, 0.5, 0.45, -0.1), _line((-0.55, 0.9), (0.6, 0.9))),),
    (_join(_arc(-0.05, -0.45, 0.5, 0.45, 0.4, -0.25), _arc(-0.05, 0.43, 0.58, 0.47, 0.25, -0.4)),),
    (_line((0.15, -0.9), (-0.6, 0.3), (0.65, 0.3)), _line((0.3, -0.3), (0.3, 0.9))),
    (_join(_line((0.5, -0.9), (-0.4, -0.9), (-0.45, -0.1)), _arc(-0.05, 0.35, 0.58, 0.55, 0.3, -0.4)),),
    (_join(_arc(0.35, 0.1, 0.85, 1.0, 0.27, 0.5, 5), _arc(0, 0.4, 0.5, 0.5, 0.5, 1.5, 13)),),
    (_line((-0.55, -0.85), (0.55, -0.85), (-0.1, 0.9)),),
    (_arc(0, -0.45, 0.42, 0.42, -0.25, 0.75, 13), _arc(0, 0.43, 0.52, 0.46, 0.25, 1.25, 13)),
    (_join(_arc(0, -0.4, 0.5, 0.48, 0.0, 1.0, 13), _line((0.45, 0.2), (0.2, 0.9))),),
)


def draw_digits(count: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """`count` images [N, 28, 28, 1] and their labels: crooked versions of a few pen strokes."""
    rng = np.random.default_rng(seed)
    fields = _draw_fields(rng)
    labels = rng.integers(0, DIGIT_CLASSES, count, dtype=np.int32)
    versions = labels * _VERSIONS + rng.integers(0, _VERSIONS, count, dtype=np.int32)
    images = np.empty((count, DIGIT_SIDE, DIGIT_SIDE, 1), np.uint8)
    axis = np.linspace(-1, 1, DIGIT_SIDE, dtype=np.float32) * 1.4
    pixels = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    for start in range(0, count, _DIGIT_BLOCK):
        version = versions[start : start + _DIGIT_BLOCK]
        block = len(version)
        # Each image turns, slants, stretches and moves in its own way.
        turn, slant = rng.normal(0, 0.19, block), rng.normal(0, 0.24, block)
        wide, high = np.exp(rng.normal(0.05, 0.17, (2, block)))
        cos, sin = np.cos(turn), np.sin(turn)
        to_field = np.stack([wide * cos, high * sin, wide * (slant * cos - sin), high * (cos + slant * sin)])
        matrix = to_field.T.reshape(-1, 2, 2).astype(np.float32)
        shift = rng.normal(0, 0.12, (block, 1, 2)).astype(np.float32)
        # Where a pixel falls in the distance field decides its ink.
        places = (pixels @ matrix + shift) * ((_FIELD - 1) / (2 * _REACH)) + (_FIELD - 1) / 2
        cells = np.clip(np.rint(places), 0, _FIELD - 1).astype(np.int32)
        distance = fields.ravel()[version[:, None] * _FIELD**2 + cells[:, :, 1] * _FIELD + cells[:, :, 0]]
        width, strength = rng.uniform([0.07, 0.7], [0.19, 1.0], (block, 2)).astype(np.float32).T[:, :, None]
        ink = np.clip((width - distance) / _SOFTNESS + 0.5, 0, 1) * strength
        ink += rng.standard_normal(ink.shape, np.float32) * 0.08 * (ink > 0)
        grey = np.rint(255 * np.clip(ink, 0, 1)).reshape(-1, DIGIT_SIDE, DIGIT_SIDE, 1)
        images[start : start + _DIGIT_BLOCK] = grey.astype(np.uint8)
    return images, labels


def _draw_fields(rng: np.random.Generator) -> NDArray[np.float32]:
    """Distance from every point of the box to the nearest stroke: [classes * versions, field * field]."""
    axis = np.linspace(-_REACH, _REACH, _FIELD, dtype=np.float32)
    y, x = (np.ascontiguousarray(each.ravel()) for each in np.meshgrid(axis, axis, indexing="ij"))
    fields = np.full((len(_GLYPHS) * _VERSIONS, x.size), np.inf, np.float32)
    for number, nearest in enumerate(fields):
        for stroke in _GLYPHS[number // _VERSIONS]:
            # Each version of a stroke is bent by a low wave and shaken at its points.
            phase, size = rng.uniform(0, 2 * np.pi, 2), rng.normal(0, 0.17, 2)
            wave = size * np.sin(2.0 * stroke[:, ::-1] + phase)
            bent = (stroke + wave + rng.normal(0, 0.045, stroke.shape)).astype(np.float32)
            for (x0, y0), (dx, dy) in zip(bent[:-1], np.diff(bent, axis=0), strict=True):
                length = max(dx * dx + dy * dy, np.float32(1e-9))
                share = np.clip(((x - x0) * dx + (y - y0) * dy) / length, 0, 1)
                squared = (x - x0 - share * dx) ** 2 + (y - y0 - share * dy) ** 2
                np.minimum(nearest, squared, out=nearest)
    return np.sqrt(fields)


def _radius(u: Plane, v: Plane) -> Plane:
    radius: Plane = np.sqrt(u * u + v * v)  # several times as fast as np.hypot
    return radius


def _box(u: Plane, v: Plane, wide: float, high: float) -> Plane:
    edge: Plane = np.maximum(np.abs(u) - wide, np.abs(v) - high)
    return edge


# Negative inside the shape, positive outside, about a distance near the edge.
_SHAPES: dict[str, Shape] = {
    "disc": lambda u, v: _radius(u, v) - 0.75,
    "square": lambda u, v: _box(u, v, 0.68, 0.68),
    "triangle": lambda u, v: np.maximum(-v - 0.5, 0.87 * np.abs(u) + 0.5 * v - 0.5),
    "ring": lambda u, v: np.abs(_radius(u, v) - 0.62) - 0.2,
    "cross": lambda u, v: np.minimum(_box(u, v, 0.24, 0.85), _box(u, v, 0.85, 0.24)),
    "star": lambda u, v: _radius(u, v) - 0.3 * np.cos(5 * np.arctan2(v, u)) - 0.55,
    "bar": lambda u, v: _box(u, v, 0.95, 0.3),
    "pair": lambda u, v: _radius(np.abs(u) - 0.5, v) - 0.36,
    "crescent": lambda u, v: np.maximum(_radius(u, v) - 0.8, 0.62 - _radius(u - 0.38, v)),
    "frame": lambda u, v: np.abs(_box(u, v, 0.58, 0.58)) - 0.16,
}
# Between -1 and 1.
_TEXTURES: dict[str, Shape] = {
    "plain": lambda u, _: np.zeros_like(u),
    "shaded": lambda u, _: np.clip(u, -1, 1),
    "striped": lambda u, _: np.sin(9 * u),
    "finely striped": lambda u, _: np.sin(17 * u),
    "checked": lambda u, v: np.sign(np.sin(7 * u) * np.sin(7 * v)),
    "dotted": lambda u, v: np.sign(np.cos(10 * u) + np.cos(10 * v) - 0.8),
    "ringed": lambda u, v: np.sin(14 * _radius(u, v)),
    "rayed": lambda u, v: np.sin(6 * np.arctan2(v, u)),
    "wavy": lambda u, v: np.sin(9 * u + 2 * np.sin(6 * v)),
    "two-faced": lambda u, _: np.sign(u),
}
_COLOURS = 0.5 + 0.3 * np.random.default_rng(0).uniform(-1, 1, (3, len(_SHAPES)))  # that each shape prefers
SHAPES, TEXTURES = tuple(_SHAPES), tuple(_TEXTURES)


def draw_objects(count: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32]]:
    """`count` images [N, 32, 32, 3], the number of each one's shape and that of its texture.

    A shape has a colour that it prefers but need not have: single pixels tell a little, edges tell much.
    """
    rng = np.random.default_rng(seed)
    shapes = rng.integers(0, len(SHAPES), count, dtype=np.int32)
    textures = rng.integers(0, len(TEXTURES), count, dtype=np.int32)
    images = np.empty((count, OBJECT_SIDE, OBJECT_SIDE, 3), np.uint8)
    near, far = (np.linspace(-edge, edge, OBJECT_SIDE, dtype=np.float32) for edge in (1.2, 1))
    for start in range(0, count, _OBJECT_BLOCK):
        shape, texture = shapes[start : start + _OBJECT_BLOCK], textures[start : start + _OBJECT_BLOCK]
        block = len(shape)
        # Each pixel in the coordinates of its image's shape: turned, stretched and moved.
        move = rng.normal(0, 0.16, (2, block, 1, 1)).astype(np.float32)
        x, y = near[None, None, :] - move[0], near[None, :, None] - move[1]
        turn = rng.normal(0, 0.35, (block, 1, 1)).astype(np.float32)
        wide, high = np.exp(rng.normal(0.1, 0.2, (2, block, 1, 1))).astype(np.float32)
        cos, sin = np.cos(turn), np.sin(turn)
        u, v = wide * (cos * x + sin * y), high * (cos * y - sin * x)
        inside = np.clip(0.5 - _each(_SHAPES, shape, u, v) * 8, 0, 1)
        preferred = _COLOURS[:, shape] + rng.normal(0, 0.25, (3, block))
        front = _colour(_each(_TEXTURES, texture, u, v), preferred, rng)
        # The background is a wave of any direction and length, from a slow shade to stripes.
        fx, fy, phase = rng.normal(0, [[2.5], [2.5], [3.0]], (3, block)).astype(np.float32)[..., None, None]
        wave: Plane = np.sin(fx * far[None, None, :] + fy * far[None, :, None] + phase)
        back = _colour(wave, rng.uniform(0.2, 0.8, (3, block)), rng)
        front -= back
        front *= inside
        front += back
        pixels = np.clip(255 * front, 0, 255).astype(np.uint8)
        images[start : start + _OBJECT_BLOCK] = pixels.transpose(1, 2, 3, 0)
    return images, shapes, textures


def _each(kinds: dict[str, Shape], chosen: NDArray[np.int32], u: Plane, v: Plane) -> Plane:
    planes = np.empty_like(u)
    for number, kind in enumerate(kinds.values()):
        rows = np.flatnonzero(chosen == number)
        planes[rows] = kind(u[rows], v[rows])
    return planes


def _colour(plane: Plane, middle: NDArray[np.float64], rng: np.random.Generator) -> Plane:
    """Planes [3, N, side, side]: the plane, with some grain, swings about each image's middle colour."""
    grain = rng.standard_normal(plane.shape, np.float32) * 0.3
    swing = rng.uniform(-0.25, 0.25, (3, len(plane), 1, 1)).astype(np.float32)
    return middle[:, :, None, None].astype(np.float32) + swing * (plane + grain)


def draw_random_ratings(users: int, items: int, events: int, seed: int, stream: int = 0) -> Ratings:
    """Uniform ratings (1 to 5) of users and items numbered from 0, to time and to see that nothing is learnt: the best
    prediction is 3 for everything, an RMSE of the square root of 2. Another `stream` of a seed is independent of it."""
    rng = np.random.default_rng([seed, stream])
    return Ratings(
        rng.integers(0, users, events, dtype=np.int32),
        rng.integers(0, items, events, dtype=np.int32),
        rng.integers(1, 6, events, dtype=np.int8).astype(np.float32),
    )


def draw_random_sets(
    users: int = 480_000,
    items: int = 18_000,
    events: int = 13_000_000,
    validation_events: int = 1_000_000,
    seed: int = 0,
) -> tuple[Ratings, Ratings]:
    """Training ratings, and validation ratings of those users and items that have a training rating; the Netflix
    Prize's shape if nothing else is asked for."""
    train = draw_random_ratings(users, items, events, seed)
    drawn = draw_random_ratings(users, items, validation_events, seed, stream=1)
    known = np.isin(drawn.users, train.users) & np.isin(drawn.items, train.items)
    return train, drawn.take(known)


def draw_taste_ratings(users: int = 943, items: int = 1682, count: int = 100_000, seed: int = 0) -> Ratings:
    """About `count` ratings in the order of time, each user and item at most once together; ids begin at 1.

    A few items are rated by many and most by few; users rate more of what they like.
    """
    rng = np.random.default_rng(seed)
    match = rng.normal(size=(users, _TASTES)) @ rng.normal(size=(_TASTES, items)) / np.sqrt(_TASTES)
    leaning = rng.normal(0, 0.35, (users, 1)) + rng.normal(0, 0.4, (1, items))
    scores = 0.6 * match + leaning
    popularity = rng.normal(0, 1.6, items) + 0.6 * scores
    eagerness = rng.lognormal(0, 1, users)
    sizes = np.clip(np.rint(eagerness / eagerness.mean() * count / users), min(20, items), items).astype(int)
    # The largest of Gumbel noise plus log weight are a draw without replacement.
    order = np.argsort(-(popularity + rng.gumbel(size=(users, items))), axis=1)
    user = np.repeat(np.arange(users), sizes)
    item = np.concatenate([order[row, :size] for row, size in enumerate(sizes)])
    noisy = 3.6 + scores[user, item] + rng.normal(0, 0.8, len(user))
    turn = rng.permutation(len(user))
    return Ratings(
        (user[turn] + 1).astype(np.int32),
        (item[turn] + 1).astype(np.int32),
        np.clip(np.rint(noisy), *SCALE)[turn].astype(np.float32),
        _FIRST_SECOND + np.sort(rng.integers(0, 18_000_000, len(user))),
    )
