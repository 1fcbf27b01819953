"""The idx format of MNIST and its relatives: a magic number, the dimensions, then unsigned bytes.

Only the format; what the numbers stand for, and how many there should be, is for the loader.
"""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data import content
from hotloop.errors import DataError

_UNSIGNED_BYTES = 0x08


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file, gzipped or plain; read-only, since it is the file's own bytes."""
    data = content.read(path)
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise DataError(f"{path}: byte {len(data):,}: the file ends inside its header of {header} bytes")
    magic, expected = int.from_bytes(data[:4], "big"), _UNSIGNED_BYTES << 8 | dimensions
    if magic != expected:
        raise DataError(
            f"{path}: byte 0: magic number 0x{magic:08x}, expected 0x{expected:08x} "
            f"(unsigned bytes in {dimensions} dimensions)"
        )
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dimensions, offset=4))
    _check_length(path, len(data), header + math.prod(shape), shape)
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _check_length(path: Path, length: int, needed: int, shape: tuple[int, ...]) -> None:
    what = " x ".join(f"{n:,}" for n in shape)
    if length < needed:
        raise DataError(
            f"{path}: byte {length:,}: the file ends here, but {what} values need {needed:,} bytes"
        )
    if length > needed:
        raise DataError(
            f"{path}: byte {needed:,}: the file goes on for {length - needed:,} bytes after {what} values"
        )
