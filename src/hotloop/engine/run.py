"""A run's folder: its config, its environment, and events.jsonl, the single source of truth; and all of it read back.

One process at a time holds the folder. Records are whole lines of strict JSON, written before any sink sees them; a
kill can tear only the last one, and a resume removes it. A folder holds a run from its first record on: one that a
kill left before that holds nothing to lose, and the next run takes it over. It knows nothing of models or of the loop.
"""

import errno
import fcntl
import json
import logging
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hotloop import rehearsal
from hotloop.engine import processes
from hotloop.engine.interrupt import Interrupted, Stopped, hold_stops
from hotloop.engine.sink_group import Sink, SinkGroup
from hotloop.errors import RunError
from hotloop.options import options_of, to_jsonable
from hotloop.options.files import load_json, parse_json, whole_file

FRAME = ("event", "update", "epoch", "time", "elapsed", "nonfinite")
LOCK, RECORDS = ".lock", "events.jsonl"
WRITTEN_WHOLE = ("environment.json", "config.json")
MOST_NAMED = 8  # differences of another config that a refusal names
NUMERICS = ("cores", "cpu", "device_count", "device_kinds", "jax", "jaxlib", "platform", "xla_flags")
"""What the last bits of a sum depend on; a resumed run that finds another value says so."""
OPEN: weakref.WeakSet["Run"] = weakref.WeakSet()
"""The runs that this process holds."""
PROCESS_EVENTS: Mapping[str, tuple[str, ...]] = {
    "start": (),
    "compile": ("updates_per_call",),
    "profile": (),
    "warning": ("message",),
}
"""Records that every process makes of itself, and the figures that tell two of them apart: the first one stays."""


LOGGER = logging.getLogger("hotloop")
"""Where what knows no run says what should not be missed."""


class LoggedWarnings(logging.Handler):
    """What hotloop's logger is told goes into the run's records, and so to its console."""

    def __init__(self, run: "Run"):
        super().__init__(logging.WARNING)
        self._run = weakref.ref(run)

    def emit(self, record: logging.LogRecord) -> None:
        if run := self._run():
            run.event("warning", message=record.getMessage())


