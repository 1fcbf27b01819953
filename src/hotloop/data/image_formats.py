"""The file formats of the known image sets: idx (MNIST), CIFAR's binary version, .amat (binarised MNIST).

Any number of whole records is read, so that a part of a set is as good as the full set. No pickle.
"""

import io
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import LARGEST, Content, read_content
from hotloop.errors import DataError

_CHUNK = 1 << 20
_UNSIGNED_BYTES = 0x08  # idx has types for signed and wider numbers, too; no set uses them
CIFAR_SIDE, CIFAR_CHANNELS = 32, 3
_CIFAR_PIXELS = CIFAR_SIDE * CIFAR_SIDE * CIFAR_CHANNELS
AMAT_SIDE = 28
_AMAT_PIXELS = AMAT_SIDE * AMAT_SIDE


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
    """Images [N, 32, 32, 3] and labels of the files together.

    A record begins with one byte for each entry of `label_names`, the number of names of that label; the last
    one is the label that counts (CIFAR-100 has a coarse label before the fine one).
    """
    tables = [_cifar_records(Path(path), label_names) for path in paths]
    images = np.empty((sum(map(len, tables)), CIFAR_SIDE, CIFAR_SIDE, CIFAR_CHANNELS), np.uint8)
    labels = np.empty(len(images), np.int32)
    start = 0
    for table in tables:
        part = slice(start, start := start + len(table))
        planes = table[:, len(label_names) :].reshape(-1, CIFAR_CHANNELS, CIFAR_SIDE, CIFAR_SIDE)
        for channel in range(CIFAR_CHANNELS):  # three strided copies: twice as fast as one transposed copy
            images[part, :, :, channel] = planes[:, channel]
        labels[part] = table[:, len(label_names) - 1]
    return images, labels


def _cifar_records(path: Path, label_names: Sequence[int]) -> NDArray[np.uint8]:
    data = read_content(path)
    record = len(label_names) + _CIFAR_PIXELS
    if not data or len(data) % record:
        whole = len(data) // record
        raise DataError(
            f"{path}: byte {whole * record:,}: {len(data):,} bytes are not whole records of {record:,}"
        )
    table = np.frombuffer(data, np.uint8).reshape(-1, record)
    for place, names in enumerate(label_names):
        bad = np.flatnonzero(table[:, place] >= names)
        if len(bad):
            at, label = int(bad[0]) * record + place, int(table[bad[0], place])
            raise DataError(f"{path}: byte {at:,}: label {label}, expected 0 to {names - 1}")
    return table


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
    return pixels.reshape(-1, AMAT_SIDE, AMAT_SIDE, 1)
