"""One process that a launcher started: in a group of its own, with its note, its output and how it ended.

A process is not reaped before its group is killed, so that the group's number stays its own. No jax here.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hotloop.engine import orphan_guard
from hotloop.engine.process_log import FOLDER as LOGS
from hotloop.errors import RunError
from hotloop.options.files import load_json

LONGEST_LOG = 1 << 20  # bytes of a process's output that are kept, at most twice as many on the disk
LAST_BYTES = 1 << 13
ABORTED = 128 + signal.SIGABRT  # what a shell calls a process that jax ended because a peer was gone
CHUNK = 1 << 16
CHATTER = "[Gloo] Rank "  # a line about each connection, which says nothing of a failure


class OrphanGuard(AbstractContextManager["OrphanGuard"]):
    """Kills what is left of the groups it knows once this process is gone, be it by SIGKILL, and removes `folders`."""

    def __init__(self, *folders: str) -> None:
        command = [sys.executable, "-I", "-S", str(Path(orphan_guard.__file__)), *folders]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it; the processes end with this one all the same
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class OutputLog:
    """The end of what a process prints until it logs by itself; the file never grows past twice `LONGEST_LOG`."""

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO = path.open("a+b", buffering=0)

    def write(self, chunk: bytes) -> None:
        with suppress(OSError):  # a full disk costs the log, never the run
            size = self._file.seek(0, os.SEEK_END)
            if size + len(chunk) > 2 * LONGEST_LOG:
                self._file.seek(max(0, size - LONGEST_LOG))
                kept = self._file.read()
                self._file.truncate(0)
                self._file.write(kept[kept.find(b"\n") + 1 :])
            self._file.write(chunk[-LONGEST_LOG:])

    def close(self) -> None:
        self._file.close()


def read_last_lines(paths: Sequence[Path], count: int) -> list[str]:
    """The last lines of these files, one after the other, that are not empty, without what would upset a terminal."""
    text = ""
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            text += file.read().decode(errors="replace").replace("\r", "\n") + "\n"
    lines = ("".join(each for each in line if each.isprintable()).strip() for line in text.split("\n"))
    return [line for line in lines if line and not line.startswith(CHATTER)][-count:]


@dataclass(frozen=True)
class Note:
    """What a process last said of itself; an empty phase where it has said nothing yet."""

    phase: str = ""
    update: int = 0
    run: str | None = None
    resume: tuple[str, ...] = ()

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Note":
        words = said.get("resume") or ()
        run = said.get("run")
        return cls(
            str(said.get("phase", "")),
            int(said.get("update") or 0),
            None if run is None else str(run),
            tuple(str(word) for word in words),
        )


@dataclass
class LaunchedProcess:
    """A process of the launch by its number; `status` is as Popen has it, None while it runs."""

    number: int
    child: "subprocess.Popen[bytes]"
    note_path: Path
    log: OutputLog | None  # None: its output goes through as it is
    status: int | None = None
    note: Note = field(default_factory=Note)
    progress_at: float = field(default_factory=time.monotonic)  # when its note last changed
    was_killed: bool = False  # by us
    _note_time: int = 0

    @classmethod
    def start(
        cls, number: int, command: Sequence[str], environment: Mapping[str, str], folder: Path, *, shown: bool
    ) -> "LaunchedProcess":
        """Start it with its notes (and its output, unless it is `shown`) in the folder; RunError where it cannot be."""
        log = None if shown else OutputLog(folder / f"{number}.out")
        out = None if shown else subprocess.PIPE
        try:
            # A group of its own: Ctrl-C is for the launcher, who passes it on.
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if shown else subprocess.STDOUT,
                env=dict(environment),
                process_group=0,
            )
        except OSError as error:
            raise RunError(f"process {number} cannot be started: {error.strerror}") from None
        if child.stdout is not None:
            os.set_blocking(child.stdout.fileno(), False)
        return cls(number, child, folder / f"{number}.json", log)

    def last_lines(self, count: int) -> list[str]:
        """What it said last, here or, once it had met the others, in a file of its own; none where all was shown."""
        if self.log is None:
            return []
        self.read_output()
        own = self.note_path.with_suffix(".log")
        # Where a run goes on, its folder has a log of an earlier process until this one's lines move there.
        logs = [Path(self.note.run) / LOGS / own.name, own] if self.note.run else [own]
        there = [path for path in logs if path.exists()]
        newest = [max(there, key=lambda path: path.stat().st_mtime_ns)] if there else []
        return read_last_lines((self.log.path, *newest), count)

    def read_output(self) -> bool:
        """Take what it has printed; False once nothing can come any more."""
        if self.child.stdout is None or self.log is None:
            return False
        try:
            while chunk := os.read(self.child.stdout.fileno(), CHUNK):
                self.log.write(chunk)
        except BlockingIOError:
            return True
        return False

    def look(self) -> None:
        """Find out whether it has ended, without reaping it where the system can tell."""
        if self.status is not None:
            return
        if not hasattr(os, "waitid"):
            self.status = self.child.poll()
            return
        ended = os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def read_note(self) -> None:
        """Take its note if that is a new one; a note that cannot be read is none."""
        with suppress(OSError, ValueError, TypeError, AttributeError):
            changed = self.note_path.stat().st_mtime_ns
            if changed != self._note_time:
                self.note = Note.of(load_json(self.note_path))
                self._note_time, self.progress_at = changed, time.monotonic()

    def is_stopped(self) -> bool:
        """Whether somebody stopped it (SIGSTOP), where the system tells."""
        try:
            state = Path(f"/proc/{self.child.pid}/stat").read_text()
        except OSError:
            return False
        return state.rpartition(")")[2].split()[0] in ("T", "t")

    def send(self, number: int) -> None:
        """To the process alone, which ends its own workers."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.child.pid, number)

    def kill_group(self) -> None:
        self.was_killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all that is left of its group and reap it."""
        self.kill_group()
        code = self.child.wait()
        self.status = code if self.status is None else self.status
        self.read_output()
        if self.child.stdout is not None:
            self.child.stdout.close()
        if self.log is not None:
            self.log.close()

    def describe_end(self) -> str:
        """`killed by SIGKILL`, `ended with status 2`."""
        assert self.status is not None
        if self.status in (-signal.SIGABRT, ABORTED):
            return "aborted, as jax does when a peer is gone (status 134)"
        if self.status < 0:
            names = {each.value: each.name for each in signal.Signals}
            return f"killed by {names.get(-self.status, f'signal {-self.status}')}"
        return f"ended with status {self.status}"
