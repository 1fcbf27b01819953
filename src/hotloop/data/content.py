"""The content of files that are not trusted, gzipped or plain, and the arrays of .npz files. A caller says how much it
wants at most: ten megabytes may unpack to ten gigabytes. Errors name file and byte."""

import gzip
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.errors import DataError

LARGEST = (
    1 << 28
)  # bytes of content, more than any file of a known set has: CIFAR-100's 154 million are the most
_CHUNK = 1 << 20
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@contextmanager
def file_errors(path: str | Path, fault: str = "cannot be read") -> Iterator[None]:
    """An OSError in the block is a DataError that says what cannot be done with the file or folder."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {fault} ({error.strerror or error})") from None


class Content:
    """The bytes of a file in order, unpacked when it starts like a gzip file, whatever its name."""

    closed = False

    def __init__(self, path: str | Path, most: int | None = None):
        self.path, self.most, self.position = Path(path), most, 0
        with self._errors():
            with self.path.open("rb") as file:
                self.packed = file.read(2) == b"\x1f\x8b"  # gzip's magic number
            self._stream = gzip.open(path) if self.packed else self.path.open("rb")  # noqa: SIM115 - `close` closes it

    def read(self, size: int) -> bytes:
        """The next bytes, none at the end; DataError where there are more than `most`, or they cannot be had."""
        with self._errors():
            found: bytes = self._stream.read(size)
        self.position += len(found)
        if self.most is not None and self.position > self.most:
            how = "unpacks to" if self.packed else "has"
            raise DataError(
                f"{self.path}: {how} more than {self.most:,} bytes, too many for what it should be"
            )
        return found

    def close(self) -> None:
        self._stream.close()
        self.closed = True

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with file_errors(self.path):
            try:
                yield
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(
                    f"{self.path}: damaged gzip file after byte {self.position:,} of its content ({error})"
                ) from None


def read_chunks(path: str | Path, most: int | None = None) -> Iterator[bytes]:
    """The content, a piece at a time; DataError where it cannot be read to its end or has more than `most` bytes."""
    with closing(Content(path, most)) as content:
        while chunk := content.read(_CHUNK):
            yield chunk


def read_content(path: str | Path, most: int = LARGEST) -> bytes:
    return b"".join(read_chunks(path, most))


def read_npz(path: str | Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file of `np.savez` by name; DataError where it cannot be read or holds anything else, or pickles.

    Not `np.load`, which allocates what a header claims before it looks for the bytes. Members must be stored, not
    compressed, so that together they are no larger than the file.
    """
    path = Path(path)
    arrays = {}
    try:
        with file_errors(path), zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                raise ValueError("its members are larger than the file")
            for member in archive.infolist():
                with archive.open(member) as file:
                    shape, by_column, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
                    if dtype.hasobject:
                        raise ValueError(f"{member.filename} holds objects")
                    if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
                        raise ValueError(f"{member.filename} has not the bytes of its shape")
                    data = np.frombuffer(file.read(), dtype).reshape(shape, order="F" if by_column else "C")
                arrays[member.filename.removesuffix(".npy")] = data
    except DataError:
        raise
    except Exception as error:  # zipfile and the header's parser raise whatever broken bytes lead them to
        raise DataError(f"{path}: damaged ({' '.join(str(error).split()) or type(error).__name__})") from None
    return arrays
