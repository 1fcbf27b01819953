"""One program in a session of its own: started, watched, and ended with everything it started.

Its output goes to two files of bounded size. A timeout ends the whole process group, first politely; so does
Ctrl-C. It knows neither benchmarks nor metrics.
"""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from hotloop.bench.capture import Capture
from hotloop.engine.interrupt import before_leaving

CHUNK = 1 << 16
KEEP_BYTES = 1 << 30
GRACE = 5.0  # seconds between asking a program to end and ending it
LINGER = 2.0  # seconds for the output of a program that has ended while something it started goes on
LONGEST_WAIT = 86400.0  # the system's own limit is some weeks
POLL = 0.01  # seconds between looks at the program where the system cannot tell us
MARK = "HOTLOOP_BENCH_LOG"
"""Variable that a program and all its descendants carry: the folder of its logs."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended; times are seconds since 1970, `seconds` is by a clock that is never set."""

    exitcode: int
    timed_out: bool
    start: float
    end: float
    seconds: float
    reason: str = ""
    """Why it could not even be started."""
    left_out: int = 0
    """Bytes of output that the bound left out."""


def run_one(
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
) -> Outcome:
    """Run a program to its end or its timeout; `tick` hears every `period` seconds how long it has run."""
    start, clock = time.time(), time.monotonic()
    with ExitStack() as stack:
        logs = [
            stack.enter_context(closing(Capture(path, keep_bytes))) for path in (stdout_path, stderr_path)
        ]
        try:
            process = _start(argv, cwd, env)
        except (OSError, ValueError) as error:
            return Outcome(_not_started(error), False, start, start, 0.0, _why(error, argv, cwd))
        stack.enter_context(before_leaving(lambda: _signal_group(process.pid, signal.SIGKILL)))
        pump = stack.enter_context(closing(Pump(process, logs)))
        ended, exited = False, clock
        try:
            started(process.pid)
            deadline = None if timeout is None else clock + timeout
            ended = pump.run(deadline, lambda: pump.exited, tick, period)
            exited = time.monotonic()
        finally:
            _end(process, pump, LINGER if ended else grace, polite=not ended, mark=env.get(MARK))
    seconds = exited - clock
    left_out = sum(log.left_out for log in logs)
    return Outcome(process.returncode, not ended, start, start + seconds, seconds, left_out=left_out)


def _start(argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        argv,
        cwd=cwd,
        env=dict(env),
        stdin=nothing,
        stdout=pipe,
        stderr=pipe,
        bufsize=0,
        start_new_session=True,
    )


def _not_started(error: Exception) -> int:
    """The status that a shell would give."""
    return 127 if isinstance(error, FileNotFoundError) else 126


def _why(error: Exception, argv: Sequence[str], cwd: Path) -> str:
    if not cwd.is_dir():
        return f"there is no folder {cwd} to run in"
    if isinstance(error, FileNotFoundError):
        return f"there is no program '{argv[0]}'"
    said = error.strerror if isinstance(error, OSError) else str(error)
    return f"'{argv[0]}' cannot be started: {said}"


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
            wait = min(next_tick, float("inf") if deadline is None else deadline) - now
            self._step(wait if self._pidfd is not None else min(wait, POLL))
            now = time.monotonic()
        return True

    def _step(self, wait: float) -> None:
        for key, _ in self._selector.select(
            None if wait == float("inf") else min(max(0.0, wait), LONGEST_WAIT)
        ):
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

    @property
    def finished(self) -> bool:
        """Whether the program has ended and nobody can print any more."""
        return self.exited and not self.open

    def close(self) -> None:
        """Give the pipes back."""
        self._selector.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def _end(
    process: "subprocess.Popen[bytes]", pump: Pump, patience: float, *, polite: bool, mark: str | None
) -> None:
    """End whatever is left of the program. It is not reaped before, so that its group's number stays its own."""
    try:
        if polite:
            _signal_group(process.pid, signal.SIGTERM)
        pump.run(time.monotonic() + patience, lambda: pump.finished)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        if mark and (polite or pump.open):
            end_marked(mark)
        pump.run(time.monotonic() + LINGER, lambda: pump.finished)
        process.wait()


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def end_marked(mark: str, within: bool = False) -> int:
    """Kill the processes that carry this mark, such as those that have left their session; how many there were.

    With `within` the marks of all folders in that folder count too.
    """
    wanted = f"{MARK}={mark}".encode()
    count = 0
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().split(b"\0")
            found = wanted in variables or (
                within and any(one.startswith(wanted + b"/") for one in variables)
            )
            if found and (pid := int(entry.parent.name)) != os.getpid():
                os.kill(pid, signal.SIGKILL)
                count += 1
        except OSError:  # another user's, or gone
            continue
    return count
