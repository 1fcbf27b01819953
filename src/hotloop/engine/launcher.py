"""The processes of one run on this machine: started, watched, ended together, and started again where asked for.

They find each other by `jax.distributed`; what it cannot do is done here. A process that is gone, stopped or stuck
takes its peers with it without a word, so it is the launcher that names it and ends the rest. A launcher knows its own
machine's processes alone: of a peer elsewhere it sees that jax aborted one of its own. No jax here.
"""

import json
import os
import platform
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from hotloop.engine.interrupt import (
    SIGNALS,
    Stopped,
    StopRequest,
    before_leaving,
    name_of,
    note_stops,
    share_stops,
)
from hotloop.engine.launched_process import ABORTED, LaunchedProcess, OrphanGuard
from hotloop.engine.rendezvous import probe_port
from hotloop.engine.run import has_begun
from hotloop.errors import HotloopError

HEARTBEAT, STALL = 30.0, 600.0
POLL, LOOK = 0.05, 0.5  # seconds between looks for ended processes, and at notes
GRACE = 3.0  # seconds that the others of a lost process have, and that a save has to end
STOP_GRACE = 10.0  # seconds in which all should follow one that was stopped, as agreed
ECHO = 8.0  # seconds in which process 0 should have said what another failed of
SAVING = 60.0  # seconds that it may take for that while it saves
SHOWN_LINES = 10
STOPPED = 128 + signal.SIGINT
"""The status of a launch that was stopped, whoever heard which signal first: there is one for all processes."""
STOP_STATUSES = {128 + number: number for number in SIGNALS} | {-number: number for number in SIGNALS}
ABORT_STATUSES = (-signal.SIGABRT, ABORTED)


class LostProcess(HotloopError):
    """A process was killed, stopped or stuck, or a peer on another machine was."""

    exit_status = ABORTED


class FailedProcess(HotloopError):
    """A process ended with an error of its own, whose line this is."""

    def __init__(self, number: int, exit_status: int, text: str):
        super().__init__(text)
        self.number, self.exit_status = number, exit_status


@dataclass(frozen=True)
class Launch:
    """What to start here: a process for each of `environments`, numbered from `first` on, of `total` in all."""

    program: tuple[str, ...]
    words: tuple[str, ...]  # of its command
    environments: tuple[Mapping[str, str], ...]  # what each has beside this process's own
    first: int = 0
    total: int = 1
    coordinator: str | None = None  # host:port of process 0; None: a free port here
    heartbeat: float = HEARTBEAT  # seconds without a sign after which jax takes a peer for gone
    stall: float = STALL  # seconds without progress after which a process is lost
    max_restarts: int = 0

    def describe(self, number: int) -> str:
        return f"process {number} of {self.total} on {platform.node()}"


Say = Callable[[str], None]


