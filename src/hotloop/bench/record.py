"""The record of a run, what a line of it must look like, and the file that records are appended to: on disk before the
next run, so that a runner that is killed loses the run in flight and nothing else.
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
from hotloop.engine.run import write_json
from hotloop.errors import DataError, RunError
from hotloop.options import to_jsonable
from hotloop.options.files import load_json, parse_json

RECORDS, PROVENANCE = "results.jsonl", "provenance.json"
MOST_VALUES = 1000
LAST_MOMENT = 253402300800.0  # the year 10000, in which calendars of Python end
FULL = "the disk is full, free some of it"
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
            written = os.write(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = FULL if full else f"cannot be written ({error.strerror})"
            raise RunError(f"{self.path}: {why}; go on with --resume") from error
        if written != len(line):
            raise RunError(f"{self.path}: {FULL}; go on with --resume")
        self.records.append(made)

    def close(self) -> None:
        os.close(self._file)


def metric_records(benchmark: Benchmark, variant: Variant, found: MetricValues) -> dict[str, dict[str, Any]]:
    labels = {name: label for label, name in reversed(benchmark.output)}  # the first of two counts
    said: list[Metric | Derived] = [*benchmark.metrics, *(variant.derived or benchmark.derived)]
    return {
        one.name: {
            "value": found.results[one.name],
            "reduction": one.reduction,
            "unit": one.unit or labels.get(one.name, ""),
            "values": found.values.get(one.name, [])[:MOST_VALUES],
        }
        for one in said
        if one.name in found.results
    }


def hash_file(file: Path) -> str:
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


def parse_record(line: str | bytes, whole: bool = False) -> Record:
    """The record on a line; a ValueError says what is wrong.

    A part that is missing or None is fine for those who compare and report; a runner that goes on with a folder needs
    the `whole` record.
    """
    record = parse_json(line)
    _expect(isinstance(record, dict), "no record of a run")
    for name in WHOLE if whole else NEEDED:
        _expect(record.get(name) is not None, f"no record of a run, it has no '{name}'")
    for name in WHOLE_OR_NONE if whole else ():
        _expect(name in record, f"no record of a run, it has no '{name}'")
    for name, fits in SHAPES.items():
        value = record.get(name)
        _expect(value is None or fits(value), f"no record of a run, its '{name}' is {str(value)[:40]!r}")
    if whole:
        spec = [record["spec"].get(name) for name in ("file", "sha256")]
        _expect(all(map(_is_text, spec)), "no record of a run, its 'spec' is not whole")
        for name, one in record["metrics"].items():
            parts = {"value", "unit", "reduction"}
            _expect(parts <= one.keys(), f"no record of a run, metric '{name}' is not whole")
    return dict(record)


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold; NaN is one."""
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and isinstance(float(value), float)
        )
    except OverflowError:
        return False


def is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
    "benchmark": _is_text,
    "variant": _is_text,
    "status": _is_text,
    "reason": _is_text,
    "command": _is_text,
    "repeat": _is_whole_number,
    "exitcode": _is_whole_number,
    "params": _maps_to(lambda value: _is_text(value) or is_number(value)),
    "env": _maps_to(_is_text),
    "log": _maps_to(_is_text),
    "metrics": _maps_to(_is_metric),
    "problems": _maps_to(lambda value: True),
    "monitor": _maps_to(lambda value: True),
    "spec": _maps_to(lambda value: True),
    "start": lambda value: is_number(value) and 0 <= value < LAST_MOMENT,
    "end": lambda value: is_number(value) and 0 <= value < LAST_MOMENT,
    "seconds": is_number,
    "pace": is_number,
    "paces": lambda value: isinstance(value, list) and all(map(is_number, value)),
    "turns": _maps_to(_is_text),
}
