"""Labelled images from the files of a known set: the readers' arrays checked against each other.

It knows which file of which set holds what; the formats are the readers', and finding files is `folders`'s.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data.catalogue import SETS
from hotloop.data.checksum import check
from hotloop.data.cifar import read_cifar
from hotloop.data.dataset import Dataset, Split
from hotloop.data.folders import Found
from hotloop.data.idx import read_idx
from hotloop.data.known import KnownSet
from hotloop.errors import DataError

_IDX_CLASSES, _IDX_SIDE = 10, 28
_CIFAR_LABELS = {"cifar10": (10,), "cifar100": (20, 100)}
"""The labels that a record begins with, by their number of names; CIFAR-100 has a coarse and a fine one."""

IMAGE_SETS = {
    "mnist": (60_000, 10_000),
    "fashion_mnist": (60_000, 10_000),
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
}
"""The sets of labelled images, with the numbers of images to train and to test with when they are whole."""


def read_images(known: KnownSet, found: Found) -> Dataset:
    """The set's images from its files, whole or as much of it as is there."""
    if known.name in _CIFAR_LABELS:
        label_names = _CIFAR_LABELS[known.name]
        train, test = (_cifar_split(known, found, part, label_names) for part in ("train", "test"))
        classes = label_names[-1]
    else:
        _refuse_foreign(known, found)
        train, test = (_idx_split(found, part) for part in ("train", "t10k"))
        classes = _IDX_CLASSES
    return Dataset(
        name=known.name, source=f"files at {found.folder}", classes=classes, train=train, test=test
    )


def _cifar_split(known: KnownSet, found: Found, part: str, label_names: tuple[int, ...]) -> Split:
    names = [file.name for file in known.files if file.name.startswith("test") == (part == "test")]
    return Split(*read_cifar([found.files[name] for name in names if name in found.files], label_names))


def _idx_split(found: Found, part: str) -> Split:
    image_file, label_file = (found.files[f"{part}-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if images.shape[1:] != (_IDX_SIDE, _IDX_SIDE):
        size = " x ".join(map(str, images.shape[1:]))
        raise DataError(f"{image_file}: byte 8: images of {size}, expected {_IDX_SIDE} x {_IDX_SIDE}")
    if len(images) != len(labels):
        raise DataError(
            f"{label_file}: byte 4: {len(labels):,} labels for {len(images):,} images in {image_file}"
        )
    _check_labels(label_file, labels)
    return Split(images[..., None], labels.astype(np.int32))


def _check_labels(path: Path, labels: NDArray[np.uint8]) -> None:
    bad = np.flatnonzero(labels >= _IDX_CLASSES)
    if len(bad):
        at, label = int(bad[0]) + 8, int(labels[bad[0]])
        raise DataError(f"{path}: byte {at:,}: label {label}, expected 0 to {_IDX_CLASSES - 1}")


def _refuse_foreign(known: KnownSet, found: Found) -> None:
    """DataError when the files are those of another set that has the same file names."""
    smallest = min(known.files, key=lambda file: file.size)
    for other in SETS.values():
        for file in other.files:
            if other is not known and file.name == smallest.name:
                path = found.files[file.name]
                if check(file, path).status == "OK":
                    raise DataError(f"{path}: this file belongs to {other.name}, not to {known.name}")
