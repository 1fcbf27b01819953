"""A run's folder: its config, its environment, and events.jsonl, the single source of truth; and all of it read back.

One process at a time holds the folder. Records are whole lines of strict JSON, written before any sink sees them; a
kill can tear only the last one, and a resume removes it. A folder holds a run from its first record on: one that a
kill left before that holds nothing to lose, and the next run takes it over. It knows nothing of models or of the loop.
"""

import fcntl
import glob
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

from hotloop import rehearsal
from hotloop.engine.interrupt import Interrupted, Stopped, hold_stops
from hotloop.engine.sinks import Sink, SinkGroup, compose_record, write_all
from hotloop.errors import RunError
from hotloop.options import to_jsonable
from hotloop.options.files import load_json, parse_json, whole_file

LOCK, RECORDS = ".lock", "events.jsonl"
WRITTEN_WHOLE = ("environment.json", "config.json")
NUMERICS = ("cores", "cpu", "device_count", "device_kinds", "jax", "jaxlib", "platform", "xla_flags")
"""What the last bits of a sum depend on; a resumed run that finds another value says so."""
_WEIGHTS_EVENTS = ("validation", "evaluation")
"""Records of weights that may be older than the training's, or another run's."""
OPEN: WeakSet["Run"] = WeakSet()
"""The runs that this process holds."""
DISTURBANCE_EVENTS = ("resume", "stop")
"""Records of a run that was stopped or killed, and of no other."""
PROCESS_EVENTS: Mapping[str, tuple[str, ...]] = {
    "start": (),
    "compile": ("updates_per_call",),
    "profile": (),
    "warning": ("message",),
}
"""Records that every process makes of itself, and the figures that tell two of them apart: the first one stays."""


def default_path(family: str, root: str | Path = "results") -> Path:
    """`results/<family>-<UTC time>-<short id>`: sorts by time, never meets another run."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", family).strip("-")
    return Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"


class Run:
    """A folder that this process holds, and its growing list of records."""

    def __init__(self, path: Path, lock: int, sinks: Sequence[Sink]):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.resumed = False
        """Whether an earlier process worked on this run."""
        self.how_to_resume = ""
        """What to do to go on with this run; said where a signal stops it."""
        self._lock: int | None = lock
        self._sinks = SinkGroup(sinks, lambda text: self.event("warning", message=text))
        self._began = time.monotonic()
        self._place = (0, 0.0)
        self._writing = threading.RLock()
        self._events = os.open(path / RECORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
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
        from hotloop.engine.device import describe_environment

        path = Path(path)
        if rehearsal.is_on():
            check_free(path, resume)
            if resume:
                check_options(path, config, may_differ)
            rehearsal.begin_work(f"making the run folder {path}")
        lock = take_folder(path, resume)
        try:
            _refuse_another_run(path, resume)
            if not resume:
                drop_torn_line(path / RECORDS)  # what a kill left before its run's first record
            now = to_jsonable(describe_environment() if environment is None else environment)
            warnings = resume_warnings(path, config, now, may_differ) if resume else []
            if not (resume and (path / "environment.json").exists()):
                write_json(path / "environment.json", now)
            write_json(path / "config.json", config)
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
            if event not in _WEIGHTS_EVENTS:
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
        if self._lock is None:
            return
        with hold_stops():
            try:
                try:
                    self.event("end", status=status, **figures)
                finally:
                    self._sinks.close()
                os.fsync(self._events)
            except OSError as error:
                raise RunError(f"cannot write {self.path / RECORDS}: {error.strerror}") from None
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


def take_folder(path: Path, resume: bool) -> int:
    """Make the folder if need be and hold its lock (a descriptor); a dead process holds none."""
    check_resumable(path, resume)
    _check_text(path, "the run folder")
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
    for name in WRITTEN_WHOLE:
        remove_parts(path / name)
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
    _check_text(path, what)
    try:
        rehearsal.check_can_make(path)
    except OSError as error:
        raise RunError(f"cannot make {what} {path}: {error.strerror}; choose another one") from None


def _check_text(path: Path, what: str) -> None:
    """RunError for a path that only the file system understands: the first checkpoint would fail, all work done."""
    try:
        os.fspath(path.absolute()).encode()
    except UnicodeEncodeError:
        raise RunError(f"cannot make {what} {path}: the path is no UTF-8 text; choose another one") from None


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
    if not all(_fits(config.get(name), kind) for name, kind in needed.items()):
        raise RunError(f"{file}: not the config of a {family} run")
    return config


def _fits(value: Any, kind: type) -> bool:
    """Whether a value is of its kind; whole numbers in a run's config are counts."""
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    return type(value) is kind or (kind is float and type(value) is int)


def resume_warnings(
    path: Path, config: Mapping[str, Any], environment: Mapping[str, Any], may_differ: Collection[str]
) -> list[str]:
    """Make an earlier run ready to go on; what changed that may, one line each. What may not is an error."""
    changed = check_options(path, config, may_differ)
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


def check_options(path: Path, config: Mapping[str, Any], may_differ: Collection[str]) -> dict[str, str]:
    """What a run that is to go on has other options than before; RunError where it must not."""
    changed = find_differences(read_json(path / "config.json"), to_jsonable(config))
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


def remove_parts(path: Path) -> None:
    """Remove what killed processes left of this file; no living one may be writing it."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):
            part.unlink()


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
        if wrong := _odd_frame(record):
            raise RunError(
                f"{path} line {number} is not the record of an event ({wrong}): the file was altered"
            )
        yield record


def _odd_frame(record: Any) -> str:
    """What a record lacks of the parts that all of them have; an empty text where nothing."""
    if not isinstance(record, dict):
        return "no object"
    if not isinstance(record.get("event"), str):
        return "no 'event'"
    update = record.get("update")
    if type(update) is not int or abs(update) >= 2**63:
        return "no 'update'"
    for key in ("epoch", "time", "elapsed"):
        value = record.get(key, 0)
        if not isinstance(value, float) and not (type(value) is int and abs(value) < 2**63):
            return f"{key!r} is no number"
    return ""


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
        if event in DISTURBANCE_EVENTS or (event == "warning" and record.get("resumed")):
            continue
        identity = _identity(record)
        key = (identity, seen[identity])
        seen[identity] += 1
        if event not in PROCESS_EVENTS or key not in kept:
            kept[key] = dict(record)
    return list(kept.values())


def _identity(record: Mapping[str, Any]) -> Hashable:
    """What two records have in common that are of the same thing: a validation of the same update, say."""
    event = record["event"]
    if event in PROCESS_EVENTS:
        return (event, *(repr(record.get(name)) for name in PROCESS_EVENTS[event]))
    words = sorted((name, value) for name, value in record.items() if isinstance(value, str))
    return (event, record["update"], *words)
