"""The store of texts that connected processes share, by jax's coordination service, and what they say in it: process
0's word, a stop that one was asked for, a failure, and that they leave.

Who waits does so in slices, so that signals are heard, and ends where another process has failed. No collective.
"""

import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hotloop.engine import interrupt
from hotloop.engine.interrupt import print_to_stderr
from hotloop.errors import HotloopError
from hotloop.options.files import parse_json

SLICE = 1.0
"""Seconds that a wait lasts before it looks whether a process has failed, or a signal came."""
LOOK_SECONDS = 0.5
"""Seconds between looks for a stop or a failure elsewhere."""
PATIENCE = 3.0
"""Seconds in which a process that hears of a failure elsewhere should have ended by itself."""
CLOSING_SECONDS = 60.0
"""Seconds that it may take it once it is about to: a checkpoint may be on its way to the disk."""
KEPT = 1000
"""Words of process 0 that stay readable for those who are behind; collectives keep them far closer than that."""
LOSS = re.compile(r"[Gg]loo .*(reset|closed|refused|[Tt]imed out)|NCCL .*(remote|connection)")
"""What an error says of a collective whose partner is gone."""
WORDS = "hotloop/word/"
STOP, FAILED = f"{WORDS}stop", f"{WORDS}failed"
_LEAVING, _LEFT = "hotloop/leaving", "hotloop/left"


class PeerFailed(HotloopError):
    """Another process of the same command has failed; the message is its own."""

    def __init__(self, process: int, text: str, status: int):
        super().__init__(f"process {process}: {text}")
        self.status = status


class LostPeer(HotloopError):
    """Another process is gone without a word; the status is that of one which jax aborts for it."""

    exit_status = 128 + signal.SIGABRT


@dataclass(eq=False)
class ProcessGroup:
    """The connected processes: a store of texts that all of them read and write, kept by process 0."""

    client: Any
    count: int
    index: int
    spoken: int = 0
    """How often process 0 has spoken; all count alike, since all run the same code."""
    failure: PeerFailed | None = None
    noticed: bool = False
    """Whether the main thread has heard of the failure, and is about to end."""
    stopping: bool = False
    """Whether all have agreed to stop after the same update."""
    ended: threading.Event = field(default_factory=threading.Event)
    closing: list[Callable[[PeerFailed], object]] = field(default_factory=list)
    """What must be closed where the main thread cannot do it."""
    waiting: Callable[[], None] = lambda: None
    """Called now and then while this process waits for process 0."""

    def read(self, key: str) -> str:
        """The text under a key, as soon as it is there."""
        while True:
            self.raise_failure()
            try:
                return str(self.client.blocking_key_value_get(key, int(1000 * SLICE)))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise LostPeer(f"process {self.index} has lost the others: process 0 is gone") from None
            if self.index:  # that process 0 takes its time is no stall of this one
                self.waiting()

    def explain_loss(self, error: BaseException) -> HotloopError | None:
        """What an error of a collective means: another process has failed, or is gone. None for any other error."""
        text = str(error)
        if not isinstance(error, RuntimeError) or not LOSS.search(text):
            return None
        if self.failure is None:
            return LostPeer(f"process {self.index} has lost another one: {text.splitlines()[0][:200]}")
        if self.ended.is_set():
            time.sleep(
                CLOSING_SECONDS
            )  # the thread that watches has said why, and is about to end this process
        return self.failure

    def raise_failure(self) -> None:
        """Where another process has failed: PeerFailed."""
        if self.failure is not None:
            self.noticed = True
            raise self.failure

    def write(self, key: str, text: str) -> None:
        with suppress(RuntimeError):  # process 0 is gone, or somebody was quicker to say the same
            self.client.key_value_set(key, text)

    def agreed(self, value: Any) -> Any:
        self.spoken += 1
        key, asker = f"hotloop/said/{self.spoken}", find_asker(sys._getframe())
        if self.index:
            speaker, said = parse_json(self.read(key))
            if speaker != asker:
                raise HotloopError(
                    f"the processes do not do the same: one is at {speaker}, another at {asker}"
                )
            return said
        text = json.dumps([asker, value])
        self.raise_failure()
        self.write(key, text)
        if self.spoken > KEPT:
            with suppress(RuntimeError):
                self.client.key_value_delete(f"hotloop/said/{self.spoken - KEPT}")
        return parse_json(text)[1]

    def gathered(self, value: Any) -> list[Any]:
        place = f"hotloop/heard/{self.spoken + 1}"
        if self.index:
            self.write(f"{place}/{self.index}", json.dumps(value))
            return list(self.agreed(None))
        others = [parse_json(self.read(f"{place}/{number}")) for number in range(1, self.count)]
        with suppress(RuntimeError):
            self.client.key_value_delete(f"{place}/")
        return list(self.agreed([value, *others]))

    def watch(self) -> None:
        """On a thread: a stop that another process was asked for is this one's, too; so is a failure."""
        pause = max(LOOK_SECONDS, self.count / 200)  # process 0 answers some hundred looks a second
        while not self.ended.wait(pause):
            try:
                words = dict(self.client.key_value_dir_get(WORDS))
            except RuntimeError:
                continue
            if STOP in words:
                interrupt.pass_on(int(words[STOP]))
            if FAILED in words and self.failure is None:
                said = parse_json(words[FAILED])
                if said["process"] == self.index:
                    return
                self.failure = PeerFailed(**said)
                ended = self.ended.wait(PATIENCE)
                if not ended and (self.noticed or interrupt.was_raised()):
                    ended = self.ended.wait(CLOSING_SECONDS)
                if not ended:  # the main thread is in a collective that never ends
                    for close in (*self.closing,):
                        close(self.failure)
                    print_to_stderr(f"hotloop: error: {self.failure}")
                    self.leave(self.failure.status)

    def leave(self, status: int) -> None:
        """End this process, without jax's own way out, which waits for those that never come.

        Process 0 goes last, since the others cannot be without it. Who has stopped waits for it, however long it saves:
        jax would take a process that is gone for a lost one, and abort the rest.
        """
        self.ended.set()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        if self.index == 0:
            self.write(f"{_LEAVING}/0", "")
        until = time.monotonic() + (math.inf if self.index and self.stopping else 2 * PATIENCE)
        with suppress(RuntimeError):
            while time.monotonic() < until:
                if self.index and self.client.key_value_dir_get(f"{_LEAVING}/"):
                    self.write(f"{_LEFT}/{self.index}", "")
                    break
                if not self.index and len(self.client.key_value_dir_get(f"{_LEFT}/")) == self.count - 1:
                    break
                time.sleep(0.05)
        interrupt.kill_workers()
        os._exit(status)


def find_asker(frame: FrameType) -> str:
    """The function, outside of what is about processes, that asks: that of all processes that do the same."""
    own = {str(Path(__file__).with_name(name)) for name in ("processes.py", "process_group.py")}
    while frame.f_back is not None and frame.f_code.co_filename in own:
        frame = frame.f_back
    return f"{frame.f_code.co_qualname} of {Path(frame.f_code.co_filename).name}"
