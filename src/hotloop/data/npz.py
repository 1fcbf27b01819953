"""Arrays in numpy's .npz files as `np.savez` writes them, read without trust: no pickles, nothing beyond the file.

`np.load` allocates what a header claims before it looks for the bytes, and lets through whatever zipfile raises. Here
members are stored, not compressed, so that together they are no larger than the file. What the arrays are for it does
not know.
"""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.errors import DataError

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(path: str | Path) -> dict[str, NDArray[Any]]:
    """The arrays by name; DataError where the file cannot be read or holds anything else."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > path.stat().st_size:
                raise ValueError("its members are larger than the file")
            return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # zipfile and the header's parser raise whatever broken bytes lead them to
        raise DataError(f"{path}: damaged ({' '.join(str(error).split()) or type(error).__name__})") from None


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        shape, by_column, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        if dtype.hasobject:
            raise ValueError(f"{member.filename} holds objects")
        size = math.prod(shape) * dtype.itemsize
        if size != member.file_size - file.tell():
            raise ValueError(f"{member.filename} has not the bytes of its shape")
        data = np.frombuffer(file.read(), dtype)
    return data.reshape(shape, order="F" if by_column else "C")
