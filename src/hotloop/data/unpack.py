"""Takes named files, and nothing else, out of a downloaded tar or zip archive.

The names asked for come from the catalogue; where a file goes is decided here and never by the archive, so
that no archive can write outside the folder. Each file gets its name only once its content is right.
"""

import tarfile
import zipfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import IO

from hotloop.data.checksum import digest
from hotloop.data.known import KnownFile
from hotloop.errors import DataError

_CHUNK = 1 << 20


def unpack(archive: Path, files: Iterable[KnownFile], folder: Path) -> None:
    """Write the files, each from its member of the archive, to the folder."""
    wanted = {file.member: file for file in files}
    members = _zip_members if archive.name.endswith(".zip") else _tar_members
    try:
        for name, source in members(archive, wanted):
            _write(wanted.pop(name), source, folder)
    except DataError:
        raise
    except Exception as error:  # encrypted, cut, of unknown methods: the readers raise many kinds
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{archive}: damaged archive ({said})") from None
    if wanted:
        raise DataError(f"{archive}: no regular file {', '.join(wanted)} in this archive")


def _tar_members(archive: Path, wanted: Container[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """The wanted members in the archive's own order, so that a gzipped tar is unpacked only once."""
    with tarfile.open(archive, "r|*") as tar:
        for info in tar:
            if info.isreg() and info.name in wanted:
                source = tar.extractfile(info)
                assert source is not None  # extractfile gives None only for what is not a regular file
                yield info.name, source


def _zip_members(archive: Path, wanted: Container[str]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as packed:
        for name in dict.fromkeys(packed.namelist()):
            if name in wanted:
                with packed.open(name) as source:
                    yield name, source


def _write(file: KnownFile, source: IO[bytes], folder: Path) -> None:
    part = folder / f".{file.name}.part"
    try:
        with part.open("wb") as target:
            _, checksum = digest(_copied(source, target, file.size), file.checksum)
        if checksum != file.checksum:
            raise DataError(
                f"{folder / file.name}: wrong content in the archive ({checksum}, expected {file.checksum})"
            )
        part.replace(folder / file.name)
    except OSError as error:
        raise DataError(f"data folder {folder}: cannot be written ({error.strerror})") from None
    finally:
        part.unlink(missing_ok=True)


def _copied(source: IO[bytes], target: IO[bytes], size: int) -> Iterator[bytes]:
    left = size + 1  # an archive that claims a small file and unpacks to an endless one stops here
    while left and (chunk := _next(source, min(_CHUNK, left))):
        target.write(chunk)
        left -= len(chunk)
        yield chunk


def _next(source: IO[bytes], size: int) -> bytes:
    try:
        return source.read(size)
    except OSError as error:  # of the archive, not of the disk that is written to
        raise EOFError(str(error)) from None
