"""Brings a known set onto this machine. A file that is there and wrong is the user's: it is named in an error, never
replaced; names and places come from the catalogue and never from an archive."""

import contextlib
import fcntl
import http.client
import os
import socket
import tarfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from hotloop.data.catalogue import Download, KnownFile, KnownSet
from hotloop.data.content import file_errors
from hotloop.data.local_files import (
    FileVerdict,
    data_home,
    digest,
    digest_file,
    find_set,
    list_folder,
    look_in,
    verify_set,
)
from hotloop.errors import DISK_ERRORS, DataError
from hotloop.options.files import whole_file
from hotloop.rehearsal import begin_work

OFFLINE = "HOTLOOP_OFFLINE"
CONNECT_SECONDS = 3.0  # how long a host may take to answer before it counts as out of reach
READ_SECONDS = 30.0  # how long a server may stay silent in the middle of a download
_ATTEMPTS = 3
_CHUNK = 1 << 18


class FetchError(DataError):
    """Data that could not be had from the network: `why` in a few words, then all that is known."""

    def __init__(self, why: str, details: str):
        super().__init__(f"{why}: {details}")
        self.why = why


class Bar(Protocol):
    def advance(self, amount: float = 1) -> None: ...


Progress = Callable[[str, float | None], contextlib.AbstractContextManager[Bar]]
"""Opens a progress bar from a description and a total."""


class _NoBar:
    def advance(self, amount: float = 1) -> None:
        pass


def no_progress(_description: str, _total: float | None) -> contextlib.AbstractContextManager[Bar]:
    return contextlib.nullcontext(_NoBar())


@dataclass(frozen=True)
class Fetched:
    folder: Path
    files: tuple[FileVerdict, ...]
    new: bool  # whether anything had to be downloaded


def fetch(known: KnownSet, data_dir: str | Path | None = None, progress: Progress = no_progress) -> Fetched:
    """Make the set complete and verified. FetchError where the network does not give it."""
    data_dir = None if data_dir is None else Path(data_dir)
    if not known.files:
        raise DataError(
            f"{known.name}: not fetched ({known.licence}); bring the files and give their folder: "
            f"{known.expected}"
        )
    if data_dir is None or list_folder(data_dir) is not None:
        found = find_set(known, data_dir)
        verdicts = verify_set(known, found)
        if found and all(verdict.status == "OK" for verdict in verdicts):
            return Fetched(found.folder, verdicts, new=False)
    begin_work(f"fetching {known.name}")
    folder = data_home(data_dir) / known.folders[0]
    answering: set[str] = set()
    if any(not (folder / file.download.name).exists() for file in _find_missing(known, folder)):
        offline = os.environ.get(OFFLINE, "") not in ("", "0")
        mirrors = {mirror for item in known.downloads for mirror in item.mirrors}
        answering = set() if offline else probe_mirrors(mirrors)
        if not answering:
            names = ", ".join(item.name for item in known.downloads)
            sources = ", ".join(dict.fromkeys(item.mirrors[0] for item in known.downloads))
            by_hand = f"put {names} into {folder} by hand, from {sources}, and fetch again"
            why = f"{OFFLINE} is set" if offline else "no network"
            raise FetchError(why, f"{known.name} cannot be fetched; {by_hand}")
    with _lock_folder(folder):
        wanted = _find_missing(known, folder)
        for item in dict.fromkeys(file.download for file in wanted):
            archive = folder / item.name
            brought = archive.exists()  # by the user: it is used, and left there
            if brought:
                _, checksum = digest_file(archive, item.checksum)
                if checksum != item.checksum:
                    raise DataError(
                        f"{archive}: is there but wrong ({checksum}, expected {item.checksum}); move it away"
                    )
            else:
                with progress(f"{known.name}: {item.name}", item.size) as bar:
                    download(item, archive, [url for url in item.mirrors if url in answering], bar.advance)
            if members := [file for file in wanted if file.download == item and file.member]:
                unpack(archive, members, folder)
                if not brought:
                    archive.unlink()
        return Fetched(folder, verify_set(known, look_in(known, folder)), new=True)


