"""Processes that must not outlive this one: started in groups of their own, read without end, stopped together.

It knows nothing of what they do.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

TAIL = 64 * 1024
"""Bytes of each stream of a child that are kept."""
GRACE = 10.0
"""Seconds in which a child that is told to stop may save."""


class Children:
    """The processes that must not outlive this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._running: set[subprocess.Popen[bytes]] = set()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A new child; KeyboardInterrupt once they were stopped."""
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                process_group=0,
            )
            self._running.add(child)
            return child

    def ended(self, child: subprocess.Popen[bytes]) -> None:
        """Nothing more to stop."""
        with self._lock:
            self._running.discard(child)

    def stop(self, grace: float = GRACE) -> None:
        """Ask every child to stop, then kill what is left of their groups; no child starts afterwards."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        try:
            _send(running, signal.SIGTERM)
            limit = time.monotonic() + grace
            for child in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, limit - time.monotonic()))
        finally:
            _send(running, signal.SIGKILL)

    def kill(self) -> None:
        """Kill them all, now."""
        self.stop(0)


def _send(children: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)


class Tail:
    """Reads a stream to its end in a thread and keeps the last part, so that a child never waits for us."""

    def __init__(self, stream: IO[bytes]):
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while part := os.read(stream.fileno(), TAIL):
                self._kept = (self._kept + part)[-TAIL:]

    def text(self) -> str:
        """What was kept, once the stream ended; a grandchild that holds it open is not waited for."""
        self._thread.join(GRACE / 2)
        return self._kept.decode(errors="replace")
