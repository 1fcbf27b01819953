"""The procedural sets that run where real data cannot be had, each with the line that says so.

Which stand-in is for which set, and how large it is; how they are drawn is for `digits`, `objects` and `tastes`.
"""

import numpy as np

from hotloop.data.dataset import Dataset, RatingSet, Split
from hotloop.data.digits import CLASSES, digits
from hotloop.data.objects import SHAPES, TEXTURES, objects
from hotloop.data.tastes import tastes

SOURCE = "procedural stand-in"
DIGITS = (60_000, 10_000)
OBJECTS = (20_000, 4_000)
"""Images to train and to test with; fewer objects than CIFAR has, since drawing them takes time at every start."""


def stand_in_images(name: str, why: str, seed: int = 0) -> Dataset:
    """Digits for MNIST and Fashion-MNIST, objects for CIFAR."""
    if name.startswith("cifar"):
        what, train, test = "objects", *OBJECTS
        images, shapes, textures = objects(train + test, seed)
        fine = name == "cifar100"
        labels = shapes * len(TEXTURES) + textures if fine else shapes
        classes = len(SHAPES) * (len(TEXTURES) if fine else 1)
    else:
        what, train, test = "digits", *DIGITS
        images, labels = digits(train + test, seed)
        classes = CLASSES
    return Dataset(
        name=name,
        source=SOURCE,
        stand_in=True,
        notice=_notice(name, f"{train:,} + {test:,} procedural {what}", why),
        classes=classes,
        train=Split(images[:train], labels[:train]),
        test=Split(images[train:], labels[train:]),
    )


def stand_in_ratings(name: str, why: str, seed: int = 0) -> RatingSet:
    """Ratings of users with hidden tastes for MovieLens."""
    ratings = tastes(seed=seed)
    users = len(np.unique(ratings.users))
    notice = _notice(name, f"{len(ratings):,} procedural ratings of {users:,} users", why)
    return RatingSet(name=name, source=SOURCE, stand_in=True, notice=notice, ratings=ratings)


def _notice(name: str, what: str, why: str) -> str:
    return f"STAND-IN DATA: {what}, not {name}, which is not on this machine and cannot be fetched ({why})"