def _find_missing(known: KnownSet, folder: Path) -> list[KnownFile]:
    verdicts = verify_set(known, look_in(known, folder))
    for verdict in verdicts:
        if verdict.status == "BAD":
            raise DataError(
                f"{verdict.path}: is there but wrong ({verdict.reason}); move it away and fetch again"
            )
    return [file for file, verdict in zip(known.files, verdicts, strict=True) if verdict.status == "missing"]


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder and keep every other process that fetches into it waiting."""
    with file_errors(f"data folder {folder}", "cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def probe_mirrors(urls: Iterable[str]) -> set[str]:
    """Those of the addresses whose host (or the proxy in front of it) answers; asked all at once."""
    reachable: set[str] = set()

    def probe(url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        proxy = urllib.request.getproxies().get(parts.scheme)
        if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
            parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with contextlib.suppress(OSError):
            socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
            reachable.add(url)

    threads = [threading.Thread(target=probe, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CONNECT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return set(reachable)


def download(item: Download, target: Path, mirrors: Iterable[str], advance: Callable[[int], None]) -> None:
    """Fetch `item` to `target` from the first mirror that gives the right bytes; FetchError when none does.

    `advance` gets new bytes, whatever is begun again. An unfinished file stays (hidden, `.part`) and is continued
    next time.
    """
    part = target.with_name(f".{target.name}.part")
    shown, reasons = 0, []

    def report(have: int) -> None:
        nonlocal shown
        advance(max(0, have - shown))
        shown = max(shown, have)

    for mirror in mirrors:
        reason = _from_mirror(mirror + item.name, item, part, report)
        if not reason:
            part.replace(target)
            return
        reasons.append(f"{mirror}{item.name}: {reason}")
    raise FetchError(f"{item.name} could not be downloaded", "; ".join(reasons))


def _from_mirror(url: str, item: Download, part: Path, report: Callable[[int], None]) -> str:
    """Fill `part` from one mirror, taking a broken connection up again; why that failed, or nothing."""
    reason = ""
    for _ in range(_ATTEMPTS):
        start = part.stat().st_size if part.exists() else 0
        have = start if start <= item.size else 0
        headers = {"User-Agent": "hotloop", **({"Range": f"bytes={have}-"} if have else {})}
        request = urllib.request.Request(url, headers=headers)
        try:
            if have < item.size:
                with urllib.request.urlopen(request, timeout=READ_SECONDS) as response:
                    resumed = response.status == http.client.PARTIAL_CONTENT
                    have = have if resumed else 0  # written anew where the server cannot continue
                    with part.open("ab" if resumed else "wb") as file:
                        # One byte more than the file has is enough to know that it is another file.
                        while have <= item.size and (chunk := response.read(_CHUNK)):
                            file.write(chunk)
                            have += len(chunk)
                            report(have)
            if have < item.size:
                raise ConnectionError(f"the connection ended after {have:,} of {item.size:,} bytes")
        except urllib.error.HTTPError as error:
            error.close()
            return f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in DISK_ERRORS:
                raise DataError(f"data folder {part.parent}: cannot be written ({error})") from None
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            silent = f"no answer for {READ_SECONDS:g} s"
            reason = silent if isinstance(cause, TimeoutError) else str(cause) or type(cause).__name__
        else:
            size, checksum = digest_file(part, item.checksum)
            if checksum == item.checksum:
                return ""
            part.unlink()
            there = f"{size:,} bytes, {checksum}; expected {item.size:,}, {item.checksum}"
            reason = f"wrong checksum, file deleted ({there})"
            if start == 0:
                return reason
    return reason


def unpack(archive: Path, files: Iterable[KnownFile], folder: Path) -> None:
    wanted = {file.member: file for file in files}
    members = _zip_members if archive.name.endswith(".zip") else _tar_members
    try:
        for name, source in members(archive, wanted):
            file = wanted.pop(name)
            path = folder / file.name
            with file_errors(f"data folder {folder}", "cannot be written"), whole_file(path) as part:
                with part.open("wb") as target:
                    _, checksum = digest(_copy(source, target, file.size), file.checksum)
                if checksum != file.checksum:
                    raise DataError(
                        f"{path}: wrong content in the archive ({checksum}, expected {file.checksum})"
                    )
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


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> Iterator[bytes]:
    left = size + 1  # an archive that claims a small file and unpacks to an endless one stops here
    while left:
        try:
            chunk = source.read(min(_CHUNK, left))
        except OSError as error:  # of the archive, not of the disk that is written to
            raise EOFError(str(error)) from None
        if not chunk:
            return
        target.write(chunk)
        left -= len(chunk)
        yield chunk
