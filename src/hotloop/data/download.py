"""One download: several mirrors, resumed where it broke off, given its name only once its checksum is right.

It knows addresses and bytes, not data sets. A host that does not answer within a few seconds is left alone,
so that a machine without a network finds out fast.
"""

import errno
import http.client
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

from hotloop.data.checksum import raw_digest
from hotloop.data.known import Download
from hotloop.errors import DataError

CONNECT_SECONDS = 3.0
"""How long a host may take to answer before it counts as out of reach."""
READ_SECONDS = 30.0
"""How long a server may stay silent in the middle of a download."""
_ATTEMPTS = 3
_CHUNK = 1 << 18
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)


class FetchError(DataError):
    """Data that could not be had from the network: `why` in a few words, then all that is known."""

    def __init__(self, why: str, details: str):
        super().__init__(f"{why}: {details}")
        self.why = why


def reachable(urls: Iterable[str]) -> set[str]:
    """Those of the addresses whose host (or the proxy in front of it) answers; asked all at once."""
    answers: set[str] = set()
    threads = [threading.Thread(target=_probe, args=(url, answers), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CONNECT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return set(answers)


def _probe(url: str, answers: set[str]) -> None:
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
    except OSError:
        return
    answers.add(url)


def download(item: Download, target: Path, mirrors: Iterable[str], report: Callable[[int], None]) -> None:
    """Fetch `item` to `target` from the first mirror that gives the right bytes; FetchError when none does.

    `report` is called with the number of bytes there so far. An unfinished file stays beside the target
    (hidden, `.part`) and is continued next time; a wrong one is deleted.
    """
    part = target.with_name(f".{target.name}.part")
    reasons = []
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
        try:
            _receive(url, item, part, start if start <= item.size else 0, report)
        except urllib.error.HTTPError as error:
            error.close()
            return f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in _DISK_ERRORS:
                raise DataError(f"data folder {part.parent}: cannot be written ({error})") from None
            reason = _explain(error)
        else:
            reason = _wrong(item, part)
            if not reason or start == 0:
                return reason
    return reason


def _receive(url: str, item: Download, part: Path, start: int, report: Callable[[int], None]) -> None:
    """Append what is missing to `part`, or write it anew where the server cannot continue."""
    if start == item.size:
        return
    headers = {"User-Agent": "hotloop", **({"Range": f"bytes={start}-"} if start else {})}
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=READ_SECONDS
    ) as response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        have = start if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            # One byte more than the file has is enough to know that it is another file.
            while have <= item.size and (chunk := response.read(_CHUNK)):
                file.write(chunk)
                have += len(chunk)
                report(have)
    if have < item.size:
        raise ConnectionError(f"the connection ended after {have:,} of {item.size:,} bytes")


def _wrong(item: Download, part: Path) -> str:
    """What is wrong with the downloaded file, which is then deleted; nothing when it is the right one."""
    size, checksum = raw_digest(part, item.checksum)
    if checksum == item.checksum:
        return ""
    part.unlink()
    return (
        f"wrong checksum, file deleted ({size:,} bytes, {checksum}; expected {item.size:,}, {item.checksum})"
    )


def _explain(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer for {READ_SECONDS:g} s"
    return str(cause) or type(cause).__name__
