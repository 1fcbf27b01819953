"""What a worker does: fill a part of a batch with decoded photographs. Plain data, so that any process can do it.

An image or record that is broken stops the run with its file and position, or, when asked for, in training its place
is taken by the next image that is whole, and in validation it is marked as missing. It must not know about threads,
processes or batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.image_stores import ImageStore
from hotloop.data.jpeg import ImageError
from hotloop.errors import DataError
from hotloop.families.cnn.photographs import (
    SIZE,
    evaluation_image,
    generator_for,
    in_bytes,
    in_floats,
    training_image,
)

MISSING = -1
"""The label of an image that could not be read and was not replaced."""
_IN_A_ROW = 100
"""So many broken images one after the other are no accident."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Which images, and how they become pixels."""

    store: ImageStore
    training: bool
    seed: int = 0
    size: int = SIZE
    eight_bit: bool = True
    reduced: bool = True
    skip_corrupt: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the pixels: bytes, or floats of the same range that are not truncated."""
        return np.dtype(np.uint8 if self.eight_bit else np.float32)

    def fill(self, images: NDArray[Any], numbers: Iterable[int], epochs: Iterable[int]) -> "Filled":
        """Put image `numbers[i]`, as epoch `epochs[i]` sees it, into images[i]."""
        labels: list[int] = []
        skipped: list[str] = []
        for place, (number, epoch) in enumerate(zip(numbers, epochs, strict=True)):
            images[place], label = self._whole_image(int(number), int(epoch), skipped)
            labels.append(label)
        return Filled(np.array(labels, np.int32), tuple(skipped))

    def image(self, number: int, epoch: int = 0) -> tuple[NDArray[Any], int]:
        """Pixels and label of one image; DataError when it is broken."""
        return self._image(number, generator_for(self.seed, epoch, number))

    def _image(self, number: int, generator: np.random.Generator) -> tuple[NDArray[Any], int]:
        encoded = self.store.read(number)
        resize = in_bytes if self.eight_bit else in_floats
        try:
            if self.training:
                pixels = training_image(encoded, generator, self.size, resize, reduced=self.reduced)
            else:
                pixels = evaluation_image(encoded, self.size, resize)
        except ImageError as error:
            raise DataError(f"{encoded.where}: corrupt image ({error})") from None
        return pixels, encoded.label

    def _whole_image(self, number: int, epoch: int, skipped: list[str]) -> tuple[Any, int]:
        """The image; if it is broken and may be, in training one of the next, in validation none."""
        for step in range(_IN_A_ROW if self.training else 1):
            try:
                return self.image((number + step) % len(self.store), epoch)
            except DataError as error:
                if not self.skip_corrupt:
                    raise
                skipped.append(str(error))
        if not self.training:
            return 0, MISSING
        raise DataError(f"{skipped[-1]}; {_IN_A_ROW} broken images in a row: the set is unusable")


@dataclass(frozen=True, eq=False)
class Filled:
    """Labels of the images that were put in place, and what was said of those that were skipped."""

    labels: NDArray[np.int32]
    skipped: tuple[str, ...]
