"""The .amat text of binarised MNIST: one image a line, 784 times 0 or 1, separated by spaces.

The published files have exactly two characters a pixel, so that the whole file is one table of bytes; any
other spacing is read line by line, which is slower.
"""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data import content
from hotloop.errors import DataError

SIDE = 28
_PIXELS = SIDE * SIDE


def read_amat(path: str | Path) -> NDArray[np.uint8]:
    """Images [N, 28, 28, 1] of zeros and ones."""
    path = Path(path)
    data = content.read(path)
    pixels = _table(data)
    if pixels is None:
        pixels = _lines(path, data)
    if not len(pixels):
        raise DataError(f"{path}: line 1: no image in this file")
    return pixels.reshape(-1, SIDE, SIDE, 1)


def _table(data: bytes) -> NDArray[np.uint8] | None:
    """The pixels if every line is laid out as published, else None."""
    if len(data) % (2 * _PIXELS):
        return None
    table = np.frombuffer(data, np.uint8).reshape(-1, _PIXELS, 2)
    pixels = table[:, :, 0] - np.uint8(ord("0"))
    separators = table[:, :, 1]
    regular = (separators[:, :-1] == ord(" ")).all() and (separators[:, -1] == ord("\n")).all()
    return pixels if regular and (pixels <= 1).all() else None


def _lines(path: Path, data: bytes) -> NDArray[np.uint8]:
    rows = [np.empty((0, _PIXELS), np.uint8)]
    for number, line in enumerate(io.BytesIO(data), 1):
        values = line.split()
        if len(values) != _PIXELS:
            raise DataError(f"{path}: line {number}: {len(values)} values, expected {_PIXELS}")
        odd = next((place for place, value in enumerate(values) if value not in (b"0", b"1")), None)
        if odd is not None:
            text = values[odd][:20].decode("ascii", "replace")
            raise DataError(f"{path}: line {number}: value {odd + 1} is {text!r}, expected 0 or 1")
        rows.append((np.array(values) == b"1").astype(np.uint8)[None])
    return np.concatenate(rows)
