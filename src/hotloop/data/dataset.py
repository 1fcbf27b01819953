"""What a loader hands on: arrays in splits, and where they came from.

The arrays are as the files have them, whole bytes and all; scaling and augmenting belong to the model.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotloop.data.ratings import Ratings


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """Where data came from."""

    name: str
    source: str
    """"files at PATH", or "procedural stand-in"."""
    stand_in: bool = False
    notice: str = ""
    """What must be said first and last in a run on a stand-in; else empty."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images [N, height, width, channels] and a label for each."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset(Loaded):
    """Labelled images of so many classes."""

    classes: int
    train: Split
    test: Split


@dataclass(frozen=True, kw_only=True, eq=False)
class BinaryImages(Loaded):
    """Images [N, 28, 28, 1] of zeros and ones, without labels."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    test: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class RatingSet(Loaded):
    """One table of ratings; how to split it is for the recommender."""

    ratings: Ratings
