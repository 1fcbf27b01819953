"""One program in a session of its own: started, watched, and ended with everything it started. Its output goes to two
files that never grow past their bound, the head and the tail are kept; memory stays small however much is printed.
"""

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hotloop.engine.interrupt import before_leaving, hold_stops
from hotloop.engine.run import write_all

LONGEST_LINE = 1 << 20
WINDOW = 1 << 16
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
CHUNK = 1 << 16
KEEP_BYTES = 1 << 30
GRACE = 5.0  # seconds between asking a program to end and ending it
LINGER = 2.0  # seconds for the output of a program that has ended while something it started goes on
LONGEST_WAIT = 86400.0  # the system's own limit is some weeks
POLL = 0.01  # seconds between looks at the program where the system cannot tell us
MARK = "HOTLOOP_BENCH_LOG"  # the variable that a program and all it starts carry: the folder of its logs


class Capture:
    """A log file of at most about `keep` bytes; what lies between head and tail is left out, by whole lines."""

    def __init__(self, path: Path, keep: int):
        self.path, self.head, self.tail = path, max(keep // 2, 1), max(keep - keep // 2, 1)
        self.total = self.left_out = 0
        self._file = path.open("w+b", buffering=0)
        self._ring: BinaryIO | None = None

    def write(self, chunk: bytes) -> None:
        room = self.head - self.total
        self.total += len(chunk)
        if room > 0:
            write_all(self._file.fileno(), chunk[:room])
            chunk = chunk[room:]
        if not chunk:
            return
        if self._ring is None:
            self._ring = self.path.with_name(self.path.name + ".tail").open("w+b", buffering=0)
        chunk = chunk[-self.tail :]
        place = (self.total - len(chunk) - self.head) % self.tail
        self._ring.seek(place)
        write_all(self._ring.fileno(), chunk[: self.tail - place])
        if rest := chunk[self.tail - place :]:
            self._ring.seek(0)
            write_all(self._ring.fileno(), rest)

    def close(self) -> None:
        """Put head and tail together."""
        with self._file:
            if self._ring is not None:
                with self._ring:
                    self._join(self._ring, self.total - self.head)
                Path(self._ring.name).unlink()

    def _join(self, ring: BinaryIO, written: int) -> None:
        place = start = 0
        if written > self.tail:
            # Half a line could hold half a number: both sides end where a line does.
            self._file.seek(max(0, self.head - WINDOW))
            found = self._file.read(WINDOW).rfind(b"\n")
            kept = max(0, self.head - WINDOW) + found + 1 if found >= 0 else self.head
            self._file.truncate(kept)
            self._file.seek(kept)
            place = written % self.tail  # the oldest byte of the ring
            ring.seek(place)
            window = ring.read(WINDOW)
            ring.seek(0)
            window += ring.read(min(place, WINDOW - len(window)))
            start = window.find(b"\n") + 1  # how far behind it the first whole line begins
            self.left_out = self.total - kept - (self.tail - start)
            write_all(self._file.fileno(), f"[hotloop: {self.left_out} bytes left out here]\n".encode())
        for begin, end in (
            (place + start, min(written, self.tail)),
            (max(0, place + start - self.tail), place),
        ):
            ring.seek(begin)
            self._file.seek(0, os.SEEK_END)
            while chunk := ring.read(max(0, min(LONGEST_LINE, end - ring.tell()))):
                write_all(self._file.fileno(), chunk)


def read_output_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[str]:
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


@dataclass(frozen=True)
class ProcessResult:
    """How a program ended; times are seconds since 1970, `seconds` is by a clock that is never set."""

    exitcode: int
    timed_out: bool
    start: float
    end: float
    seconds: float
    reason: str = ""  # why it could not even be started
    left_out: int = 0  # bytes of output that the bound left out


def run_program(
    argv: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    timeout: float | None,
    stdout_path: Path,
    stderr_path: Path,
    keep_bytes: int = KEEP_BYTES,
    *,
    grace: float = GRACE,
    started: Callable[[int], None] = lambda pid: None,
    tick: Callable[[float], None] = lambda seconds: None,
    period: float = 1.0,
) -> ProcessResult:
    """Run a program to its end or its timeout; `tick` is called every `period` seconds with how long it has run."""
    start, clock = time.time(), time.monotonic()
    ended = False
    with ExitStack() as stack:
        paths = (stdout_path, stderr_path)
        logs = [stack.enter_context(closing(Capture(path, keep_bytes))) for path in paths]
        with (
            hold_stops()
        ):  # a signal that came before the end of the program is seen to would leave it running
            try:
                process = subprocess.Popen(
                    argv,
                    cwd=cwd,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                status, reason = _why_not_started(error, argv[0], cwd)
                return ProcessResult(status, False, start, start, 0.0, reason)
            stack.enter_context(before_leaving(lambda: _signal_group(process.pid, signal.SIGKILL)))
            stack.enter_context(process)
            pump = stack.enter_context(closing(Pump(process, logs)))
            stack.callback(
                lambda: _end(process, pump, LINGER if ended else grace, polite=not ended, mark=env.get(MARK))
            )
        started(process.pid)
        deadline = None if timeout is None else clock + timeout
        ended = pump.run(deadline, lambda: pump.exited, tick, period)
        seconds = time.monotonic() - clock
    left_out = sum(log.left_out for log in logs)
    return ProcessResult(process.returncode, not ended, start, start + seconds, seconds, left_out=left_out)


def _why_not_started(error: Exception, program: str, cwd: Path) -> tuple[int, str]:
    """The status that a shell would give, and the reason."""
    if not cwd.is_dir():
        reason = f"there is no folder {cwd} to run in"
    elif isinstance(error, FileNotFoundError):
        reason = f"there is no program '{program}'"
    else:
        why = error.strerror if isinstance(error, OSError) else str(error)
        reason = f"'{program}' cannot be started: {why}"
    return 127 if isinstance(error, FileNotFoundError) else 126, reason


class Pump:
    """Moves a program's output into its logs, and notices its end."""

    def __init__(self, process: "subprocess.Popen[bytes]", logs: Sequence[Capture]):
        self.process = process
        self.exited = False
        self._selector = selectors.DefaultSelector()
        for pipe, log in zip((process.stdout, process.stderr), logs, strict=True):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, log)
        self.open = len(logs)
        self._pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        if self._pidfd is not None:
            self._selector.register(self._pidfd, selectors.EVENT_READ)

    def run(
        self,
        deadline: float | None,
        finished: Callable[[], bool],
        tick: Callable[[float], None] = lambda seconds: None,
        period: float = float("inf"),
    ) -> bool:
        """Until it is finished (True) or the deadline has passed (False)."""
        start = now = time.monotonic()
        next_tick = start + period
        while not finished():
            if deadline is not None and now >= deadline:
                return False
            if now >= next_tick:
                tick(now - start)
                next_tick = now + period
            until = next_tick if deadline is None else min(next_tick, deadline)
            wait = min(until - now, LONGEST_WAIT if self._pidfd is not None else POLL)
            for key, _ in self._selector.select(max(0.0, wait)):
                if not isinstance(key.data, Capture):
                    self._selector.unregister(key.fileobj)
                    self.exited = True
                elif chunk := os.read(key.fd, CHUNK):
                    key.data.write(chunk)
                else:
                    self._selector.unregister(key.fileobj)
                    self.open -= 1
            if self._pidfd is None:
                self.exited = self.process.poll() is not None
            now = time.monotonic()
        return True

    def finished(self) -> bool:
        """Whether the program has ended and nothing can be printed any more."""
        return self.exited and not self.open

    def close(self) -> None:
        self._selector.close()
        if self._pidfd is not None:
            os.close(self._pidfd)


def _end(
    process: "subprocess.Popen[bytes]", pump: Pump, patience: float, *, polite: bool, mark: str | None
) -> None:
    """End whatever is left of the program. It is not reaped before, so that its group's number stays its own."""
    try:
        if polite:
            _signal_group(process.pid, signal.SIGTERM)
        pump.run(time.monotonic() + patience, pump.finished)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        if mark and (polite or pump.open):
            kill_marked(mark)
        pump.run(time.monotonic() + LINGER, pump.finished)
        process.wait()


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def kill_marked(mark: str, within: bool = False) -> int:
    """Kill the processes that carry this mark, `within`: or that of a folder in it; how many there were."""
    wanted = f"{MARK}={mark}".encode()
    count = 0
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().split(b"\0")
            inside = within and any(one.startswith(wanted + b"/") for one in variables)
            if (inside or wanted in variables) and (pid := int(entry.parent.name)) != os.getpid():
                os.kill(pid, signal.SIGKILL)
                count += 1
        except OSError:  # another user's, or gone
            continue
    return count
