"""The content of files that anybody may have written: bytes, gzipped or plain, and the arrays of .npz files.

Whoever reads says how much it wants at most: ten megabytes may unpack to ten gigabytes. Errors name file and byte.
"""

import gzip
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.errors import DataError

LARGEST = 1 << 28
"""Bytes of content, more than any file of a known set has: CIFAR-100's 154 million are the most."""
_CHUNK = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """An OSError in the block is a DataError that says that the file or folder cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


@contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """An OSError in the block is a DataError that says that the file or folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from None


class Content:
    """The bytes of a file in order, unpacked when it starts like a gzip file, whatever its name."""

    closed = False

    def __init__(self, path: str | Path, most: int | None = None):
        self.path, self.most, self.position = Path(path), most, 0
        with self._errors():
            with self.path.open("rb") as file:
                self.packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
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

    def take(self, size: int) -> bytes:
        """So many bytes, or all that are left, in pieces: what is not there is not allocated either."""
        end, pieces = self.position + size, []
        while piece := self.read(min(_CHUNK, end - self.position)):
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self._stream.close()
        self.closed = True

    def __enter__(self) -> "Content":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with read_errors(self.path):
            try:
                yield
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(
                    f"{self.path}: damaged gzip file after byte {self.position:,} of its content ({error})"
                ) from None


def read_chunks(path: str | Path, most: int | None = None) -> Iterator[bytes]:
    """The content, a piece at a time; DataError where it cannot be read to its end or has more than `most` bytes."""
    with Content(path, most) as content:
        while chunk := content.read(_CHUNK):
            yield chunk


def read_content(path: str | Path, most: int = LARGEST) -> bytes:
    return b"".join(read_chunks(path, most))


def read_npz(path: str | Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file of `np.savez` by name; DataError where it cannot be read or holds anything else.

    Not `np.load`, which allocates what a header claims before it looks for the bytes. Members must be stored, not
    compressed, so that together they are no larger than the file; pickles are refused.
    """
    path = Path(path)
    try:
        with read_errors(path), zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > path.stat().st_size:
                raise ValueError("its members are larger than the file")
            return {member.filename.removesuffix(".npy"): _read_array(archive, member) for member in members}
    except DataError:
        raise
    except Exception as error:  # zipfile and the header's parser raise whatever broken bytes lead them to
        raise DataError(f"{path}: damaged ({' '.join(str(error).split()) or type(error).__name__})") from None


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        shape, by_column, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
        if dtype.hasobject:
            raise ValueError(f"{member.filename} holds objects")
        size = math.prod(shape) * dtype.itemsize
        if size != member.file_size - file.tell():
            raise ValueError(f"{member.filename} has not the bytes of its shape")
        data = np.frombuffer(file.read(), dtype)
    return data.reshape(shape, order="F" if by_column else "C")