def run_processes(launch: Launch, say: Say) -> None:
    """Run them to their end; LostProcess, FailedProcess or Stopped where that is not a good one."""
    restarts, has_moved, added = 0, False, tuple[str, ...]()
    # Process 0 says that it heard a signal, where it is here.
    listening = note_stops(say if launch.first else lambda text: None)
    with (
        TemporaryDirectory(prefix="hotloop-launch-") as folder,
        OrphanGuard(folder) as guard,
        share_stops(),
        listening as stop,
    ):
        for start in count():
            with (
                ProcessGroup(launch, added, Path(folder) / str(start), guard, say) as group,
                before_leaving(group.kill),
                before_leaving(lambda: shutil.rmtree(folder, ignore_errors=True)),
            ):
                try:
                    group.watch(stop)
                    return
                except (LostProcess, FailedProcess) as error:
                    moves = not has_moved and group.has_lost_its_port()
                    restarts_no_more = isinstance(error, FailedProcess) or restarts == launch.max_restarts
                    if stop.number is not None or (restarts_no_more and not moves):
                        raise
                    reason = str(error)
            if moves:
                has_moved = True
                say(f"the port {group.port} of process 0 was taken meanwhile; all start again at another")
            else:
                added, restarts = group.words_to_resume(), restarts + 1
                say(f"{reason}; all start again (restart {restarts} of {launch.max_restarts})")


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class ProcessGroup(AbstractContextManager["ProcessGroup"]):
    """The processes of one start; whatever runs of them at the end of the context is ended there."""

    def __init__(self, launch: Launch, added: Sequence[str], folder: Path, guard: OrphanGuard, say: Say):
        """Start them with the words of the launch and those `added` to them, which resume a run."""
        self.launch, self.added, self.say = launch, tuple(added), say
        self.processes: list[LaunchedProcess] = []
        self._folder, self._guard, self._selector = folder, guard, selectors.DefaultSelector()
        self._stopped_since: dict[int, float] = {}
        self._next_look = 0.0
        self.port = find_free_port() if launch.coordinator is None else None
        """Where process 0 listens, if that is the launcher's own choice."""
        folder.mkdir()
        shared = {
            "HOTLOOP_COORDINATOR": launch.coordinator or f"127.0.0.1:{self.port}",
            "HOTLOOP_PROCESSES": str(launch.total),
            "HOTLOOP_HEARTBEAT": f"{launch.heartbeat:g}",
            "HOTLOOP_NOTES": str(folder),
            "HOTLOOP_RESUME": json.dumps(added),
        }
        try:
            for number, own in enumerate(launch.environments, launch.first):
                environment = {**os.environ, **own, **shared, "HOTLOOP_PROCESS": str(number)}
                self._start(number, (*launch.program, *launch.words, *added), environment)
        except BaseException:
            self.end()
            raise

    def _start(self, number: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        process = LaunchedProcess.start(number, command, environment, self._folder, shown=number == 0)
        self.processes.append(process)
        self._guard.add(process.child.pid)
        if process.child.stdout is not None:
            self._selector.register(process.child.stdout, selectors.EVENT_READ, process)
        if hasattr(os, "pidfd_open"):  # to know at once; elsewhere a look every POLL seconds must do
            self._selector.register(os.pidfd_open(process.child.pid), selectors.EVENT_READ)

    @property
    def running(self) -> list[LaunchedProcess]:
        return [process for process in self.processes if process.status is None]

    def watch(self, stop: StopRequest) -> None:
        """Until all have ended well; else the error that says what became of which, while others may still run."""
        while self.running:
            has_read_notes = self._take_events()
            self._raise_if_ended_badly()
            if stop.number is not None:
                self._pass_on(stop.number)
            if has_read_notes:
                self._raise_if_stuck()

    def _take_events(self) -> bool:
        """Wait a moment for output and ends; whether it was time to read the notes, too."""
        for key, _ in self._selector.select(POLL):
            if key.data is None:
                self._selector.unregister(key.fd)
                os.close(key.fd)
            elif not key.data.read_output():
                self._selector.unregister(key.fileobj)
        for process in self.processes:
            process.look()
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + LOOK
        self._read_notes()
        return True

    def _read_notes(self) -> None:
        for process in self.processes:
            process.read_note()
        if any(process.note.phase == "compiling" for process in self.running):
            for process in self.running:  # the others wait for it
                process.progress_at = time.monotonic()

    def _raise_if_ended_badly(self) -> None:
        ended = [process for process in self.processes if process.status not in (None, 0)]
        if not ended:
            return
        statuses = {process.number: process.status or 0 for process in ended}
        stopped = [each for each in ended if each.status in STOP_STATUSES]
        aborted = [each for each in ended if each.status in ABORT_STATUSES]
        lost = [each for each in ended if statuses[each.number] < 0 and each not in (*stopped, *aborted)]
        failed = [each for each in ended if each not in (*stopped, *aborted, *lost)]
        if lost:
            self._raise_lost(lost[0], lost[0].describe_end())
        elif failed:
            self._raise_failed(failed[0])
        elif stopped:
            self._follow(stopped[0])
        else:
            frozen = next((each for each in self.running if each.is_stopped()), None)
            if frozen is not None:
                self._raise_lost(frozen, "it was stopped (SIGSTOP), and jax aborted its peers")
            self._raise_lost(aborted[0], aborted[0].describe_end())

    def _raise_lost(self, process: LaunchedProcess, why: str) -> None:
        process.read_note()
        self._show_last_lines(process)
        note = process.note
        where = f" while {note.phase}, at update {note.update}" if note.phase else " before it had begun"
        raise LostProcess(f"{self.launch.describe(process.number)} was lost{where}: {why}")

    def _show_last_lines(self, process: LaunchedProcess) -> None:
        for line in process.last_lines(SHOWN_LINES):
            self.say(f"process {process.number} | {line}")

    def _raise_failed(self, process: LaunchedProcess) -> None:
        """The line of the process that failed, unless process 0, which it has told, says it by itself."""
        first = self.processes[0]
        if first.number == 0 and first is not process:
            self._wait_until(lambda: first.status is not None, ECHO)
            self._wait_until(lambda: first.status is not None or first.note.phase != "saving", SAVING)
            process = first if first.status == process.status else process
        last = process.last_lines(1)
        text = last[0].removeprefix("hotloop: error: ") if last else process.describe_end()
        status = process.status or 1
        raise FailedProcess(process.number, status, f"{self.launch.describe(process.number)}: {text}")

    def _follow(self, process: LaunchedProcess) -> None:
        """One was stopped: the others were told so by it, and if they were not, are by us."""
        number = STOP_STATUSES[process.status or 0]
        self._wait_until(lambda: not self.running, STOP_GRACE)
        for other in self.running:
            if other.note.phase != "saving":
                other.send(number)
        self._await_end()
        self._raise_if_not_stopped()
        raise _stopped(
            f"process {process.number} was stopped by {name_of(number)}, the others with it", number
        )

    def _pass_on(self, number: int) -> None:
        for process in self.running:
            process.send(number)
        self._await_end()
        self._raise_if_not_stopped()
        count = len(self.processes)
        ended = f"all {count} processes have" if count > 1 else "the process here has"
        raise _stopped(f"stopped by {name_of(number)}; {ended} ended", number)

    def _raise_if_not_stopped(self) -> None:
        """All were told to stop. Where one failed meanwhile, at the last checkpoint say, that is how all have ended.
        One that was killed is named; if it is process 0, and not by us, nobody has saved."""
        bad = [process for process in self.processes if process.status not in (0, *STOP_STATUSES)]
        failed = [each for each in bad if (each.status or 0) > 0 and each.status not in ABORT_STATUSES]
        if failed:
            self._raise_failed(failed[0])
        for process in bad:
            if process.number == 0 and not process.was_killed and process.status not in ABORT_STATUSES:
                self._raise_lost(process, process.describe_end())
            self._show_last_lines(process)
            self.say(f"{self.launch.describe(process.number)}: {process.describe_end()}")

    def _await_end(self) -> None:
        """Until all that were told to stop have ended. One that does nothing more is killed: what saves or compiles
        has as long as a run without progress has, and so have all until the first has ended."""
        asked = time.monotonic()
        first_end = None
        while self.running:
            self._take_events()
            if first_end is None and len(self.running) < len(self.processes):
                first_end = time.monotonic()
            for process in self.running:
                busy = first_end is None or process.note.phase in ("saving", "compiling")
                patience = self.launch.stall if busy else STOP_GRACE
                patience = self.launch.heartbeat if process.is_stopped() else patience
                if time.monotonic() - max(asked, process.progress_at, first_end or asked) > patience:
                    self.say(f"{self.launch.describe(process.number)} does not stop and is killed")
                    process.kill_group()

    def _wait_until(self, reached: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not reached() and time.monotonic() < limit:
            self._take_events()

    def _raise_if_stuck(self) -> None:
        now = time.monotonic()
        for process in self.running:
            if not process.is_stopped():
                self._stopped_since.pop(process.number, None)
            elif now - self._stopped_since.setdefault(process.number, now) > self.launch.heartbeat:
                self._raise_lost(process, f"stopped (SIGSTOP) for {self.launch.heartbeat:g} s")
        if any(now - each.progress_at > self.launch.stall for each in self.running):
            stopped = next((each for each in self.running if each.is_stopped()), None)
            if stopped is not None:
                self._raise_lost(
                    stopped, f"stopped (SIGSTOP), with no progress for {self.launch.stall:g} s (--stall)"
                )
            # They wait for each other, and who came furthest may have been quiet for longest.
            quiet = [each for each in self.running if now - each.progress_at > self.launch.stall / 2]
            slowest = min(quiet, key=lambda each: (each.note.update, each.progress_at))
            self._raise_lost(slowest, f"it made no progress for {self.launch.stall:g} s (--stall)")

    def has_lost_its_port(self) -> bool:
        """Whether nothing has begun since another program took the port between its choice and process 0."""
        first = self.processes[0]
        first.read_note()
        if self.port is None or first.status is None or first.note.phase not in ("", "starting"):
            return False
        try:
            probe_port(self.port)
        except OSError:
            return True
        return False

    def words_to_resume(self) -> tuple[str, ...]:
        """What the command needs besides to go on with its run; as before where none has begun since. All have ended:
        the one that makes the folder may do so while another is lost."""
        for process in self.processes:
            process.read_note()
        note = next((process.note for process in self.processes if process.note.resume), None)
        return note.resume if note and (note.run is None or has_begun(Path(note.run))) else self.added

    def kill(self) -> None:
        for process in self.processes:
            process.kill_group()

    def end(self) -> None:
        """Nothing that was started here runs afterwards, nor what it started itself."""
        others, first = self.running, next((each for each in self.running if each.number == 0), None)
        if first is not None:
            # Without its peers it can do no more than end its save, and would only speak of their loss.
            self._wait_until(lambda: first.note.phase != "saving", GRACE)
            first.kill_group()
            others = [each for each in others if each is not first]
        for process in others:
            process.kill_group() if process.is_stopped() else process.send(signal.SIGTERM)
        self._wait_until(lambda: not self.running, GRACE)
        for process in self.processes:
            process.close()
            self._guard.remove(process.child.pid)
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if key.data is None:
                os.close(key.fd)
        self._selector.close()

    def __exit__(self, *error: object) -> None:
        self.end()


def _stopped(text: str, number: int) -> Stopped:
    stop = Stopped(text, number)
    stop.exit_status = STOPPED
    return stop
