"""Child processes that must not outlive this one: in groups of their own, stopped together.

With a guard they do not even when this process is killed. Whoever starts several programs at once may use it.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hotloop.engine.launched_process import OrphanGuard

GRACE_SECONDS = 10.0  # in which a child that is told to stop may save


class ChildProcesses:
    """Processes that are started one by one and stopped together."""

    def __init__(self, guard: OrphanGuard | None = None) -> None:
        self._lock, self._guard = threading.Lock(), guard
        self._stopped = False
        self._running: set[subprocess.Popen[bytes]] = set()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], out: Any = None, err: Any = None
    ) -> subprocess.Popen[bytes]:
        """A new child that writes to these files; KeyboardInterrupt once they were stopped."""
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            # A group of its own: Ctrl-C is for us, who then stop it and whatever it started.
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, process_group=0
            )
            self._running.add(child)
            if self._guard is not None:
                self._guard.add(child.pid)
            return child

    def forget(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(child)
            if self._guard is not None:
                self._guard.remove(child.pid)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Ask every child to stop, then kill what is left of their groups; no child starts afterwards."""
        with self._lock:
            self._stopped = True
            running = list(self._running)

        def send(number: signal.Signals) -> None:
            for child in running:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, number)

        try:
            send(signal.SIGTERM)
            limit = time.monotonic() + grace
            for child in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, limit - time.monotonic()))
        finally:
            send(signal.SIGKILL)
