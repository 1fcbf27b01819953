"""Data sets: what is on this machine, fetching with checksums, readers, and procedural stand-ins."""

from hotloop.data.dataset import BinaryImages, Dataset, RatingSet, Split
from hotloop.data.load import binarised, load, load_binarised, load_ratings
from hotloop.data.ratings import Ratings

__all__ = [
    "BinaryImages",
    "Dataset",
    "RatingSet",
    "Ratings",
    "Split",
    "binarised",
    "load",
    "load_binarised",
    "load_ratings",
]
