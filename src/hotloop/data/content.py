"""The content of a file on the disk, gzipped or plain, with errors that name the file and the byte.

Every reader and every checksum goes through here; what the bytes mean is theirs to know.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from hotloop.errors import DataError

_CHUNK = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


def _open(path: Path) -> BinaryIO:
    """A stream of the content, unpacked when the file starts like a gzip file, whatever its name."""
    with path.open("rb") as file:
        packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")


def chunks(path: Path) -> Iterator[bytes]:
    """The content, a piece at a time; DataError where it cannot be read to its end."""
    position = 0
    try:
        with _open(path) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
                position += len(chunk)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: damaged gzip file after byte {position:,} of its content ({error})"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def read(path: Path) -> bytes:
    """The whole content."""
    return b"".join(chunks(path))
