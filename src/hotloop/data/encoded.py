"""One labelled image as it is stored, and what every store of such images offers.

Record sets and image folders answer alike, so that the streaming, the checks and the benchmark know only this.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


def no_boxes() -> NDArray[np.float32]:
    """For an image without annotated objects."""
    return np.empty((0, 4), np.float32)


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image that is not decoded yet."""

    encoded: bytes
    label: int
    """From 0."""
    where: str
    """The file, and the byte where it is one of many: for messages."""
    boxes: NDArray[np.float32] = field(default_factory=no_boxes)
    """[objects, 4]: xmin, ymin, xmax, ymax as shares of width and height."""


class ImageStore(Protocol):
    """Labelled images fetched by number, in any order and from several threads."""

    @property
    def classes(self) -> int:
        """Labels are below this."""

    @property
    def source(self) -> str:
        """Where the images come from, for people."""

    def __len__(self) -> int: ...

    def read(self, number: int) -> EncodedImage:
        """Image `number`; DataError names file and byte."""
