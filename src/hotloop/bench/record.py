"""The record of a run: the file that records are appended to, on disk before the next run begins; what they must look
like; and, read again, the samples of each variant's metrics.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, TypeVar

from hotloop.bench.process import last_lines
from hotloop.engine.run import write_all, write_json
from hotloop.errors import DataError, RunError
from hotloop.options import to_jsonable
from hotloop.options.files import load_json, parse_json, read_bounded

RECORDS, PROVENANCE = "results.jsonl", "provenance.json"
LAST_MOMENT = 253402300800.0  # the year 10000, in which calendars of Python end
Record = dict[str, Any]
NEEDED = ("benchmark", "variant", "status")
WHOLE = (*NEEDED, "repeat", "params", "env", "log", "metrics", "problems", "spec")
"""What a record of the runner has, and no None there."""
WHOLE_OR_NONE = ("reason", "command", "exitcode", "start", "end", "seconds")


class Results:
    """The records of a log folder; one runner at a time may hold it."""

    def __init__(self, log: Path):
        self.path = log / RECORDS
        try:
            log.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"--log-dir {log}: cannot be made: {error.strerror}") from error
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise RunError(f"{log}: another runner is at work here; wait for it, or take another") from error
        *lines, last = self.path.read_bytes().split(b"\n")
        try:
            self.records = [self._parse(line, number) for number, line in enumerate(lines, 1)]
            with suppress(ValueError):  # cut off, the last is no JSON; whole, it may be somebody else's file
                parse_json(last)
                self._parse(last, len(lines) + 1)
        except DataError:
            self.close()
            raise
        if last:  # a killed runner left it unfinished
            os.ftruncate(self._file, sum(len(line) + 1 for line in lines))

    def _parse(self, line: bytes, number: int) -> Record:
        try:
            return parse_record(line, whole=True)
        except ValueError as error:
            raise DataError(f"{self.path}:{number}: damaged ({error}); take another --log-dir") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """One more record, which is on disk when this returns."""
        made = to_jsonable(record)
        line = (json.dumps(made, allow_nan=False) + "\n").encode()
        try:
            write_all(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full, free some of it" if full else f"cannot be written ({error.strerror})"
            raise RunError(f"{self.path}: {why}; go on with --resume") from error
        self.records.append(made)

    def close(self) -> None:
        os.close(self._file)


def hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def add_provenance(log: Path, provenance: Mapping[str, Any]) -> str:
    """Keep where results come from, once for all records that share it; the id by which they name it."""
    text = json.dumps(to_jsonable(provenance), sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    known = _load_provenance(log)
    if name not in known:
        write_json(log / PROVENANCE, {**known, name: provenance})
    return name


def _load_provenance(log: Path) -> dict[str, Any]:
    try:
        known = load_json(log / PROVENANCE)
    except (OSError, ValueError):
        return {}  # records are worth showing without it
    return known if isinstance(known, dict) else {}


def parse_record(line: str | bytes, whole: bool = False) -> Record:
    """The record on a line, `whole` where a runner goes on with it; a ValueError says what is wrong.

    For those who compare and report a part may be missing or None.
    """

    def expect(holds: bool, more: str = "") -> None:
        if not holds:
            raise ValueError(f"no record of a run{more}")

    record = parse_json(line)
    expect(isinstance(record, dict))
    for name in WHOLE if whole else NEEDED:
        expect(record.get(name) is not None, f", it has no '{name}'")
    for name in WHOLE_OR_NONE if whole else ():
        expect(name in record, f", it has no '{name}'")
    for name, fits in SHAPES.items():
        value = record.get(name)
        expect(value is None or fits(value), f", its '{name}' is {str(value)[:40]!r}")
    if whole:
        spec = [record["spec"].get(name) for name in ("file", "sha256")]
        expect(all(map(_is_text, spec)), ", its 'spec' is not whole")
        for name, one in record["metrics"].items():
            expect({"value", "unit", "reduction"} <= one.keys(), f", metric '{name}' is not whole")
    return dict(record)


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold; NaN is one."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)


def is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _maps_to(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is_metric(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and (value.get("value") is None or is_number(value["value"]))
        and isinstance(value.get("unit") or "", str)
        and isinstance(value.get("values") or [], list)
    )


SHAPES: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("benchmark", "variant", "status", "reason", "command"), _is_text),
    **dict.fromkeys(
        ("repeat", "exitcode"), lambda value: isinstance(value, int) and not isinstance(value, bool)
    ),
    **dict.fromkeys(("env", "log", "turns"), _maps_to(_is_text)),
    **dict.fromkeys(("problems", "monitor", "spec"), _maps_to(lambda value: True)),
    **dict.fromkeys(("start", "end"), lambda value: is_number(value) and 0 <= value < LAST_MOMENT),
    **dict.fromkeys(("seconds", "pace"), is_number),
    "params": _maps_to(lambda value: _is_text(value) or is_number(value)),
    "metrics": _maps_to(_is_metric),
    "paces": lambda value: isinstance(value, list) and all(map(is_number, value)),
}

SIDES = ("A", "B")  # the log folders of two programs that ran in turns
PARTS = ("device", "cpu", "hotloop", "environment")  # of a provenance, those that hold more than a text
TAIL = 4_000_000  # bytes at the end of a program's output in which its JSON result is looked for
T = TypeVar("T")
K = TypeVar("K")
LARGEST_FILE = 1 << 28  # bytes of records: those of a hundred thousand runs are fewer


@dataclass(frozen=True)
class MetricSample:
    """One metric of one variant: a value for each repeat that has it, and the readings inside the last one."""

    benchmark: str
    variant: str
    metric: str
    unit: str
    params: Mapping[str, str]
    values: tuple[float, ...]
    inside: tuple[float, ...] = ()
    paces: tuple[float, ...] = ()  # how fast the machine itself was beside each of those repeats, if known
    best_paces: bool = False
    """Whether they are of an older record, which has the best of a few turns: no other work shows in that."""
    accelerated: bool = False  # measured where programs compute on an accelerator
    turns: str = ""
    """What the other program's records name, too, if both ran in turns; then each value has its round and start."""
    rounds: tuple[int, ...] = ()
    starts: tuple[float, ...] = ()


