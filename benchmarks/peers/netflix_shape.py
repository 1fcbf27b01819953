"""Made-up ratings of the shapes of the Netflix Prize."""

import numpy as np

from hotloop.data.rating_matrix import RatingMatrix

SHAPES = {
    "3m": (311_315, 17_736, 13_675_402),
    "full": (477_412, 17_768, 98_074_901),
    "small": (20_000, 17_736, 900_000),
}
"""Users, items, ratings, as Netflix has them."""


def made_up(users: int, items: int, count: int) -> RatingMatrix:
    """About `count` ratings: row lengths log-normal, items uniform, without a Python loop over users."""
    rng = np.random.default_rng(0)
    weights = rng.lognormal(0, 1.2, users)
    sizes = np.clip(np.rint(weights / weights.mean() * count / users), 1, items // 2).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    steps = rng.integers(1, 3, starts[-1], dtype=np.uint32)
    running = np.cumsum(steps, dtype=np.uint32)
    inside = running - np.repeat(running[starts[:-1]], sizes)  # ascending in each row, no item twice
    columns = (inside % np.uint32(items)).astype(np.uint16)
    codes = rng.integers(0, 5, starts[-1], dtype=np.uint8)
    return RatingMatrix(
        starts, columns, codes, np.arange(1, 6, dtype=np.float32), np.arange(users), np.arange(items)
    )
