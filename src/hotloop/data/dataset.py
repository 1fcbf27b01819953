"""Data sets as arrays in splits: what a loader hands on, and how it is made of a set's files.

The arrays are as the files have them, whole bytes and all; scaling and augmenting belong to the model.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotloop.data.catalogue import SETS
from hotloop.data.image_formats import read_cifar, read_idx
from hotloop.data.local_files import LocalSet, check_file
from hotloop.data.ratings import Ratings
from hotloop.errors import DataError

IMAGE_SETS = {
    "mnist": (60_000, 10_000),
    "fashion_mnist": (60_000, 10_000),
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
}
"""The sets of labelled images, with the numbers of images to train and to test with when they are whole."""
_IDX_CLASSES, _IDX_SIDE = 10, 28
_CIFAR_LABELS = {"cifar10": (10,), "cifar100": (20, 100)}
"""The labels that a record begins with, by their number of names; CIFAR-100 has a coarse and a fine one."""
_VALIDATION_SHARE = 6
"""One in so many training images of a binarised set is kept for validation: of MNIST's 60,000 the last 10,000."""
_BINARISE_BLOCK = 4096
_THRESHOLDS = ((np.arange(256, dtype=np.uint32) * 65536 + 254) // 255).astype(np.uint32)
"""A 16-bit random number is below entry g for a share of g / 255 of them, to the nearest 1 / 65536."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    name: str
    source: str  # "files at PATH", or "procedural stand-in"
    stand_in: bool = False
    notice: str = ""  # what must be said first and last in a run on a stand-in; else empty


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images [N, height, width, channels] and a label for each."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset(Loaded):
    classes: int
    train: LabelledImages
    test: LabelledImages


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


def read_images(found: LocalSet) -> Dataset:
    """The set's images from its files, whole or as much of it as is there; DataError names file and byte."""
    known = found.known
    if known.name in _CIFAR_LABELS:
        labels = _CIFAR_LABELS[known.name]
        test_files = [path for name, path in found.files.items() if name.startswith("test")]
        train_files = [path for path in found.files.values() if path not in test_files]
        train, test = (LabelledImages(*read_cifar(files, labels)) for files in (train_files, test_files))
        classes = labels[-1]
    else:
        smallest = min(known.files, key=lambda file: file.size).name
        same_name = [
            (file, other) for other in SETS.values() for file in other.files if file.name == smallest
        ]
        for file, other in same_name:  # MNIST and Fashion-MNIST share their file names
            path = found.files[smallest]
            if other is not known and check_file(file, path).status == "OK":
                raise DataError(f"{path}: this file belongs to {other.name}, not to {known.name}")
        train, test = (_read_idx_split(found, part) for part in ("train", "t10k"))
        classes = _IDX_CLASSES
    return Dataset(
        name=known.name, source=f"files at {found.folder}", classes=classes, train=train, test=test
    )


def _read_idx_split(found: LocalSet, part: str) -> LabelledImages:
    image_file, label_file = (found.files[f"{part}-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if images.shape[1:] != (_IDX_SIDE, _IDX_SIDE):
        size = " x ".join(map(str, images.shape[1:]))
        raise DataError(f"{image_file}: byte 8: images of {size}, expected {_IDX_SIDE} x {_IDX_SIDE}")
    if len(images) != len(labels):
        raise DataError(
            f"{label_file}: byte 4: {len(labels):,} labels for {len(images):,} images in {image_file}"
        )
    bad = np.flatnonzero(labels >= _IDX_CLASSES)
    if len(bad):
        at, label = int(bad[0]) + 8, int(labels[bad[0]])
        raise DataError(f"{label_file}: byte {at:,}: label {label}, expected 0 to {_IDX_CLASSES - 1}")
    return LabelledImages(images[..., None], labels.astype(np.int32))


def binarise(images: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    """Zeros and ones in the shape of the images: each pixel is 1 with the probability of its greyness.

    The bits depend on the pixel's place and the seed alone, and come from a raw PCG64 stream, which numpy promises
    not to change: the same images give the same bits on every machine.
    """
    stream = np.random.PCG64(seed)
    bits = np.empty(images.shape, np.uint8)
    for start in range(0, len(images), _BINARISE_BLOCK):
        grey = images[start : start + _BINARISE_BLOCK]
        raw = stream.random_raw(-(-grey.size // 4)).astype("<u8").view("<u2")
        bits[start : start + _BINARISE_BLOCK] = raw[: grey.size].reshape(grey.shape) < _THRESHOLDS[grey]
    return bits


def binarise_dataset(grey: Dataset) -> BinaryImages:
    """Grey images made zeros and ones once and for all; the last training images become the validation set."""
    train = binarise(grey.train.images, seed=0)
    keep = len(train) - len(train) // _VALIDATION_SHARE
    return BinaryImages(
        name=grey.name,
        source=grey.source,
        stand_in=grey.stand_in,
        notice=grey.notice,
        train=train[:keep],
        validation=train[keep:],
        test=binarise(grey.test.images, seed=1),
    )
