"""A real `hotloop serve` in a child process on a free port."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time

LIMIT = 60.0


class ServedProcess:
    """Started with these words; used as a context it waits for `ready`, and is killed at the end if it still runs."""

    def __init__(self, *words, wait=True, program=("-m", "hotloop", "serve")):
        # A server has one device, unlike the tests around it.
        flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
        ports = ["--port", "0", "--grpc-port", "none"]
        command = [sys.executable, *program, *ports, *map(str, words)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines, self._unread, self._wait = [], queue.Queue(), wait
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._unread.put(line.strip())
        self._unread.put(None)

    def __enter__(self):
        self.port = int(self.wait_for("listening on").rpartition(":")[2])
        if self._wait:
            self.wait_for("ready:")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def wait_for(self, beginning):
        """The next line that begins so."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            line = self._unread.get(timeout=max(0.1, end - time.monotonic()))
            if line is None:
                raise AssertionError(f"ended before '{beginning}': {self.lines} {self.process.stderr.read()}")
            self.lines.append(line)
            if line.startswith(beginning):
                return line
        raise AssertionError(f"no line '{beginning}': {self.lines}")

    def stop(self, number=signal.SIGTERM):
        """Its exit status, and what it said on standard error."""
        self.process.send_signal(number)
        self.process.wait(LIMIT)
        return self.process.returncode, self.process.stderr.read()
