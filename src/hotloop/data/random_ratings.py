"""Ratings that are drawn: without any sense, in the shape of the Netflix Prize, or by users with a few hidden tastes.

Random ones are for timing, and to see that nothing is learnt: user, item and rating (1 to 5) are each uniform, with
replacement. The best prediction is 3 for everything, an RMSE of the square root of 2.

Those of tastes stand in for MovieLens where there is none. A rating is a mean, what the user and the item add to it,
the match of their tastes and some noise, rounded to 1 to 5. A few items are rated by many and most by few; users
rate more of what they like. The same seed gives the same ratings.
"""

import numpy as np
from numpy.typing import NDArray

from hotloop.data.ratings import SCALE, Ratings

USERS, ITEMS, EVENTS, VALIDATION_EVENTS = 480_000, 18_000, 13_000_000, 1_000_000
_TRAINING, _VALIDATION = 0, 1
TASTES = 4
_FIRST_SECOND = 874_724_710  # some moment in 1997, when MovieLens-100K begins


def draw_random_ratings(
    users: int = USERS, items: int = ITEMS, events: int = EVENTS, seed: int = 0, stream: int = _TRAINING
) -> Ratings:
    """`events` ratings of users and items numbered from 0; another `stream` of a seed is independent of it."""
    rng = np.random.default_rng([seed, stream])
    return Ratings(
        rng.integers(0, users, events, dtype=np.int32),
        rng.integers(0, items, events, dtype=np.int32),
        rng.integers(1, 6, events, dtype=np.int8).astype(np.float32),
    )


def draw_random_sets(
    users: int = USERS,
    items: int = ITEMS,
    events: int = EVENTS,
    validation_events: int = VALIDATION_EVENTS,
    seed: int = 0,
) -> tuple[Ratings, Ratings]:
    """Training ratings, and validation ratings of those users and items that have a training rating."""
    train = draw_random_ratings(users, items, events, seed)
    drawn = draw_random_ratings(users, items, validation_events, seed, _VALIDATION)
    known = np.isin(drawn.users, train.users) & np.isin(drawn.items, train.items)
    return train, drawn.take(known)


def draw_taste_ratings(users: int = 943, items: int = 1682, count: int = 100_000, seed: int = 0) -> Ratings:
    """About `count` ratings in the order of time, each user and item at most once together; ids begin at 1."""
    rng = np.random.default_rng(seed)
    scores = _draw_scores(users, items, rng)
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


def _draw_scores(users: int, items: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """What user and item add to the mean: their own leaning and the match of their tastes."""
    match = rng.normal(size=(users, TASTES)) @ rng.normal(size=(TASTES, items)) / np.sqrt(TASTES)
    leaning = rng.normal(0, 0.35, (users, 1)) + rng.normal(0, 0.4, (1, items))
    scores: NDArray[np.float64] = 0.6 * match + leaning
    return scores
