"""A run's folder: its config, its environment, and events.jsonl, the single source of truth; and all of it read back.

One process at a time holds the folder. Records are whole lines of strict JSON, written before any sink sees them; a
kill can tear only the last one, and a resume removes it. A folder holds a run from its first record on: one that a
kill left before that holds nothing to lose, and the next run takes it over. It knows nothing of models or of the loop.
"""

import errno
import fcntl
import json
import math
import os
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

from hotloop import rehearsal
from hotloop.engine.interrupt import Interrupted, Stopped, hold_stops
from hotloop.errors import RunError
from hotloop.options import options_of, to_jsonable
from hotloop.options.files import load_json, parse_json, whole_file

Record = Mapping[str, Any]
FRAME = ("event", "update", "epoch", "time", "elapsed", "nonfinite")
LOCK, RECORDS = ".lock", "events.jsonl"
WRITTEN_WHOLE = ("environment.json", "config.json")
NUMERICS = ("cores", "cpu", "device_count", "device_kinds", "jax", "jaxlib", "platform", "xla_flags")
"""What the last bits of a sum depend on; a resumed run that finds another value says so."""
OPEN: WeakSet["Run"] = WeakSet()
"""The runs that this process holds."""
PROCESS_EVENTS: Mapping[str, tuple[str, ...]] = {
    "start": (),
    "compile": ("updates_per_call",),
    "profile": (),
    "warning": ("message",),
}
"""Records that every process makes of itself, and the figures that tell two of them apart: the first one stays."""


class Sink:
    """What a run feeds: it is handed each record after it is written, and adds nothing of its own."""

    patience: float | None = None
    """Seconds after which a record counts as stuck; None: it may take any time, in the caller's own thread."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go."""


class _Guard:
    """Lets a sink work, in a thread of its own if it has `patience`: then TimeoutError where it takes longer.

    A full disk, a network that is gone or a library whose own thread has died must cost a run seconds, never its end.
    """

    def __init__(self, sink: Sink):
        self.sink = sink
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], futures.Future[None]] | None] | None = None

    def call(self, work: Callable[[], None]) -> None:
        if self.sink.patience is None:
            work()
            return
        if self._jobs is None:
            jobs = self._jobs = queue.SimpleQueue()

            def work_through() -> None:
                while (job := jobs.get()) is not None:
                    try:
                        job[1].set_result(job[0]())
                    except BaseException as error:
                        job[1].set_exception(error)

            # A daemon: the interpreter waits for any other thread before it leaves, for a stuck one for ever.
            name = f"hotloop-{type(self.sink).__name__}"
            threading.Thread(target=work_through, name=name, daemon=True).start()
        done: futures.Future[None] = futures.Future()
        self._jobs.put((work, done))
        if not futures.wait([done], self.sink.patience).done:
            raise TimeoutError(f"no answer in {self.sink.patience:g} seconds")
        done.result()

    def end(self) -> None:
        """Wait for it no more; its thread ends once it answers, or with the process."""
        if self._jobs is not None:
            self._jobs.put(None)


class SinkGroup:
    """Sinks that all see each record; one that fails is left out, and `warn` told."""

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[str], object]):
        self._guards, self._warn = [*map(_Guard, sinks)], warn

    def add(self, sink: Sink) -> None:
        self._guards.append(_Guard(sink))

    def write(self, record: Record) -> None:
        for guard in tuple(self._guards):
            if guard not in self._guards:  # it failed at the warning about another one
                continue
            try:
                guard.call(partial(guard.sink.write, record))
            except Exception as error:  # a sink that fails must not cost the run
                if not isinstance(error, TimeoutError):
                    with suppress(Exception):  # for its files' sake; what more goes wrong is no news
                        guard.call(guard.sink.close)
                self._drop(guard, error)

    def close(self) -> None:
        for guard in tuple(self._guards):
            try:
                guard.call(guard.sink.close)
                guard.end()
            except Exception as error:
                self._drop(guard, error)

    def _drop(self, guard: _Guard, error: Exception) -> None:
        guard.end()
        self._guards.remove(guard)
        self._warn(f"{type(guard.sink).__name__} failed and is off: {error}")


