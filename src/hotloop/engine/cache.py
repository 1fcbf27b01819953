"""The cache of compiled programs: where it is, how large it may become, and jax told to keep its programs in it.

`HOTLOOP_CACHE` names the folder or turns it off, `HOTLOOP_CACHE_LIMIT` or `hotloop cache limit` bounds it. No jax is
imported before `enable`.
"""

import contextlib
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from hotloop import rehearsal
from hotloop.errors import OptionError
from hotloop.options.files import expand_path

SUFFIX, PARTIAL = ".program", ".partial"
MARK = b"hotloop1"
HEAD_BYTES = len(MARK) + 16
DEFAULT_LIMIT = 4 * 10**9
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
LONGEST_NUMBER = 18  # digits of a size; more are no size that a disk has


def configure(**settings: Any) -> None:
    """Set jax's options by name: jax's own `config.update` carries no types."""
    import jax

    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


class Store:
    """Entries under `path` that together take at most `most` bytes (None: no limit): whole or not there, the least
    recently used evicted first.

    By hand, because jax's own file cache (as of jax 0.10.2) writes in place, never repairs a damaged entry and fails to
    evict after a killed process; this can go with the version of jax that renames entries into place and checks them.
    Here an entry is checked by a digest when it is read (a damaged one is deleted, so that the program is compiled and
    kept again), and its file time is that of its last use.
    """

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
        whole = content[:HEAD_BYTES] == entry_head(content[HEAD_BYTES:])
        with contextlib.suppress(OSError):  # a folder that may only be read still serves
            os.utime(path) if whole else path.unlink()
        return content[HEAD_BYTES:] if whole else None

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry, in one step, so that another process never sees half of it."""
        if self.most is not None and HEAD_BYTES + len(value) > self.most:
            return
        # A full disk or a folder without permission costs the next run its time, never this run its result.
        with contextlib.suppress(OSError):
            self.evict(HEAD_BYTES + len(value))
            with tempfile.NamedTemporaryFile(dir=self._path, suffix=PARTIAL, delete=False) as file:
                partial = Path(file.name)
                try:
                    file.write(entry_head(value) + value)
                    file.close()
                    partial.replace(self._file(key))
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise

    def evict(self, coming: int = 0) -> None:
        """Delete the least recently used entries until `coming` more bytes fit under the limit."""
        if self.most is None:
            return
        entries = []
        for path in self._path.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process may evict at the same time
                entries.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        entries.sort()
        total = sum(size for _, size, _ in entries) + coming
        for _, size, path in entries:
            if total <= self.most:
                break
            path.unlink(missing_ok=True)
            total -= size


def entry_head(value: bytes) -> bytes:
    """What stands before an entry in its file: the format's mark and the entry's digest."""
    return MARK + blake2b(value, digest_size=HEAD_BYTES - len(MARK)).digest()


def machine_digest() -> str:
    """A short name for this machine's instruction set: a program for another CPU must not be loaded here."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    flags = re.search(r"^(?:flags|Features)\s*:.*$", info, re.MULTILINE)
    text = platform.machine() + (flags[0] if flags else "")
    return blake2b(text.encode(), digest_size=4).hexdigest()


def folder() -> Path | None:
    """Where everything that may be thrown away is kept; None when `HOTLOOP_CACHE=off`."""
    named = os.environ.get("HOTLOOP_CACHE", "")
    if named.lower() in ("off", "0", "false", "no"):
        return None
    if named:
        try:
            return expand_path(named)
        except ValueError as error:
            raise OptionError(f"HOTLOOP_CACHE {named}: {error}") from None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotloop"


def parse_size(text: str) -> int | None:
    """Bytes from `2GB`, `500 MB`, `1.5GiB`; None for `none`, which is no limit."""
    if text.strip().lower() in ("none", "unlimited"):
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in UNITS or len(match[1]) > LONGEST_NUMBER:
        raise ValueError("must be a size such as 500MB or 2GB, or none for no limit")
    return int(float(match[1]) * UNITS[match[2]])


def show_size(size: int) -> str:
    """Bytes for people: `1.5 GB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def limit() -> int | None:
    """The most bytes that programs may take: `HOTLOOP_CACHE_LIMIT`, else what was set, else 4 GB."""
    origin, text, root = "HOTLOOP_CACHE_LIMIT", os.environ.get("HOTLOOP_CACHE_LIMIT") or None, folder()
    if text is None and root is not None:
        origin = str(root / "limit")
        with contextlib.suppress(OSError):
            text = (root / "limit").read_text()
    if text is None:
        return DEFAULT_LIMIT
    try:
        return parse_size(text)
    except ValueError as error:
        raise OptionError(f"{origin} {text.strip()}: {error}") from error


def set_limit(size: int | None) -> None:
    """Remember a limit for this cache folder and evict what is over it."""
    root = folder()
    if root is None:
        raise OptionError("HOTLOOP_CACHE=off: there is no cache to limit")
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "limit").write_text("none" if size is None else str(size))
    except OSError as error:
        raise OptionError(
            f"{root}: cannot write here ({error.strerror}); set HOTLOOP_CACHE to a folder of yours"
        ) from error
    if size is not None:
        Store(root / "programs", size).evict()


class Usage(NamedTuple):
    entries: int
    bytes: int


def usage() -> Usage:
    """The number of cached programs, and the bytes that they and XLA's notes beside them take."""
    root = folder()
    sizes: dict[Path, int] = {}
    for path in (root / "programs").rglob("*") if root else ():
        with contextlib.suppress(OSError):  # another process may evict at the same time
            sizes[path] = path.stat().st_size if path.is_file() else 0
    return Usage(sum(path.suffix == SUFFIX for path in sizes), sum(sizes.values()))


def clear() -> Usage:
    """Delete the compiled programs (and nothing that hotloop or XLA did not put there); what was freed."""
    freed = usage()
    root = folder()
    if root is None or not freed.bytes:
        return freed
    programs = root / "programs"
    try:
        for path in (*programs.glob(f"*{SUFFIX}"), *programs.glob(f"*{PARTIAL}")):
            path.unlink(missing_ok=True)
        for path in programs.glob("xla_gpu_*"):
            shutil.rmtree(path)
    except OSError as error:
        raise OptionError(f"{error.filename}: cannot delete it ({error.strerror})") from error
    left = usage()
    return Usage(freed.entries - left.entries, freed.bytes - left.bytes)


def enable(warn: Callable[[str], None] = warnings.warn) -> None:
    """Let jax keep every compiled program of this process here; call it before the first compilation."""
    root = folder()
    if root is None or rehearsal.is_on():  # in a rehearsal nothing is compiled, and no folder made
        configure(jax_enable_compilation_cache=False)
        return
    programs = root / "programs"
    try:
        programs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn(f"{programs}: programs are not kept ({error.strerror}); set HOTLOOP_CACHE to another folder")
        return
    store = Store(programs, limit())
    # There is no public way to say how entries are kept; a test holds jax to the name replaced here.
    from jax._src import compilation_cache

    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = lambda path: (store, path)  # type: ignore[assignment,return-value]
    configure(
        jax_enable_compilation_cache=True,
        jax_compilation_cache_dir=str(programs),
        jax_persistent_cache_min_compile_time_secs=0.0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    )
