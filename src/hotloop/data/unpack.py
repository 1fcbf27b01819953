"""Takes named files, and nothing else, out of a downloaded tar or zip archive.

The names asked for come from the catalogue; where a file goes is decided here and never by the archive, so
that no archive can write outside the folder. Each file gets its name only once its content is right.
"""

import tarfile
import zipfile
import zlib
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
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{archive}: damaged archive ({error})") from None
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
        for name in packed.namelist():
            if name in wanted:
                with packed.open(name) as source:
                    yield name, source


def _write(file: KnownFile, source: IO[bytes], folder: Path) -> None:
    part = folder / f".{file.name}.part"

    def copied() -> Iterator[bytes]:
        left = file.size + 1  # an archive that claims a small file and unpacks to an endless one stops here
        with part.open("wb") as target:
            while left and (chunk := source.read(min(_CHUNK, left))):
                target.write(chunk)
                left -= len(chunk)
                yield chunk

    _, checksum = digest(copied(), file.checksum)
    if checksum != file.checksum:
        part.unlink()
        raise DataError(
            f"{folder / file.name}: wrong content in the archive ({checksum}, expected {file.checksum})"
        )
    part.replace(folder / file.name)