def compose_record(
    event: str, update: int, epoch: float, elapsed: float, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """A record as JSON holds it; NaN and infinity become null and are named in `nonfinite`, as `some` in a list."""
    if taken := set(figures) & set(FRAME):
        raise ValueError(f"figures cannot be called {sorted(taken)}: every record has these already")

    def any_nonfinite(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(any_nonfinite, value))
        return isinstance(value, float) and not math.isfinite(value)

    frame = {"event": event, "update": update, "epoch": epoch, "time": time.time(), "elapsed": elapsed}
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in figures.items()}
    odd = {
        name: str(value) if isinstance(value, float) else "some"
        for name, value in values.items()
        if any_nonfinite(value)
    }
    record: dict[str, Any] = to_jsonable({**frame, **figures, **({"nonfinite": odd} if odd else {})})
    return record


def default_path(family: str, root: str | Path = "results") -> Path:
    """`results/<family>-<UTC time>-<short id>`: sorts by time, never meets another run."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", family).strip("-")
    return Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"


class Run(AbstractContextManager["Run"]):
    """A folder that this process holds, and its growing list of records."""

    def __init__(
        self,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        command: str,
        resume: bool = False,
        may_differ: Collection[str] = (),
        options: type[Any] | None = None,
        sinks: Sequence[Sink] = (),
        environment: Mapping[str, Any] | None = None,
    ):
        """Take a new folder, or with `resume` the folder of an earlier run with the same config.

        Only the keys in `may_differ` may have other values than before; what the earlier config lacks of the `options`
        was at its default. A core count, jax version or device that differs is a warning in the records, because sums
        may then differ in their last bits.
        """
        from hotloop.engine.device import describe_environment

        self.path = path = Path(path)
        self.checkpoints = path / "checkpoints"
        self.resumed = resume
        """Whether an earlier process worked on this run."""
        self.how_to_resume = ""
        """What to do to go on with this run; said where a signal stops it."""
        if rehearsal.is_on():
            check_free(path, resume)
            if resume:
                check_options(path, config, may_differ, options)
            rehearsal.begin_work(f"making the run folder {path}")
        with ExitStack() as held:
            held.callback(os.close, take_folder(path, resume))
            try:
                _refuse_another_run(path, resume)
                if not resume:
                    drop_torn_line(path / RECORDS)  # what a kill left before its run's first record
                now = to_jsonable(describe_environment() if environment is None else environment)
                warnings = resume_warnings(path, config, now, may_differ, options) if resume else []
                if not (resume and (path / "environment.json").exists()):
                    write_json(path / "environment.json", now)
                write_json(path / "config.json", config)
                self._events = os.open(path / RECORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except OSError as error:
                raise RunError(f"cannot write in {path}: {error.strerror}; choose another folder") from None
            held.callback(os.close, self._events)
            OPEN.add(self)
            held.callback(OPEN.discard, self)
            self._sinks = SinkGroup(sinks, lambda text: self.event("warning", message=text))
            self._began, self._place = time.monotonic(), (0, 0.0)
            self._writing = threading.RLock()
            self.event("start", command=command, folder=str(path), resumed=resume, process=os.getpid())
            for message in warnings:
                self.event("warning", message=message, resumed=True)
            self._held: ExitStack | None = held.pop_all()

    def add_sink(self, sink: Sink) -> None:
        self._sinks.add(sink)

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
        record = compose_record(event, update, epoch, time.monotonic() - self._began, figures)
        with self._writing:
            self._append(record)
            if event not in ("validation", "evaluation"):  # of weights that may be older, or another run's
                self.reach(record["update"], record["epoch"])
            self._sinks.write(record)
        return record

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            write_all(self._events, line)
        except OSError as error:
            drop_torn_line(self.path / RECORDS)
            raise RunError(f"cannot write {self.path / RECORDS}: {error.strerror}") from None

    def close(self, status: str = "finished", **figures: Any) -> None:
        """Append the `end` record, close the sinks and let go of the folder; a second call does nothing."""
        if self._held is None:
            return
        held, self._held = self._held, None
        with hold_stops(), held:
            try:
                try:
                    self.event("end", status=status, **figures)
                finally:
                    self._sinks.close()
                os.fsync(self._events)
            except OSError as error:
                raise RunError(f"cannot write {self.path / RECORDS}: {error.strerror}") from None

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


def take_folder(path: Path, resume: bool) -> int:
    """Make the folder if need be and hold its lock (a descriptor); a dead process holds none."""
    check_resumable(path, resume)
    check_makeable(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(f"cannot make the run folder {path}: {error.strerror}; choose another one") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(OSError):  # for whoever finds the folder taken; a full disk has no room even for that
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise RunError(
            f"{path} is in use by process {holder}: wait for it or choose another folder"
        ) from None
    except BaseException:
        os.close(lock)
        raise
    for part in (part for name in WRITTEN_WHOLE for part in path.glob(f".{name}.*.part")):
        with suppress(OSError):  # what killed processes left half written, and no living one can be at
            part.unlink()
    return lock


def _files_of_run(path: Path) -> list[str]:
    return [name for name in ("config.json", RECORDS) if (path / name).exists()]


def check_resumable(path: Path, resume: bool) -> None:
    """RunError where there should be a run to go on with and is none, before anything is read for it."""
    if resume and not path.is_dir():
        raise RunError(f"nothing to resume: {path} is not a run folder; leave out resume=True to start one")
    if resume and not _files_of_run(path):
        raise RunError(f"nothing to resume: {path} holds no run; leave out resume=True to start one")


def _refuse_another_run(path: Path, resume: bool) -> None:
    found = _files_of_run(path)
    if not resume and found and not is_only_begun(path):
        raise RunError(
            f"{path} already holds a run ({found[0]}): continue it with resume=True, or choose another folder"
        )


def check_makeable(path: Path, what: str = "the run folder") -> None:
    """RunError where a folder could not be made, or written in, found out without touching anything."""
    try:
        os.fspath(path.absolute()).encode()
        check_can_make(path)
    except (
        UnicodeEncodeError
    ):  # only the file system understands it: the first checkpoint would fail, all work done
        raise RunError(f"cannot make {what} {path}: the path is no UTF-8 text; choose another one") from None
    except OSError as error:
        raise RunError(f"cannot make {what} {path}: {error.strerror}; choose another one") from None


def check_can_make(folder: Path) -> None:
    """The OSError that making this folder, or writing in it, would end with, as far as one can see."""
    place = folder.absolute()
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return
    if not there.is_dir():
        code = errno.ENOTDIR
    else:
        code = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
    raise OSError(code, os.strerror(code), str(there))


def check_free(path: Path, resume: bool) -> None:
    """What a run would refuse about this folder whatever its options are, before anything is read for it."""
    check_resumable(path, resume)
    check_makeable(path)
    _refuse_another_run(path, resume)


def is_only_begun(path: Path) -> bool:
    """Whether a process was killed in this folder before its run's first record, and nothing else is there."""
    try:
        names = {file.name for file in path.iterdir() if not file.name.endswith(".part")}
        begun = names <= {LOCK, RECORDS, *WRITTEN_WHOLE}
        return begun and (RECORDS not in names or b"\n" not in (path / RECORDS).read_bytes())
    except OSError:
        return False


