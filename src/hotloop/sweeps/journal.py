"""The journal of a sweep, `trials.jsonl`: a line when it starts or goes on, when a trial begins and when it ends.

Lines are only ever added, each in one write, and one process at a time holds the folder; a kill can tear only the last
line, which is dropped when the sweep goes on. What was drawn is read from here and not drawn again.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotloop.engine.run import append_line, drop_torn_line, find_differences, take_folder
from hotloop.errors import RunError
from hotloop.options import to_jsonable
from hotloop.options.files import parse_json

FILE = "trials.jsonl"
STARTS, BEGINS, ENDS = "sweep", "begin", "end"


class Journal:
    """The trials that began, by number, and the rows of those that ended."""

    def __init__(self, folder: Path, records: list[dict[str, Any]]):
        self.path = folder / FILE
        self.begun: dict[int, dict[str, Any]] = {}  # what each tries
        self.rows: dict[int, dict[str, Any]] = {}
        for record in records:
            if record["event"] == BEGINS:
                self.begun[record["trial"]] = record["values"]
                self.rows.pop(record["trial"], None)  # it began again
            elif record["event"] == ENDS:
                self.rows[record["trial"]] = record["row"]

    def begin(self, number: int, values: Mapping[str, Any]) -> None:
        self.begun[number] = to_jsonable(values)
        self._write(BEGINS, trial=number, values=values)

    def end(self, number: int, row: Mapping[str, Any]) -> None:
        self.rows[number] = to_jsonable(row)
        self._write(ENDS, trial=number, row=row)

    def _write(self, event: str, **fields: Any) -> None:
        append_line(self.path, {"event": event, "time": time.time(), **fields})


@contextmanager
def open_journal(folder: Path, about: Mapping[str, Any], *, resume: bool) -> Iterator[Journal]:
    """A new journal in an empty folder, or with `resume` the one that is there, of a sweep that is about the same."""
    check_journal(folder, about, resume=resume)
    lock = take_folder(folder, False)
    try:
        drop_torn_line(folder / FILE)
        journal = Journal(folder, read_records(folder) if resume else [])
        journal._write(STARTS, about=about, resumed=resume)
        yield journal
    finally:
        os.close(lock)


def check_journal(folder: Path, about: Mapping[str, Any], *, resume: bool) -> None:
    """RunError where a sweep can neither begin nor go on in this folder."""
    there = (folder / FILE).exists()
    if resume and not there:
        raise RunError(f"--resume: {folder} holds no sweep; leave it out to start one")
    if not resume:
        if there:
            raise RunError(f"{folder} holds a sweep: go on with it by --resume, or choose another --run-name")
        if folder.is_dir() and any(name.name != ".lock" for name in folder.iterdir()):
            raise RunError(f"{folder} is not empty: choose another --run-name")
        return
    before = read_about(folder)
    if changed := find_differences(before, to_jsonable(about)):
        raise RunError(
            f"--resume: {folder} is another sweep: {'; '.join(changed.values())}; use the old values or a new name"
        )


def read_about(folder: Path) -> dict[str, Any]:
    """What the sweep in this folder was first asked for."""
    records = read_records(folder)
    if not records or records[0]["event"] != STARTS or not isinstance(records[0].get("about"), dict):
        raise RunError(f"{folder / FILE} cannot be read: its first line is not that of a sweep")
    return dict(records[0]["about"])


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every line of the journal but one that a kill tore; RunError for one that is no record of ours."""
    path = folder / FILE
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not _is_record(record):
            raise RunError(f"{path} line {number} is not a record of a sweep: the file was altered")
        records.append(record)
    return records


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or record.get("event") not in (STARTS, BEGINS, ENDS):
        return False
    if record["event"] == STARTS:
        return True
    content = record.get("values" if record["event"] == BEGINS else "row")
    number = record.get("trial")
    return type(number) is int and number >= 1 and isinstance(content, dict)
