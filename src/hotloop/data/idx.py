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


def read_idx(path: str | Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file, gzipped or plain; read-only, since it is the file's own bytes."""
    path = Path(path)
    with content.Content(path) as file:
        head = file.read(4 + 4 * dimensions)
        shape = _shape(path, head, dimensions)
        needed = math.prod(shape)
        if needed > content.LARGEST:
            raise DataError(f"{path}: byte 4: {_by(shape)} values, at most {content.LARGEST:,} are read")
        data = file.take(needed)
        if len(data) < needed:
            raise DataError(
                f"{path}: byte {file.position:,}: the file ends here, but {_by(shape)} values need "
                f"{len(head) + needed:,} bytes"
            )
        if file.read(1):
            raise DataError(
                f"{path}: byte {len(head) + needed:,}: the file goes on after {_by(shape)} values"
            )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _shape(path: Path, head: bytes, dimensions: int) -> tuple[int, ...]:
    header = 4 + 4 * dimensions
    if len(head) < header:
        raise DataError(f"{path}: byte {len(head):,}: the file ends inside its header of {header} bytes")
    magic, expected = int.from_bytes(head[:4], "big"), _UNSIGNED_BYTES << 8 | dimensions
    if magic != expected:
        raise DataError(
            f"{path}: byte 0: magic number 0x{magic:08x}, expected 0x{expected:08x} "
            f"(unsigned bytes in {dimensions} dimensions)"
        )
    return tuple(int(n) for n in np.frombuffer(head, ">u4", dimensions, offset=4))


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape)
