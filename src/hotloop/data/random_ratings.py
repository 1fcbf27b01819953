"""Ratings without any sense, in the shape of the Netflix Prize: for timing, and to see that nothing is learnt.

User, item and rating (1 to 5) are each uniform, with replacement. The best prediction is 3 for everything, an RMSE
of the square root of 2. Ratings that can be learnt are drawn in `tastes`.
"""

import numpy as np

from hotloop.data.rating_text import Triples

USERS, ITEMS, EVENTS, VALIDATION_EVENTS = 480_000, 18_000, 13_000_000, 1_000_000
_TRAINING, _VALIDATION = 0, 1


def random_ratings(
    users: int = USERS, items: int = ITEMS, events: int = EVENTS, seed: int = 0, stream: int = _TRAINING
) -> Triples:
    """`events` ratings of users and items numbered from 0; another `stream` of a seed is independent of it."""
    rng = np.random.default_rng([seed, stream])
    return Triples(
        rng.integers(0, users, events, dtype=np.int32),
        rng.integers(0, items, events, dtype=np.int32),
        rng.integers(1, 6, events, dtype=np.int8).astype(np.float32),
    )


def random_sets(
    users: int = USERS,
    items: int = ITEMS,
    events: int = EVENTS,
    validation_events: int = VALIDATION_EVENTS,
    seed: int = 0,
) -> tuple[Triples, Triples]:
    """Training ratings, and validation ratings of those users and items that have a training rating."""
    train = random_ratings(users, items, events, seed)
    drawn = random_ratings(users, items, validation_events, seed, _VALIDATION)
    known = np.isin(drawn.users, train.users) & np.isin(drawn.items, train.items)
    return train, drawn.take(known)
