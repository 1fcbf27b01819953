"""A folder of entries by key, as jax's compilation cache wants them: whole or not there, the oldest evicted
first.

JAX's own file cache writes in place, never repairs a damaged entry and fails to evict after a killed
process. Here an entry is written under another name and renamed, checked by a digest when it is read (a
damaged one is deleted, so that the program is compiled and kept again), and its file time is that of its
last use. It knows nothing of jax.
"""

import contextlib
import os
import platform
import re
import tempfile
from hashlib import blake2b
from pathlib import Path

SUFFIX = ".program"
PARTIAL = ".partial"
MARK = b"hotloop1"
HEAD = len(MARK) + 16


class Store:
    """Entries under `path` that together take at most `most` bytes (None: no limit)."""

    def __init__(self, path: Path, most: int | None):
        self._path = path  # the name that jax knows
        self.most = most
        self.machine = machine_digest()

    def _file(self, key: str) -> Path:
        return self._path / f"{self.machine}-{key}{SUFFIX}"

    def get(self, key: str) -> bytes | None:
        """The entry, now the most recently used one; None where there is none or it was damaged."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        whole = content[:HEAD] == head(content[HEAD:])
        with contextlib.suppress(OSError):  # a folder that may only be read still serves
            os.utime(path) if whole else path.unlink()
        return content[HEAD:] if whole else None

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry, in one step, so that another process never sees half of it."""
        if self.most is not None and HEAD + len(value) > self.most:
            return
        # A full disk or a folder without permission costs the next run its time, never this run its result.
        with contextlib.suppress(OSError):
            self.evict(HEAD + len(value))
            self._write(self._file(key), head(value) + value)

    def _write(self, path: Path, content: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._path, suffix=PARTIAL, delete=False) as file:
            partial = Path(file.name)
            try:
                file.write(content)
                file.close()
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def evict(self, coming: int = 0) -> None:
        """Delete the least recently used entries until `coming` more bytes fit under the limit."""
        if self.most is None:
            return
        entries = sorted((stat.st_mtime_ns, stat.st_size, path) for path, stat in self._entries())
        total = sum(size for _, size, _ in entries) + coming
        for _, size, path in entries:
            if total <= self.most:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self._path.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process may evict at the same time
                found.append((path, path.stat()))
        return found


def head(value: bytes) -> bytes:
    """What stands before an entry in its file: the format's mark and the entry's digest."""
    return MARK + blake2b(value, digest_size=HEAD - len(MARK)).digest()


def machine_digest() -> str:
    """A short name for this machine's instruction set: a program for another CPU must not be loaded here."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    flags = re.search(r"^(?:flags|Features)\s*:.*$", info, re.MULTILINE)
    text = platform.machine() + (flags[0] if flags else "")
    return blake2b(text.encode(), digest_size=4).hexdigest()
