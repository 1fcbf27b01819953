"""The record of a run, and the file that records are appended to: one JSON object a line, on disk before the next run.

A runner that is killed loses the run in flight and nothing else. `results.py` reads the records for those who compare
and report.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.bench.metrics import Found
from hotloop.bench.model import Benchmark, Derived, Metric, Variant
from hotloop.bench.record_shape import parsed
from hotloop.bench.results import PROVENANCE, RECORDS
from hotloop.engine.records import write_json
from hotloop.errors import DataError, RunError
from hotloop.options import to_jsonable
from hotloop.options.files import load_json, parse_json

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
            return parsed(line, whole=True)
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
            raise RunError(f"{self.path}: {_words(error)}; go on with --resume") from error
        if written != len(line):
            raise RunError(f"{self.path}: {FULL}; go on with --resume")
        self.records.append(made)

    def close(self) -> None:
        """Let another runner have the folder."""
        os.close(self._file)


def _words(error: OSError) -> str:
    return FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({error.strerror})"


def metrics_of(benchmark: Benchmark, variant: Variant, found: Found) -> dict[str, dict[str, Any]]:
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


def digest(file: Path) -> str:
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
