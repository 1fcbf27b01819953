"""What a program prints, in a file that never grows past its bound: the head and the tail are kept.

Memory stays small however much is printed: writing goes through in chunks, reading line by line with long lines
cut. It knows neither processes nor metrics.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 20
WINDOW = 1 << 16
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Capture:
    """A log file of at most about `keep` bytes; what lies between head and tail is left out, by whole lines."""

    def __init__(self, path: Path, keep: int):
        self.path, self.head, self.tail = path, max(keep // 2, 1), max(keep - keep // 2, 1)
        self.total = self.left_out = 0
        self._file = path.open("w+b", buffering=0)
        self._ring: BinaryIO | None = None

    def write(self, chunk: bytes) -> None:
        """Take what was printed next."""
        room = self.head - self.total
        self.total += len(chunk)
        if room > 0:
            _write(self._file, chunk[:room])
            chunk = chunk[room:]
        if chunk:
            self._write_ring(chunk, self.total - len(chunk) - self.head)

    def _write_ring(self, chunk: bytes, written: int) -> None:
        if self._ring is None:
            self._ring = self.path.with_name(self.path.name + ".tail").open("w+b", buffering=0)
        if len(chunk) > self.tail:
            written += len(chunk) - self.tail
            chunk = chunk[-self.tail :]
        place = written % self.tail
        self._ring.seek(place)
        _write(self._ring, chunk[: self.tail - place])
        if rest := chunk[self.tail - place :]:
            self._ring.seek(0)
            _write(self._ring, rest)

    def close(self) -> None:
        """Put head and tail together."""
        with self._file:
            if self._ring is not None:
                with self._ring:
                    self._join(self._ring, self.total - self.head)
                Path(self._ring.name).unlink()

    def _join(self, ring: BinaryIO, written: int) -> None:
        if written <= self.tail:
            _copy(ring, 0, written, self._file)
            return
        # Half a line could hold half a number: both sides end where a line does.
        kept = _last_line_end(self._file, self.head)
        self._file.truncate(kept)
        self._file.seek(kept)
        place = written % self.tail  # the oldest byte of the ring
        start = self._first_line(ring, place)
        self.left_out = self.total - kept - (self.tail - start)
        _write(self._file, f"[hotloop: {self.left_out} bytes left out here]\n".encode())
        _copy(ring, place + start, self.tail, self._file)
        _copy(ring, max(0, place + start - self.tail), place, self._file)

    def _first_line(self, ring: BinaryIO, place: int) -> int:
        """How far behind the oldest byte the first whole line begins."""
        ring.seek(place)
        window = ring.read(WINDOW)
        ring.seek(0)
        window += ring.read(min(place, WINDOW - len(window)))
        return window.find(b"\n") + 1


def _write(file: BinaryIO, chunk: bytes) -> None:
    """All of it: an unbuffered file may take less at a time."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]


def _last_line_end(file: BinaryIO, size: int) -> int:
    """The place after the last line end of a file; its size where the last line is very long."""
    start = max(0, size - WINDOW)
    file.seek(start)
    found = file.read(size - start).rfind(b"\n")
    return start + found + 1 if found >= 0 else size


def _copy(source: BinaryIO, start: int, end: int, target: BinaryIO) -> None:
    source.seek(start)
    target.seek(0, os.SEEK_END)
    while start < end:
        chunk = source.read(min(LONGEST_LINE, end - start))
        if not chunk:
            return
        _write(target, chunk)
        start += len(chunk)


def lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[str]:
    """The lines of a file, each cut at `longest` bytes; a carriage return ends a line too (progress bars)."""
    with path.open("rb") as file:
        while line := file.readline(longest):
            cut = line[-1:] != b"\n"
            for part in line.rstrip(b"\r\n").replace(b"\r", b"\n").split(b"\n"):
                yield part.decode("utf-8", "replace")
            while cut and (rest := file.readline(longest)):
                cut = rest[-1:] != b"\n"


def last_lines(path: Path, count: int, most: int = 8192) -> list[str]:
    """The last lines of a file, without what would upset a terminal or an XML file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            text = file.read(most).decode("utf-8", "replace")
    except OSError:
        return []
    found = [CONTROL.sub("", line).rstrip() for line in text.replace("\r", "\n").split("\n")]
    return [line for line in found if line][-count:]
