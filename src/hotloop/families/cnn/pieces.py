"""All pieces that networks are made of, in one place to import from."""

from hotloop.families.cnn.piece import Leaves, Piece, Plain, Shape
from hotloop.families.cnn.plain_pieces import Add, Flatten, MaxPool, MeanPool, PadShortcut, Relu
from hotloop.families.cnn.weighted_pieces import BatchNorm, Conv, GroupNorm, Logits

__all__ = [
    "Add",
    "BatchNorm",
    "Conv",
    "Flatten",
    "GroupNorm",
    "Leaves",
    "Logits",
    "MaxPool",
    "MeanPool",
    "PadShortcut",
    "Piece",
    "Plain",
    "Relu",
    "Shape",
]
