"""The binary version of CIFAR-10 and CIFAR-100: fixed-length records of labels and three colour planes.

Reads any number of whole records, so that a subset is as good as the full set. No pickle.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data import content
from hotloop.errors import DataError

SIDE, CHANNELS = 32, 3
_PIXELS = SIDE * SIDE * CHANNELS


def read_cifar(
    paths: Sequence[str | Path], label_names: Sequence[int]
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Images [N, 32, 32, 3] and labels of the files together.

    A record begins with one byte for each entry of `label_names`, the number of names of that label; the last
    one is the label that counts (CIFAR-100 has a coarse label before the fine one).
    """
    tables = [_records(Path(path), label_names) for path in paths]
    images = np.empty((sum(map(len, tables)), SIDE, SIDE, CHANNELS), np.uint8)
    labels = np.empty(len(images), np.int32)
    start = 0
    for table in tables:
        part = slice(start, start := start + len(table))
        planes = table[:, len(label_names) :].reshape(-1, CHANNELS, SIDE, SIDE)
        for channel in range(CHANNELS):  # three strided copies: twice as fast as one transposed copy
            images[part, :, :, channel] = planes[:, channel]
        labels[part] = table[:, len(label_names) - 1]
    return images, labels


def _records(path: Path, label_names: Sequence[int]) -> NDArray[np.uint8]:
    data = content.read(path)
    record = len(label_names) + _PIXELS
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
