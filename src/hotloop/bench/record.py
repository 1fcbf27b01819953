"""What a line of `results.jsonl` must look like, so that nothing behind it meets a value of another kind.

A part that is missing or None is fine for those who compare and report; a runner that goes on with a folder needs
all of them. It knows shapes alone, and says in a few words which part is wrong.

The record of a run, and the file that records are appended to: one JSON object a line, on disk before the next run.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.bench.benchmark import Benchmark, Derived, Metric, Variant
from hotloop.bench.metrics import MetricValues
from hotloop.engine.records import write_json
from hotloop.errors import DataError, RunError
from hotloop.options import to_jsonable
from hotloop.options.files import load_json, parse_json

LAST_MOMENT = 253402300800.0  # the year 10000, in which calendars of Python end


def parse_record(line: str | bytes, whole: bool = False) -> dict[str, Any]:
    """The record on a line; a ValueError says what is wrong. A `whole` one has all that the runner writes."""
    record = parse_json(line)
    _expect(isinstance(record, dict), "no record of a run")
    for name in ("benchmark", "variant", "status", *(WHOLE if whole else ())):
        _expect(record.get(name) is not None, f"no record of a run, it has no '{name}'")
    for name in RUN if whole else ():
        _expect(name in record, f"no record of a run, it has no '{name}'")
    for name, fits in SHAPES.items():
        value = record.get(name)
        _expect(value is None or fits(value), f"no record of a run, its '{name}' is {str(value)[:40]!r}")
    if whole:
        _expect_whole(record)
    return dict(record)


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _expect_whole(record: Mapping[str, Any]) -> None:
    spec = record["spec"]
    _expect(
        _text(spec.get("file")) and _text(spec.get("sha256")), "no record of a run, its 'spec' is not whole"
    )
    for name, one in record["metrics"].items():
        _expect(
            {"value", "unit", "reduction"} <= one.keys(), f"no record of a run, metric '{name}' is not whole"
        )


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold; NaN is one."""
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and isinstance(float(value), float)
        )
    except OverflowError:
        return False


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return is_number(value) and 0 < value < math.inf


def _moment(value: Any) -> bool:
    return is_number(value) and 0 <= value < LAST_MOMENT


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def _params(value: Any) -> bool:
    return isinstance(value, dict) and all(_text(each) or is_number(each) for each in value.values())


def _metric(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and (value.get("value") is None or is_number(value["value"]))
        and isinstance(value.get("unit") or "", str)
        and isinstance(value.get("values") or [], list)
    )


def _metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_metric, value.values()))


SHAPES: Mapping[str, Callable[[Any], bool]] = {
    "benchmark": _text,
    "variant": _text,
    "status": _text,
    "reason": _text,
    "command": _text,
    "repeat": _whole_number,
    "exitcode": _whole_number,
    "params": _params,
    "env": _texts,
    "log": _texts,
    "metrics": _metrics,
    "problems": _mapping,
    "monitor": _mapping,
    "spec": _mapping,
    "start": _moment,
    "end": _moment,
    "seconds": is_number,
    "pace": is_number,
    "paces": _numbers,
    "turns": _texts,
}
WHOLE = ("repeat", "params", "env", "log", "metrics", "problems", "spec")
RUN = ("reason", "command", "exitcode", "start", "end", "seconds")

MOST_VALUES = 1000
FULL = "the disk is full, free some of it"
Record = dict[str, Any]


class Results:
    """The records of a log folder; one runner at a time may hold it."""

    def __init__(self, log: Path):
        self.path = log / RECORDS
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise RunError(f"{log}: another runner is at work here; wait for it, or take another") from error
        try:
            self.records = self._load()
        except DataError:
            self.close()
            raise

    def _load(self) -> list[Record]:
        """The records so far; a last line that a killed runner left unfinished is cut off."""
        *lines, last = self.path.read_bytes().split(b"\n")
        found = [self._parsed(line, number) for number, line in enumerate(lines, 1)]
        if last:
            with suppress(ValueError):  # cut off, it is no JSON; whole, it may be somebody else's file
                parse_json(last)
                self._parsed(last, len(lines) + 1)
            os.ftruncate(self._file, sum(len(line) + 1 for line in lines))
        return found

    def _parsed(self, line: bytes, number: int) -> Record:
        try:
            return parse_record(line, whole=True)
        except ValueError as error:
            raise DataError(f"{self.path}:{number}: damaged ({error}); take another --log-dir") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """One more record, which is on disk when this returns."""
        made = to_jsonable(record)
        line = (json.dumps(made, allow_nan=False) + "\n").encode()
        try:
            written = os.write(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            raise RunError(f"{self.path}: {_describe_error(error)}; go on with --resume") from error
        if written != len(line):
            raise RunError(f"{self.path}: {FULL}; go on with --resume")
        self.records.append(made)

    def close(self) -> None:
        """Let another runner have the folder."""
        os.close(self._file)


def _describe_error(error: OSError) -> str:
    return FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({error.strerror})"


def metric_records(benchmark: Benchmark, variant: Variant, found: MetricValues) -> dict[str, dict[str, Any]]:
    """Every number that was found or derived, as records hold it."""
    said: list[Metric | Derived] = [*benchmark.metrics, *(variant.derived or benchmark.derived)]
    return {
        one.name: {
            "value": found.results[one.name],
            "reduction": one.reduction,
            "unit": one.unit or _label(benchmark, one.name),
            "values": found.values.get(one.name, [])[:MOST_VALUES],
        }
        for one in said
        if one.name in found.results
    }


def _label(benchmark: Benchmark, metric: str) -> str:
    return next((label for label, name in benchmark.output if name == metric), "")


def hash_file(file: Path) -> str:
    """The SHA-256 of a file, as its name in records."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def add_provenance(log: Path, provenance: Mapping[str, Any]) -> str:
    """Keep where results come from, once for all records that share it; the id by which they name it."""
    text = json.dumps(to_jsonable(provenance), sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = log / PROVENANCE
    try:
        known = load_json(path)
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    if name not in known:
        write_json(path, {**known, name: provenance})
    return name


RECORDS, PROVENANCE = "results.jsonl", "provenance.json"
