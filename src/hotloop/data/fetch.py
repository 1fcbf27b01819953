"""Brings a known set onto this machine: what is missing is downloaded, checked and unpacked.

It knows folders and checksums, not formats. A file that is there and wrong is the user's: it is named in an
error, never replaced. An archive that the user brought is used as if it had been downloaded.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hotloop.data.checksum import Checked, raw_digest, verify
from hotloop.data.download import FetchError, download, reachable
from hotloop.data.folders import data_home, entries, find, look
from hotloop.data.known import Download, KnownFile, KnownSet
from hotloop.data.unpack import unpack
from hotloop.errors import DataError
from hotloop.rehearsal import begin_work

OFFLINE = "HOTLOOP_OFFLINE"


class Bar(Protocol):
    """A progress bar of bytes."""

    def advance(self, amount: float = 1) -> None:
        """So many more bytes are there."""


Progress = Callable[[str, float | None], contextlib.AbstractContextManager[Bar]]
"""Opens a progress bar from a description and a total."""


class _NoBar:
    def advance(self, amount: float = 1) -> None:
        pass


@dataclass(frozen=True)
class Fetched:
    """Where a complete set lies, the verdict on its files, and whether anything had to be downloaded."""

    folder: Path
    files: tuple[Checked, ...]
    new: bool


def no_progress(_description: str, _total: float | None) -> contextlib.AbstractContextManager[Bar]:
    """Shows nothing."""
    return contextlib.nullcontext(_NoBar())


def fetch(known: KnownSet, data_dir: str | Path | None = None, progress: Progress = no_progress) -> Fetched:
    """Make the set complete and verified. FetchError where the network does not give it."""
    data_dir = None if data_dir is None else Path(data_dir)
    if not known.files:
        raise DataError(
            f"{known.name}: not fetched ({known.licence}); bring the files and give their folder: "
            f"{known.expected}"
        )
    if data_dir is None or entries(data_dir) is not None:
        found = find(known, data_dir)
        verdicts = verify(known, found)
        if found and all(verdict.status == "OK" for verdict in verdicts):
            return Fetched(found.folder, verdicts, new=False)
    begin_work(f"fetching {known.name}")
    folder = data_home(data_dir) / known.folders[0]
    absent = [file for file in _missing(known, folder) if not (folder / file.download.name).exists()]
    mirrors = _answering(known, folder) if absent else set()
    with _only_one(folder):
        _complete(known, folder, mirrors, progress)
        return Fetched(folder, verify(known, look(known, folder)), new=True)


def _missing(known: KnownSet, folder: Path) -> list[KnownFile]:
    """The files that are not in the folder; DataError for one that is there and wrong."""
    verdicts = verify(known, look(known, folder))
    for verdict in verdicts:
        if verdict.status == "BAD":
            raise DataError(
                f"{verdict.path}: is there but wrong ({verdict.reason}); move it away and fetch again"
            )
    return [file for file, verdict in zip(known.files, verdicts, strict=True) if verdict.status == "missing"]


def _complete(known: KnownSet, folder: Path, mirrors: set[str], progress: Progress) -> None:
    """Download what is missing and unpack it; an archive that the user put there is used, and left there."""
    wanted = _missing(known, folder)
    for item in dict.fromkeys(file.download for file in wanted):
        archive = folder / item.name
        brought = archive.exists()
        if brought:
            _check_brought(item, archive)
        else:
            with progress(f"{known.name}: {item.name}", item.size) as bar:
                _download(item, folder, mirrors, bar)
        if members := [file for file in wanted if file.download == item and file.member]:
            unpack(archive, members, folder)
            if not brought:
                archive.unlink()


def _check_brought(item: Download, archive: Path) -> None:
    _, checksum = raw_digest(archive, item.checksum)
    if checksum != item.checksum:
        raise DataError(f"{archive}: is there but wrong ({checksum}, expected {item.checksum}); move it away")


def _answering(known: KnownSet, folder: Path) -> set[str]:
    """The mirrors within reach; FetchError that says what to put where when there are none."""
    mirrors = {mirror for item in known.downloads for mirror in item.mirrors}
    offline = os.environ.get(OFFLINE, "") not in ("", "0")
    answering = set() if offline else reachable(mirrors)
    if not answering:
        why = f"{OFFLINE} is set" if offline else "no network"
        raise FetchError(why, f"{known.name} cannot be fetched; {by_hand(known, folder)}")
    return answering


def by_hand(known: KnownSet, folder: Path) -> str:
    """What a user has to put where when nothing can be fetched."""
    names = ", ".join(item.name for item in known.downloads)
    sources = ", ".join(dict.fromkeys(item.mirrors[0] for item in known.downloads))
    return f"put {names} into {folder} by hand, from {sources}, and fetch again"


def _download(item: Download, folder: Path, answering: set[str], bar: Bar) -> None:
    """Download one file with a bar that only ever moves forward, whatever is begun again."""
    shown = 0

    def report(have: int) -> None:
        nonlocal shown
        bar.advance(max(0, have - shown))
        shown = max(shown, have)

    mirrors = [mirror for mirror in item.mirrors if mirror in answering]
    download(item, folder / item.name, mirrors, report)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Create the folder and keep every other process that fetches into it waiting."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
    except OSError as error:
        raise DataError(f"data folder {folder}: cannot be written ({error.strerror or error})") from None