def read_records(paths: Sequence[str | Path]) -> list[Record]:
    """The records of log folders or `results.jsonl` files; each has its `folder` and its `machine` added."""
    found: list[Record] = []
    for path in map(Path, paths):
        file = path / RECORDS if path.is_dir() else path
        machines = {
            name: said
            for name, said in _load_provenance(file.parent).items()
            if isinstance(said, dict) and all(isinstance(said.get(part) or {}, dict) for part in PARTS)
        }
        kept: dict[tuple[str, Any], Record] = {}
        for record in read_lines(file):
            machine = machines.get(str(record.get("provenance")), {})
            key = (record["variant"], record.get("repeat"))
            kept.pop(key, None)  # a run that was repeated after a resume counts once, where it was repeated
            kept[key] = record | {"folder": str(file.parent), "machine": machine}
        found += kept.values()
    return found


def read_lines(file: Path) -> list[Record]:
    try:
        lines = read_bounded(file, LARGEST_FILE).decode(errors="replace").replace("\r\n", "\n").split("\n")
    except (OSError, ValueError) as error:
        why = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise DataError(f"{file}: {why}; name a log folder of `hotloop bench run`") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line or number < len(lines):
                found.append(parse_record(line))
        except ValueError as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                break
            why = "the file is damaged or not a results.jsonl of `hotloop bench run`"
            raise DataError(f"{file}:{number}: {error}; {why}") from error
    if any(lines) and not found:
        raise DataError(f"{file}: holds no record of a run; name a log folder of `hotloop bench run`")
    return found


