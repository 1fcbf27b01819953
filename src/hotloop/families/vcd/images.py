"""The family's data: black and white images as rows of 784 zeros and ones, by name or from a folder.

MNIST is binarised once and for all (the published bits where their files are), Fashion-MNIST by a threshold at
one half, as the paper's authors have it, and procedural digits stand in where there is nothing. It knows files
and splits, no model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data import binarise_dataset, load_binarised
from hotloop.data import load as load_grey
from hotloop.data.fetch import Progress, no_progress
from hotloop.data.load import to_stderr
from hotloop.data.stand_ins import stand_in_images
from hotloop.errors import DataError
from hotloop.options.declare import expand_path

Bits = NDArray[np.uint8]
NAMES = ("binarised_mnist", "mnist", "fashion_mnist", "digits")
PIXELS = 784
HELD_OUT = 10_000
"""Training images held out under --validation, of a small set at most a fifth."""


@dataclass(frozen=True, eq=False)
class Images:
    """Rows of 784 zeros and ones, and where they came from."""

    name: str
    source: str
    train: Bits
    validation: Bits
    test: Bits
    notice: str = ""

    def held_out(self) -> "Images":
        """Validation images taken off the end of the training images, as the old program's -v did."""
        keep = len(self.train) - min(HELD_OUT, len(self.train) // 5)
        return Images(self.name, self.source, self.train[:keep], self.train[keep:], self.test, self.notice)


def load_images(
    name: str, say: Callable[[str], None] = to_stderr, progress: Progress = no_progress
) -> Images:
    """The set of that name, or of a folder that holds the files of binarised MNIST, MNIST or Fashion-MNIST."""
    folder = None if name in NAMES else _find_folder(name)
    if name == "digits":
        loaded: Any = binarise_dataset(stand_in_images("digits", "asked for"))
        say(
            f"data: {len(loaded.train):,} + {len(loaded.test):,} digits drawn here, as asked: not handwriting"
        )
    elif name == "fashion_mnist" or (folder and "fashion" in folder.name.lower()):
        name, loaded = "fashion_mnist", load_grey("fashion_mnist", folder, say, progress)
    else:
        name, loaded = "binarised_mnist" if folder else name, load_binarised(folder, say, progress)
    if name == "fashion_mnist":  # its validation images are only those that a run holds out
        train, test = ((split.images > 127).astype(np.uint8) for split in (loaded.train, loaded.test))
        splits = train, train[:0], test
    else:
        splits = loaded.train, loaded.validation, loaded.test
    train, validation, test = (split.reshape(len(split), PIXELS) for split in splits)
    notice = "" if name == "digits" else loaded.notice
    return Images(name, loaded.source, train, validation, test, notice)


def make_lasting(name: str) -> str:
    """The name, or the folder by a path that means the same from everywhere: the run's records keep it."""
    return name if name in NAMES else str(expand_path(name).absolute())


def _find_folder(name: str) -> Path:
    try:
        folder = expand_path(name)
    except ValueError as error:
        raise DataError(f"--data {name}: {error}") from None
    if not folder.exists():
        raise DataError(f"--data {folder}: neither a set ({', '.join(NAMES)}) nor a folder that exists")
    if not folder.is_dir():
        raise DataError(f"--data {folder}: must be the folder that holds the files, not one of them")
    return folder
