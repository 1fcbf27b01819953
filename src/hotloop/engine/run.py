"""A run's folder: its config, its environment, and events.jsonl, the single source of truth.

One process at a time holds the folder. Records are whole lines of strict JSON, written before any sink sees
them; a kill can tear only the last one, and a resume removes it. It knows nothing of models or of the loop.
"""

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

from hotloop import rehearsal
from hotloop.engine import records
from hotloop.engine.history import current
from hotloop.engine.interrupt import Interrupted, Stopped, hold_stops
from hotloop.engine.records import read_events
from hotloop.engine.run_folder import check_kind, check_takeable, resume_warnings, take
from hotloop.engine.sink_guard import GuardedSink
from hotloop.engine.sinks import Sink
from hotloop.errors import RunError
from hotloop.options import plain

__all__ = ["Run", "current", "default_path", "read_events"]

_OF_WEIGHTS = ("validation", "evaluation")
"""Records of weights that may be older than the training's, or another run's."""


def default_path(family: str, root: str | Path = "results") -> Path:
    """`results/<family>-<UTC time>-<short id>`: sorts by time, never meets another run."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", family).strip("-")
    return Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


OPEN: WeakSet["Run"] = WeakSet()
"""The runs that this process holds."""


class Run:
    """A folder that this process holds, and its growing list of records."""

    def __init__(self, path: Path, lock: int, sinks: Sequence[Sink]):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.report = path / "report"
        self.resumed = False
        """Whether an earlier process worked on this run."""
        self.how_to_resume = ""
        """What to do to go on with this run; said where a signal stops it."""
        self._lock: int | None = lock
        self._sinks = [GuardedSink(sink) for sink in sinks]
        self._began = time.monotonic()
        self._place = (0, 0.0)
        self._writing = threading.RLock()
        self._events = os.open(path / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        OPEN.add(self)

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        command: str,
        resume: bool = False,
        may_differ: Collection[str] = (),
        sinks: Sequence[Sink] = (),
        environment: Mapping[str, Any] | None = None,
    ) -> "Run":
        """Take a new folder, or with `resume` the folder of an earlier run with the same config.

        Only the keys in `may_differ` may have other values than before. A core count, jax version or device
        that differs is a warning in the records, because sums may then differ in their last bits.
        """
        path = Path(path)
        if rehearsal.is_on():
            check_takeable(path, config, resume, may_differ)
            rehearsal.begin_work(f"making the run folder {path}")
        lock = take(path, resume)
        try:
            check_kind(path, resume)
            now = plain(_environment() if environment is None else environment)
            warnings = resume_warnings(path, config, now, may_differ) if resume else []
            if not (resume and (path / "environment.json").exists()):
                records.write_json(path / "environment.json", now)
            records.write_json(path / "config.json", config)
            run = cls(path, lock, sinks)
            run.resumed = resume
        except OSError as error:
            os.close(lock)
            raise RunError(f"cannot write in {path}: {error.strerror}; choose another folder") from None
        except BaseException:
            os.close(lock)
            raise
        try:
            run.event("start", command=command, folder=str(path), resumed=resume, process=os.getpid())
            for message in warnings:
                run.event("warning", message=message, resumed=True)
        except BaseException:
            run._let_go()
            raise
        return run

    def add_sink(self, sink: Sink) -> None:
        """Feed one more sink from now on."""
        self._sinks.append(GuardedSink(sink))

    def reach(self, update: int, epoch: float) -> None:
        """The training stands here: records that are given no place of their own are of this one."""
        self._place = max(self._place, (update, epoch))

    def event(
        self, event: str, *, update: int | None = None, epoch: float | None = None, **figures: Any
    ) -> dict[str, Any]:
        """Append one record and feed the sinks; NaN and infinity become null and are named in `nonfinite`.

        Without `update` and `epoch` it is of the place that the training has reached.
        """
        if update is None or epoch is None:
            if (update, epoch) != (None, None):
                raise ValueError(f"{event}: update {update} with epoch {epoch}: give both, or neither")
            update, epoch = self._place
        record = records.compose(event, update, epoch, time.monotonic() - self._began, figures)
        with self._writing:
            self._append(record)
            if event not in _OF_WEIGHTS:
                self.reach(record["update"], record["epoch"])
            self._feed(record)
        return record

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            records.write_whole(self._events, line)
        except OSError as error:
            records.drop_torn_line(self.path / "events.jsonl")
            raise RunError(f"cannot write {self.path / 'events.jsonl'}: {error.strerror}") from None

    def _feed(self, record: Mapping[str, Any]) -> None:
        for sink in tuple(self._sinks):
            if sink not in self._sinks:  # it failed at the warning about another one
                continue
            try:
                sink.write(record)
            except Exception as error:  # a sink that fails must not cost the run
                sink.abandon() if isinstance(error, TimeoutError) else sink.release()
                self._switch_off(sink, error)

    def _switch_off(self, sink: GuardedSink, error: Exception) -> None:
        self._sinks.remove(sink)
        self.event("warning", message=f"{sink.name} failed and is off: {error}")

    def _close_sinks(self) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._switch_off(sink, error)

    def close(self, status: str = "finished", **figures: Any) -> None:
        """Append the `end` record, close the sinks and let go of the folder; a second call does nothing."""
        if self._lock is None:
            return
        with hold_stops():
            try:
                try:
                    self.event("end", status=status, **figures)
                finally:
                    self._close_sinks()
                os.fsync(self._events)
            except OSError as error:
                raise RunError(f"cannot write {self.path / 'events.jsonl'}: {error.strerror}") from None
            finally:
                self._let_go()

    def _let_go(self) -> None:
        assert self._lock is not None
        OPEN.discard(self)
        os.close(self._events)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(RunError):  # a disk that is full has no room for the end: the first error says more
            if issubclass(kind, KeyboardInterrupt):
                self.close("interrupted")
            else:
                self.close("failed", error=f"{kind.__name__}: {error}".split("\n")[0])
        if self.how_to_resume and isinstance(error, Stopped) and not isinstance(error, Interrupted):
            error.args = (f"{error}; to resume: {self.how_to_resume}",)


def _environment() -> Mapping[str, Any]:
    from hotloop.engine.environment import environment

    return environment()