def collect_samples(records: Iterable[Record]) -> dict[tuple[str, str], MetricSample]:
    """By variant and metric, of the runs whose numbers count."""
    groups: dict[tuple[str, str], list[tuple[Record, Mapping[str, Any]]]] = {}
    for record in filter(ended_well, records):
        for metric, said in (record.get("metrics") or {}).items():
            if is_number(said.get("value")) and math.isfinite(said["value"]):
                groups.setdefault((record["variant"], metric), []).append((record, said))
    samples = {}
    for (variant, metric), group in groups.items():
        paces: list[float] = []
        for run, _ in group:
            readings = [each for each in run.get("paces") or [run.get("pace") or 0] if 0 < each < math.inf]
            # Over all readings beside a run, as if they were one. Not their median: the turns that a busy machine
            # makes wait are few, and as long as its other work.
            paces += [float(harmonic_mean(readings))] if readings else []
        first, last = group[0][0], group[-1][1]
        machine = first.get("machine") or {}
        kind = (machine.get("device") or {}).get("kind") or "cpu"
        # A device that provenance cannot see, such as a TPU, is one that programs were sent to by name.
        asked = (machine.get("environment") or {}).get("JAX_PLATFORMS") or kind
        samples[variant, metric] = MetricSample(
            first["benchmark"],
            variant,
            metric,
            last.get("unit") or "",
            first.get("params") or {},
            tuple(float(said["value"]) for _, said in group),
            inside=tuple(each for each in last.get("values") or () if isinstance(each, int | float)),
            paces=tuple(paces),
            best_paces="paces" not in first,
            accelerated=str(asked).split(",")[0] != "cpu",
            turns=(first.get("turns") or {}).get("id", ""),
            rounds=tuple(run.get("repeat") or 0 for run, _ in group),
            starts=tuple(run.get("start") or 0.0 for run, _ in group),
        )
    return samples


def samples_of_partners(records: Sequence[Record]) -> dict[tuple[str, str], MetricSample]:
    """B's samples under the names of the variants of A that they ran in turns with."""
    turns = {record["variant"]: record.get("turns") or {} for record in records}
    return {
        (turns[variant].get("with", variant), metric): sample
        for (variant, metric), sample in collect_samples(records).items()
    }


def group_sessions(records: Iterable[Record]) -> list[list[Record]]:
    """The records of each folder and device together, by the time at which they began: in turns, on either side."""

    def begin(record: Record) -> tuple[str, str]:
        return (record.get("turns") or {}).get("id") or start_time(record), record["folder"]

    apart = group_by(records, lambda record: (record["folder"], device_name(record)))
    return sorted(apart.values(), key=lambda runs: min(map(begin, runs)))


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their keys, both in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def ended_well(record: Record) -> bool:
    """Whether a run's numbers count: it passed, or nothing but some other metric was wrong."""
    if record["status"] == "failed":
        return record.get("exitcode") == 0 and bool(record.get("problems"))
    return bool(record["status"] == "passed")


def device_name(record: Record) -> str:
    """The name of the device a record was measured on, "unknown" where its provenance does not say."""
    machine = record.get("machine") or {}
    said = machine.get("device") or {}
    cores = (machine.get("cpu") or {}).get("usable_cores") if said.get("kind") == "cpu" else None
    # A CPU of other cores is another device.
    return f"{said.get('name') or 'unknown'}{f', {cores} cores' if cores else ''}"


def commit_name(record: Record) -> str:
    """The commit a record was measured at, short, with a + where the tree had changes; "" if unknown."""
    machine = record.get("machine") or {}
    source = machine if machine.get("commit") else machine.get("hotloop") or {}
    said = str(source.get("commit") or "")
    return f"{said[:7]}{'+' if said and source.get('dirty') else ''}"


def start_time(record: Record) -> str:
    """When a run began, as text that sorts: "2026-01-31 12:00:00" in UTC; "" if unknown."""
    said = record.get("start")
    return f"{datetime.fromtimestamp(said, UTC):%Y-%m-%d %H:%M:%S}" if isinstance(said, int | float) else ""


def ran_in_turns(old: Iterable[Record], new: Iterable[Record]) -> bool:
    """Whether the two sides come from one session in which they took turns."""
    sessions = [{(record.get("turns") or {}).get("id") for record in side} for side in (old, new)]
    return sessions[0] == sessions[1] != {None}


def read_printed_result(record: Record) -> Mapping[str, Any] | None:
    """The JSON object on the last line of a run's standard output, if that is what it printed."""
    path = (record.get("log") or {}).get("stdout")
    lines = last_lines(Path(record.get("folder", ".")) / path, 1, TAIL) if path else []
    try:
        found = parse_json(lines[0]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
