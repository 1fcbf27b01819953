"""Whether the files of a set are what they should be: size and checksum of the content, unpacked on the way.

It knows hashes, not formats: a file that passes here is the published one, byte for byte.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotloop.data.content import chunks
from hotloop.data.folders import Found
from hotloop.data.known import KnownFile, KnownSet
from hotloop.errors import DataError


@dataclass(frozen=True)
class Checked:
    """The verdict on one file; `reason` is empty when it is fine."""

    name: str
    path: Path | None
    size: int
    checksum: str
    status: Literal["OK", "BAD", "missing"]
    reason: str = ""


def digest(pieces: Iterator[bytes], checksum: str) -> tuple[int, str]:
    """Size and checksum of the pieces together, by the algorithm that `checksum` names ("sha256:...")."""
    algorithm = checksum.partition(":")[0]
    state, size = hashlib.new(algorithm, usedforsecurity=False), 0
    for piece in pieces:
        state.update(piece)
        size += len(piece)
    return size, f"{algorithm}:{state.hexdigest()}"


def raw_digest(path: Path, checksum: str) -> tuple[int, str]:
    """Size and checksum of a file as it lies there, not unpacked."""
    with path.open("rb") as file:
        return digest(iter(lambda: file.read(1 << 20), b""), checksum)


def check(file: KnownFile, path: Path | None) -> Checked:
    """The verdict on one file of a set."""
    if path is None:
        return Checked(file.name, None, file.size, file.checksum, "missing", "not here")
    try:
        size, checksum = digest(chunks(path, file.size), file.checksum)
    except DataError as error:
        return Checked(file.name, path, 0, "", "BAD", str(error).removeprefix(f"{path}: "))
    if size != file.size:
        reason = f"{size:,} bytes of content, expected {file.size:,}"
        return Checked(file.name, path, size, checksum, "BAD", reason)
    if checksum != file.checksum:
        return Checked(file.name, path, size, checksum, "BAD", f"{checksum}, expected {file.checksum}")
    return Checked(file.name, path, size, checksum, "OK")


def verify(known: KnownSet, found: Found | None) -> tuple[Checked, ...]:
    """The verdict on every file of a set."""
    files = found.files if found else {}
    return tuple(check(file, files.get(file.name)) for file in known.files)
