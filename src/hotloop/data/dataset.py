"""Data sets as arrays in splits, and the files that they come in: idx (MNIST), CIFAR's binary version, .amat. The
arrays are as the files have them, whole bytes and all; a part of a set is as good as the full set."""

import io
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data.catalogue import SETS
from hotloop.data.content import LARGEST, Content, read_content
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
_UNSIGNED_BYTES = 0x08  # idx has types for signed and wider numbers, too; no set uses them
_CHUNK = 1 << 20
_CIFAR_LABELS = {"cifar10": (10,), "cifar100": (20, 100)}
"""The labels that a record begins with, by their number of names; CIFAR-100 has a coarse and a fine one."""
_CIFAR_SHAPE = (3, 32, 32)
_AMAT_SIDE = 28
_AMAT_PIXELS = _AMAT_SIDE * _AMAT_SIDE
_VALIDATION_SHARE = 6  # one in so many training images of a binarised set: of MNIST's 60,000 the last 10,000
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
    images: NDArray[np.uint8]  # [N, height, width, channels]
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
    train: NDArray[np.uint8]  # [N, 28, 28, 1] of zeros and ones
    validation: NDArray[np.uint8]
    test: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class RatingSet(Loaded):
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
        path = found.files[smallest]
        for other in SETS.values():  # MNIST and Fashion-MNIST share their file names
            same = [file for file in other.files if file.name == smallest and other is not known]
            if any(check_file(file, path).status == "OK" for file in same):
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


def read_idx(path: str | Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file (magic number, dimensions, bytes); read-only, since it is the file's own bytes."""
    path = Path(path)
    with closing(Content(path)) as file:
        header = 4 + 4 * dimensions
        head = file.read(header)
        if len(head) < header:
            raise DataError(f"{path}: byte {len(head):,}: the file ends inside its header of {header} bytes")
        magic, expected = int.from_bytes(head[:4], "big"), _UNSIGNED_BYTES << 8 | dimensions
        if magic != expected:
            raise DataError(
                f"{path}: byte 0: magic number 0x{magic:08x}, expected 0x{expected:08x} "
                f"(unsigned bytes in {dimensions} dimensions)"
            )
        shape = tuple(int(n) for n in np.frombuffer(head, ">u4", dimensions, offset=4))
        by = " x ".join(f"{n:,}" for n in shape)
        needed = math.prod(shape)
        if needed > LARGEST:
            raise DataError(f"{path}: byte 4: {by} values, at most {LARGEST:,} are read")
        pieces = []
        while piece := file.read(
            min(_CHUNK, header + needed - file.position)
        ):  # what is not there is not allocated
            pieces.append(piece)
        data = b"".join(pieces)
        if len(data) < needed:
            raise DataError(
                f"{path}: byte {file.position:,}: the file ends here, but {by} values need {header + needed:,} bytes"
            )
        if file.read(1):
            raise DataError(f"{path}: byte {header + needed:,}: the file goes on after {by} values")
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_cifar(
    paths: Sequence[str | Path], label_names: Sequence[int]
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Images [N, 32, 32, 3] and labels of the files together; a record begins with one byte for each entry of
    `label_names`, the number of names of that label, and the last label is the one that counts."""
    record = len(label_names) + math.prod(_CIFAR_SHAPE)
    tables = []
    for path in paths:
        data = read_content(path)
        if not data or len(data) % record:
            at = len(data) // record * record
            raise DataError(f"{path}: byte {at:,}: {len(data):,} bytes are not whole records of {record:,}")
        table = np.frombuffer(data, np.uint8).reshape(-1, record)
        for place, names in enumerate(label_names):
            bad = np.flatnonzero(table[:, place] >= names)
            if len(bad):
                at, label = int(bad[0]) * record + place, int(table[bad[0], place])
                raise DataError(f"{path}: byte {at:,}: label {label}, expected 0 to {names - 1}")
        tables.append(table)
    channels, height, width = _CIFAR_SHAPE
    images = np.empty((sum(map(len, tables)), height, width, channels), np.uint8)
    labels = np.empty(len(images), np.int32)
    start = 0
    for table in tables:
        part = slice(start, start := start + len(table))
        planes = table[:, len(label_names) :].reshape(-1, *_CIFAR_SHAPE)
        for channel in range(channels):  # three strided copies: twice as fast as one transposed copy
            images[part, :, :, channel] = planes[:, channel]
        labels[part] = table[:, len(label_names) - 1]
    return images, labels


def read_amat(path: str | Path) -> NDArray[np.uint8]:
    """Images [N, 28, 28, 1] of zeros and ones, from text with one image a line."""
    path = Path(path)
    data = read_content(path)
    pixels = separators = np.empty((0, _AMAT_PIXELS), np.uint8)
    if len(data) % (2 * _AMAT_PIXELS) == 0:
        table = np.frombuffer(data, np.uint8).reshape(-1, _AMAT_PIXELS, 2)
        pixels, separators = table[:, :, 0] - np.uint8(ord("0")), table[:, :, 1]
    as_published = (separators[:, :-1] == ord(" ")).all() and (separators[:, -1] == ord("\n")).all()
    if not len(pixels) or not as_published or (pixels > 1).any():
        # Other spacing than the published files' is read line by line, which is slower.
        rows = [np.empty((0, _AMAT_PIXELS), np.uint8)]
        for number, line in enumerate(io.BytesIO(data), 1):
            values = line.split()
            if len(values) != _AMAT_PIXELS:
                raise DataError(f"{path}: line {number}: {len(values)} values, expected {_AMAT_PIXELS}")
            odd = next((place for place, value in enumerate(values) if value not in (b"0", b"1")), None)
            if odd is not None:
                text = values[odd][:20].decode("ascii", "replace")
                raise DataError(f"{path}: line {number}: value {odd + 1} is {text!r}, expected 0 or 1")
            rows.append((np.array(values) == b"1").astype(np.uint8)[None])
        pixels = np.concatenate(rows)
    if not len(pixels):
        raise DataError(f"{path}: line 1: no image in this file")
    return pixels.reshape(-1, _AMAT_SIDE, _AMAT_SIDE, 1)


def binarise(images: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    """Zeros and ones in the shape of the images: each pixel is 1 with the probability of its greyness.

    The bits come from a raw PCG64 stream, which numpy promises not to change: the same on every machine.
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
