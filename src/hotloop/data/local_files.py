"""The files of known sets on this machine, and whether they are the published ones. A set is looked for by its files'
names: in the folder given, then in HOTLOOP_DATA, then in the user's own data folder."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotloop.data.catalogue import KnownFile, KnownSet
from hotloop.data.content import read_chunks
from hotloop.errors import DataError

VARIABLE = "HOTLOOP_DATA"


@dataclass(frozen=True)
class LocalSet:
    known: KnownSet
    folder: Path
    files: Mapping[str, Path]  # where each file is that is there, by its name in the set

    @property
    def loadable(self) -> bool:
        """Whether every file is there that the set cannot do without."""
        return all(file.name in self.files for file in self.known.files if file.needed)


def user_folder() -> Path:
    """The user's own data folder, by the XDG rules."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "hotloop"


def data_home(data_dir: Path | None) -> Path:
    """Where a fetch writes: the folder given, else HOTLOOP_DATA if it can be written, else the user's."""
    if data_dir is not None:
        return data_dir
    shared = Path(os.environ.get(VARIABLE) or user_folder())
    # A folder without any write bit is left alone even by root, who could write to it.
    writable = not shared.exists() or (os.access(shared, os.W_OK) and shared.stat().st_mode & 0o222)
    return shared if writable else user_folder()


def list_folder(folder: Path) -> frozenset[str] | None:
    """The names in a folder; None where there is no such folder; DataError where it cannot be read."""
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        culprit = next(path for path in (folder, *folder.parents) if not path.is_dir() and path.exists())
        raise DataError(f"data folder {culprit}: is a file, not a folder") from None
    except OSError as error:
        denied = "permission denied; make it readable or choose another"
        why = denied if isinstance(error, PermissionError) else f"cannot be read ({error.strerror})"
        raise DataError(f"data folder {folder}: {why}") from None


def check_named_folders(data_dir: Path | None) -> None:
    """DataError for a folder that the user named, by argument or by HOTLOOP_DATA, and that is not there."""
    named = {"data_dir": data_dir, VARIABLE: os.environ.get(VARIABLE) or None}
    for how, folder in named.items():
        if folder is not None and list_folder(Path(folder)) is None:
            raise DataError(
                f"{how}={folder}: no such folder; create it, or give the folder that holds the data"
            )


def find_set(known: KnownSet, data_dir: str | Path | None = None) -> LocalSet | None:
    """The first folder that holds enough of the set to load it, else one with a part of it, else None."""
    roots = [
        Path(root) for root in (data_dir, os.environ.get(VARIABLE) or None, user_folder()) if root is not None
    ]
    candidates = [root / folder for root in roots for folder in known.folders]
    # MNIST and Fashion-MNIST share their file names: only a folder that was given may hold them directly.
    if data_dir is not None and known.files:
        candidates.insert(0, Path(data_dir))
    partial = None
    for folder in candidates:
        found = look_in(known, folder)
        if found and found.loadable:
            return found
        partial = partial or found
    return partial


def look_in(known: KnownSet, folder: Path) -> LocalSet | None:
    """What of the set lies in this very folder, or None for nothing."""
    names = list_folder(folder)
    if not names:
        return None
    stored = ((file.name, name) for file in known.files for name in (f"{file.name}.gz", file.name))
    files = {name: folder / as_stored for name, as_stored in stored if as_stored in names}
    return LocalSet(known, folder, files) if files or not known.files else None


@dataclass(frozen=True)
class FileVerdict:
    name: str
    path: Path | None
    size: int
    checksum: str
    status: Literal["OK", "BAD", "missing"]
    reason: str = ""  # empty when the file is fine


def digest(pieces: Iterator[bytes], checksum: str) -> tuple[int, str]:
    """Size and checksum of the pieces together, by the algorithm that `checksum` names ("sha256:...")."""
    algorithm = checksum.partition(":")[0]
    state, size = hashlib.new(algorithm, usedforsecurity=False), 0
    for piece in pieces:
        state.update(piece)
        size += len(piece)
    return size, f"{algorithm}:{state.hexdigest()}"


def digest_file(path: Path, checksum: str) -> tuple[int, str]:
    """Size and checksum of a file as it lies there, not unpacked."""
    with path.open("rb") as file:
        return digest(iter(lambda: file.read(1 << 20), b""), checksum)


def check_file(file: KnownFile, path: Path | None) -> FileVerdict:
    if path is None:
        return FileVerdict(file.name, None, file.size, file.checksum, "missing", "not here")
    try:
        size, checksum = digest(read_chunks(path, file.size), file.checksum)
    except DataError as error:
        return FileVerdict(file.name, path, 0, "", "BAD", str(error).removeprefix(f"{path}: "))
    reason = ""
    if size != file.size:
        reason = f"{size:,} bytes of content, expected {file.size:,}"
    elif checksum != file.checksum:
        reason = f"{checksum}, expected {file.checksum}"
    return FileVerdict(file.name, path, size, checksum, "BAD" if reason else "OK", reason)


def verify_set(known: KnownSet, found: LocalSet | None) -> tuple[FileVerdict, ...]:
    files = found.files if found else {}
    return tuple(check_file(file, files.get(file.name)) for file in known.files)
