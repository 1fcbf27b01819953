"""A column that grows: pieces are appended in place, so that there is never a list of pieces beside their sum.

It knows nothing of what the numbers mean.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 1 << 16


class Column:
    """Numbers of one type; an int32 column becomes int64 with the first number that needs it."""

    def __init__(self, dtype: Any):
        self._data: NDArray[Any] = np.empty(0, dtype)
        self._size = 0

    def append(self, piece: NDArray[Any]) -> None:
        """Put a copy of these numbers at the end."""
        if self._data.dtype == np.int32 and not _fits(piece):
            self._data = self._data.astype(np.int64)
        end = self._size + len(piece)
        if end > len(self._data):
            # Large arrays are moved by the page table alone; an eighth more keeps small ones from moving often.
            self._data.resize(end + max(_LEAST, end // 8), refcheck=False)
        self._data[self._size : end] = piece
        self._size = end

    def finish(self) -> NDArray[Any]:
        """All numbers, without spare room; the column is empty afterwards."""
        data, self._data = self._data, np.empty(0, self._data.dtype)
        data.resize(self._size, refcheck=False)
        self._size = 0
        return data


def _fits(piece: NDArray[Any]) -> bool:
    bounds = np.iinfo(np.int32)
    return not len(piece) or bool(piece.min() >= bounds.min and piece.max() <= bounds.max)
