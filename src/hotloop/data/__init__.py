"""Data sets: what is on this machine, fetching with checksums, readers, and procedural stand-ins."""

from hotloop.data.dataset import BinaryImages, Dataset, LabelledImages, RatingSet, binarise_dataset
from hotloop.data.load import load, load_binarised, load_ratings
from hotloop.data.ratings import Ratings
from hotloop.data.stand_ins import draw_digits

__all__ = [
    "BinaryImages",
    "Dataset",
    "LabelledImages",
    "RatingSet",
    "Ratings",
    "binarise_dataset",
    "draw_digits",
    "load",
    "load_binarised",
    "load_ratings",
]