def is_held(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def has_finished(path: Path) -> bool:
    """Whether the last end on record is that of a run which did all that it was asked for."""
    if not (path / RECORDS).exists():
        return False
    ends = [record.get("status") for record in read_events(path) if record["event"] == "end"]
    return ends[-1:] == ["finished"]


def read_config(path: str | Path, family: str, needed: Mapping[str, type]) -> dict[str, Any]:
    """The config of a family's run with the values that all of them have; one line where the folder holds none."""
    path = Path(path)
    file = path / "config.json"
    if not file.exists():
        raise RunError(
            f"{path}: not a run's folder (no config.json there); give the folder that `hotloop {family} train` named"
        )
    try:
        config = read_json(file)
    except RunError:
        config = {}
    for name, kind in needed.items():
        value: Any = config.get(name)
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (kind is int and not 0 <= value < 2**63):  # whole numbers in a run's config are counts
            raise RunError(f"{file}: not the config of a {family} run")
    return config


def resume_warnings(
    path: Path,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    may_differ: Collection[str],
    options: type[Any] | None = None,
) -> list[str]:
    """Make an earlier run ready to go on; what changed that may, one line each. What may not is an error."""
    changed = check_options(path, config, may_differ, options)
    lines = [f"resumed with another config: {text}" for key, text in changed.items() if key != "resume"]
    if (path / "environment.json").exists():
        then = read_json(path / "environment.json")
        numerics = {key: text for key, text in find_differences(then, environment).items() if key in NUMERICS}
        lines += [f"resumed elsewhere: {text}; last bits may differ" for text in numerics.values()]
    elif not is_only_begun(path):
        lines.append("environment.json was gone: if the run began elsewhere, last bits may differ")
    if torn := drop_torn_line(path / RECORDS):
        lines.append(f"dropped an unfinished record of {torn} bytes from events.jsonl")
    return lines


def check_options(
    path: Path, config: Mapping[str, Any], may_differ: Collection[str], options: type[Any] | None = None
) -> dict[str, str]:
    """What a run that is to go on has other options than before; RunError where it must not.

    An option that an old config lacks, since there was none, was what is its default now.
    """
    defaults = {each.name: to_jsonable(each.default) for each in options_of(options)} if options else {}
    old = {**defaults, **read_json(path / "config.json")}
    changed = find_differences(old, to_jsonable(config))
    if wrong := [text for key, text in changed.items() if key not in may_differ]:
        raise RunError(
            f"{path} cannot resume with another config: {'; '.join(wrong)}; use the old values or a new one"
        )
    return changed


def find_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Each key whose value changed, with `key: old -> new`."""
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key) or (key in old) != (key in new))
    return {key: f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}" for key in keys}


def write_json(path: str | Path, value: Any) -> None:
    """Replace the file in one step: a reader sees the old text or the new one, never a part."""
    path = Path(path)
    text = json.dumps(to_jsonable(value), indent=2, allow_nan=False) + "\n"
    with whole_file(path) as part, part.open("wb", buffering=0) as file:
        write_all(file.fileno(), text.encode())
        os.fsync(file.fileno())


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it. A full disk and a size limit may take a part: the next write then says which of them it is."""
    while data:
        data = data[os.write(descriptor, data) :]


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file of a run; one line says which file cannot be read and why."""
    path = Path(path)
    try:
        found = load_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} cannot be read: it holds no JSON object")
    return found


def read_events(path: str | Path) -> Iterator[dict[str, Any]]:
    """Every record of a run (its folder or its events.jsonl), oldest first.

    A last line that a kill tore is left out; a broken line anywhere else is an error that names it.
    """
    path = Path(path)
    path = path / "events.jsonl" if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = parse_json(line)
        except ValueError:
            raise RunError(f"{path} line {number} is not a JSON record: the file was altered") from None
        wrong = ""
        if not isinstance(record, dict):
            wrong = "no object"
        elif not isinstance(record.get("event"), str):
            wrong = "no 'event'"
        elif not _is_whole(record.get("update")):
            wrong = "no 'update'"
        else:
            for key in ("epoch", "time", "elapsed"):
                value = record.get(key, 0)
                if not isinstance(value, float) and not _is_whole(value):
                    wrong = wrong or f"{key!r} is no number"
        if wrong:
            raise RunError(
                f"{path} line {number} is not the record of an event ({wrong}): the file was altered"
            )
        yield record


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def drop_torn_line(path: Path) -> int:
    """Cut off what follows the last line end, a line that a kill tore; returns the bytes dropped."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    torn = len(data) - (data.rfind(b"\n") + 1)
    if torn:
        os.truncate(path, len(data) - torn)
    return torn


def append_line(path: str | Path, value: Any) -> None:
    """Add one JSON object as a line, in one write, so that several processes may add to one file."""
    path = Path(path)
    line = json.dumps(to_jsonable(value), allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as stream:
        stream.write(line)


def current_records(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of a run as if nothing had disturbed it, whatever stopped or killed its processes on the way.

    What came after a resumed update was run again, so it goes. What a later process did once more (a validation at
    the end, say) takes the place of what it repeats. Of the ends only the last one stays.
    """
    kept: dict[Hashable, dict[str, Any]] = {}
    seen: Counter[Hashable] = Counter()
    for record in events:
        event = record["event"]
        if event == "start":
            seen.clear()
            kept = {key: old for key, old in kept.items() if old["event"] != "end"}
        if event == "resume":
            kept = {key: old for key, old in kept.items() if old["update"] <= record["update"]}
        if event in ("resume", "stop") or (event == "warning" and record.get("resumed")):
            continue
        # What two records have in common that are of the same thing: a validation of the same update, say.
        identity: Hashable
        if event in PROCESS_EVENTS:
            identity = (event, *(repr(record.get(name)) for name in PROCESS_EVENTS[event]))
        else:
            words = sorted((name, value) for name, value in record.items() if isinstance(value, str))
            identity = (event, record["update"], *words)
        key = (identity, seen[identity])
        seen[identity] += 1
        if event not in PROCESS_EVENTS or key not in kept:
            kept[key] = dict(record)
    return list(kept.values())
