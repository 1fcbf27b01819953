"""The content of a file on the disk, gzipped or plain, with errors that name the file and the byte.

Every reader and every checksum goes through here, and says how much it wants at most: ten megabytes may unpack to ten
gigabytes. What the bytes mean is the readers' to know.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotloop.errors import DataError

LARGEST = 1 << 28
"""Bytes of content, more than any file of a known set has: CIFAR-100's 154 million are the most."""
_CHUNK = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


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
        """Let go of the file."""
        self._stream.close()
        self.closed = True

    def __enter__(self) -> "Content":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{self.path}: damaged gzip file after byte {self.position:,} of its content ({error})"
            ) from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from None


def chunks(path: str | Path, most: int | None = None) -> Iterator[bytes]:
    """The content, a piece at a time; DataError where it cannot be read to its end or has more than `most` bytes."""
    with Content(path, most) as content:
        while chunk := content.read(_CHUNK):
            yield chunk


def read(path: str | Path, most: int = LARGEST) -> bytes:
    """The whole content."""
    return b"".join(chunks(path, most))