def compose_record(
    event: str, update: int, epoch: float, elapsed: float, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """A record as JSON holds it; NaN and infinity become null and are named in `nonfinite`, as `some` in a list."""
    if taken := set(figures) & set(FRAME):
        raise ValueError(f"figures cannot be called {sorted(taken)}: every record has these already")
    record = {"event": event, "update": update, "epoch": epoch, "time": time.time(), "elapsed": elapsed}
    nonfinite: dict[str, str] = {}
    for name, value in figures.items():
        odd: list[float] = []
        record[name] = to_jsonable(value, odd.append)
        if odd and not isinstance(value, Mapping):
            nonfinite[name] = str(odd[0]) if record[name] is None else "some"
    return {**to_jsonable(record), **({"nonfinite": nonfinite} if nonfinite else {})}


def default_path(family: str, root: str | Path = "results") -> Path:
    """`results/<family>-<UTC time>-<short id>`: sorts by time, never meets another run."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", family).strip("-")
    stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"
    return Path(root) / f"{name}-{processes.agreed(stamp)}"


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
                now = to_jsonable(describe_environment() if environment is None else environment)
                warnings = []
                if resume:
                    changed = check_options(path, config, may_differ, options)
                    texts = [text for key, text in changed.items() if key != "resume"]
                    warnings += [f"resumed with another config: {text}" for text in texts]
                there = resume and (path / "environment.json").exists()
                if there:
                    differs = find_differences(read_json(path / "environment.json"), now)
                    texts = [text for key, text in differs.items() if key in NUMERICS]
                    warnings += [f"resumed elsewhere: {text}; last bits may differ" for text in texts]
                elif resume and not is_only_begun(path):
                    gone = "environment.json was gone: if the run began elsewhere, last bits may differ"
                    warnings.append(gone)
                torn = drop_torn_line(path / RECORDS)
                if torn and resume:  # or a kill left it before its run's first record
                    warnings.append(f"dropped an unfinished record of {torn} bytes from events.jsonl")
                if not there:
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
            held.callback(LOGGER.removeHandler, lines := LoggedWarnings(self))
            LOGGER.addHandler(lines)
            self.event("start", command=command, folder=str(path), resumed=resume, process=os.getpid())
            for message in warnings:
                self.event("warning", message=message, resumed=True)
            self._held = held.pop_all()

    def reach(self, update: int, epoch: float) -> None:
        """The training stands here: records that are given no place of their own are of this one."""
        self._place = max(self._place, (update, epoch))

    def event(
        self, event: str, *, update: int | None = None, epoch: float | None = None, **figures: Any
    ) -> dict[str, Any]:
        """Append one record and feed the sinks; without `update` and `epoch` it is of the place that the training has
        reached."""
        if update is None or epoch is None:
            if (update, epoch) != (None, None):
                raise ValueError(f"{event}: update {update} with epoch {epoch}: give both, or neither")
            update, epoch = self._place
        record = compose_record(event, update, epoch, time.monotonic() - self._began, figures)
        with self._writing:
            try:
                write_all(self._events, json.dumps(record, allow_nan=False).encode() + b"\n")
            except OSError as error:
                drop_torn_line(self.path / RECORDS)
                raise RunError(f"cannot write {self.path / RECORDS}: {error.strerror}") from None
            if event not in ("validation", "evaluation"):  # of weights that may be older, or another run's
                self.reach(record["update"], record["epoch"])
            self._sinks.write(record)
        return record

    def close(self, status: str = "finished", **figures: Any) -> None:
        """Append the `end` record, close the sinks and let go of the folder; a second call does nothing."""
        with hold_stops(), self._held.pop_all():
            if self not in OPEN:
                return
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
        stopped = issubclass(kind, KeyboardInterrupt)
        why = {} if stopped else {"error": f"{kind.__name__}: {error}".split("\n")[0]}
        with suppress(RunError):  # a disk that is full has no room for the end: the first error says more
            self.close("interrupted" if stopped else "failed", **why)
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
        # For a process that finds the folder taken; a full disk has no room even for that.
        with suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BaseException as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise RunError(
            f"{path} is in use by process {holder}: wait for it or choose another folder"
        ) from None
    for part in (part for name in WRITTEN_WHOLE for part in path.glob(f".{name}.*.part")):
        with suppress(OSError):  # what killed processes left half written, and no living one can be at
            part.unlink()
    return lock


def check_resumable(path: Path, resume: bool) -> None:
    """RunError where there should be a run to go on with and is none, before anything is read for it."""
    if resume and not has_begun(path):
        what = "holds no run" if path.is_dir() else "is not a run folder"
        raise RunError(f"nothing to resume: {path} {what}; leave out resume=True to start one")


def has_begun(path: Path) -> bool:
    """Whether a run can be gone on with here; one that was killed before its first record starts over."""
    return any((path / name).exists() for name in ("config.json", RECORDS))


def _refuse_another_run(path: Path, resume: bool) -> None:
    found = [name for name in ("config.json", RECORDS) if (path / name).exists()]
    if not resume and found and not is_only_begun(path):
        raise RunError(
            f"{path} already holds a run ({found[0]}): continue it with resume=True, or choose another folder"
        )


def check_makeable(path: Path, what: str = "the run folder") -> None:
    """RunError where a folder could not be made, or written in, found out without touching anything."""
    try:
        os.fspath(path.absolute()).encode()
        check_can_make(path)
    except UnicodeEncodeError:  # the first checkpoint would fail, all work done
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
        with (path / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def has_finished(path: Path) -> bool:
    """Whether the last end on record is that of a run which did all that it was asked for."""
    records = read_events(path) if (path / RECORDS).exists() else ()
    return [record.get("status") for record in records if record["event"] == "end"][-1:] == ["finished"]


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


def check_options(
    path: Path, config: Mapping[str, Any], may_differ: Collection[str], options: type[Any] | None = None
) -> dict[str, str]:
    """What a run that is to go on has other options than before; RunError where it must not. An option that an old
    config lacks, since there was none, was what is its default now."""
    known = [each for each in options_of(options) if not each.required] if options else []
    defaults = {each.name: to_jsonable(each.default) for each in known}
    old = {**defaults, **read_json(path / "config.json")}
    changed = find_differences(old, to_jsonable(config))
    if wrong := [text for key, text in changed.items() if key not in may_differ]:
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise RunError(
            f"{path} cannot resume with another config: {'; '.join(wrong[:MOST_NAMED])}{more}; use the old values or a "
            "new one"
        )
    return changed


def find_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Each key whose value changed, with `key: old -> new`."""
    changed = [key for key in sorted({*old, *new}) if old.get(key, ...) != new.get(key, ...)]
    return {key: f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}" for key in changed}


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
    """Every record of a run (its folder or its events.jsonl), oldest first. A last line that a kill tore is left out; a
    broken line anywhere else is an error that names it."""
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
        if not isinstance(record, dict):
            wrong = "no object"
        elif not isinstance(record.get("event"), str):
            wrong = "no 'event'"
        elif not _is_whole(record.get("update")):
            wrong = "no 'update'"
        else:
            numbers = {key: record.get(key, 0) for key in ("epoch", "time", "elapsed")}
            odd = [
                key for key, value in numbers.items() if not (_is_whole(value) or isinstance(value, float))
            ]
            wrong = f"{odd[0]!r} is no number" if odd else ""
        if wrong:
            raise RunError(
                f"{path} line {number} is not the record of an event ({wrong}): the file was altered"
            )
        yield record


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def drop_torn_line(path: Path) -> int:
    """Cut off what follows the last line end, a line that a kill tore; returns the bytes dropped."""
    data = path.read_bytes() if path.exists() else b""
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

    What came after a resumed update was run again, so it goes; so does what tells of one process. What a later process
    did once more (a validation at the end, say) takes the place of what it repeats. Of the ends only the last stays.
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
        if event in ("resume", "stop", "first_update") or (event == "warning" and record.get("resumed")):
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
