"""The family's data: black and white images as rows of 784 zeros and ones, by name or from a folder."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data import BinaryImages, Dataset, binarise_dataset, load_binarised
from hotloop.data import load as load_grey
from hotloop.data.stand_ins import stand_in_images
from hotloop.engine.loading import load_once
from hotloop.engine.progress import Console
from hotloop.errors import DataError
from hotloop.families.vcd.config import PIXELS
from hotloop.options import expand_path

Bits = NDArray[np.uint8]
NAMES = ("binarised_mnist", "mnist", "fashion_mnist", "digits")
HELD_OUT = 10_000  # training images held out under --validation, of a small set at most a fifth


@dataclass(frozen=True, eq=False)
class Images:
    """Rows of 784 zeros and ones, and where they came from."""

    name: str
    source: str
    train: Bits
    validation: Bits
    test: Bits
    notice: str = ""
    origin: str = ""
    """The name that was asked for, or the folder by a path that means the same from everywhere."""


def load_images(name: str, console: Console, *, hold_out: bool = False) -> Images:
    """The set of that name, or of a folder that holds the files of binarised MNIST, MNIST or Fashion-MNIST.

    To hold out is to take the validation images off the end of the training images, as the old program's -v did.
    """
    folder, origin = None, name
    if name not in NAMES:
        try:
            folder = expand_path(name)
        except ValueError as error:
            raise DataError(f"--data {name}: {error}") from None
        if not folder.exists():
            raise DataError(f"--data {folder}: neither a set ({', '.join(NAMES)}) nor a folder that exists")
        if not folder.is_dir():
            raise DataError(f"--data {folder}: must be the folder that holds the files, not one of them")
        origin = str(folder.absolute())
        name = "fashion_mnist" if "fashion" in folder.name.lower() else "binarised_mnist"
    with console.progress("loading images"):
        if name == "digits":
            loaded: Any = binarise_dataset(stand_in_images("digits", "asked for"))
            console.say(
                f"data: {len(loaded.train):,} + {len(loaded.test):,} digits drawn here, as asked: not handwriting"
            )
        elif name == "fashion_mnist":
            loaded = load_once(partial(load_grey, name, folder, console.say, console.progress), Dataset)
        else:
            loaded = load_once(partial(load_binarised, folder, console.say, console.progress), BinaryImages)
    if name == "fashion_mnist":  # by the authors' threshold; only a run holds validation images out
        train, test = ((split.images > 127).astype(np.uint8) for split in (loaded.train, loaded.test))
        splits = train, train[:0], test
    else:
        splits = loaded.train, loaded.validation, loaded.test
    train, validation, test = (split.reshape(len(split), PIXELS) for split in splits)
    if hold_out:
        keep = len(train) - min(HELD_OUT, len(train) // 5)
        train, validation = train[:keep], train[keep:]
    notice = "" if name == "digits" else loaded.notice
    return Images(name, loaded.source, train, validation, test, notice, origin)
