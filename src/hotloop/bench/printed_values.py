"""Numbers out of JSON lines that a program prints: its events, and the result on its last line.

An event is an object with an `event`, as in a run's events.jsonl; the result is the last object on standard output
without one, as `--json` prints it. Where the result names its run's folder, the events can be had from there. A key
may be a path: `cost.flops` is inside an object, `validation.loss` is the `loss` of events called validation; and
`loss|validation.loss` is both, in the order of the events. It knows no metrics.

A limit on the time that patterns may take: one that backtracks without end is given up instead of waited for.
"""

import json
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hotloop.options.files import parse_json

LONGEST_LINE = 1 << 20
LARGEST_RECORD = 256 << 20
RUN_KEYS = ("run", "model_dir")
MOST_VALUES = 1_000_000
_MISSING = object()


@dataclass
class Series:
    """The values of one key in order; `is_summary` for a single number out of the result."""

    values: list[float] = field(default_factory=list)
    problem: str = ""
    is_summary: bool = False

    def add(self, key: str, value: Any) -> None:
        """One more value; null stands for NaN, as JSON cannot say that."""
        try:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError
            self.values.append(float("nan") if value is None else float(value))
        except (ValueError, OverflowError):
            self.problem = f"'{key}' in a JSON line is {json.dumps(value)[:80]}, which is no number"
        if len(self.values) > MOST_VALUES:
            self.problem = f"more than {MOST_VALUES} values; print fewer"


class JsonLines:
    """Takes a program's lines and keeps the values of some keys."""

    def __init__(self, keys: Iterable[str]):
        self._events: dict[str, Series] = {key: Series() for key in keys}
        self._result: Mapping[str, Any] = {}

    def read(self, line: str, is_stdout: bool) -> None:
        """Take one line if it is a JSON object; any other line is left alone."""
        record = parse_line(line)
        if record is None:
            return
        if "event" not in record:
            self._result = record if is_stdout else self._result
            return
        _take_values(record, self._events)

    def read_run(self, folder: Path, keys: Iterable[str]) -> None:
        """Take keys that no line had from the events of the run that the result names, relative to `folder`."""
        recorded = {key: Series() for key in keys if not self._events[key].values}
        for line in _run_lines(self._result, folder) if recorded else ():
            record = parse_line(line) or {}
            if record.get("event") == "start":  # an earlier process of the same run is none of ours
                recorded = {key: Series() for key in recorded}
            elif "event" in record:
                _take_values(record, recorded)
        self._events |= {key: series for key, series in recorded.items() if series.values or series.problem}

    def series(self, key: str) -> Series | None:
        """The key's values: from events, else from the result, else None."""
        series = self._events[key]
        if series.values or series.problem:
            return series
        value = look_up(self._result, key)
        if value is _MISSING:
            return None
        many = isinstance(value, list)
        found = Series(is_summary=not many)
        for item in value if many else [value]:
            found.add(key, item)
        return found


def parse_line(line: str) -> Mapping[str, Any] | None:
    """The object on a line, or None."""
    text = line.strip() if line[:1] in "{ \t" else ""
    if not (text.startswith("{") and text.endswith("}")) or len(text) > LONGEST_LINE:
        return None
    try:
        record = parse_json(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def look_up(record: Mapping[str, Any], key: str) -> Any:
    """The value under a name or a path of names with dots."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _take_values(record: Mapping[str, Any], wanted: Mapping[str, Series]) -> None:
    for key, series in wanted.items():
        if not series.problem and (value := _event_value(record, key)) is not _MISSING:
            series.add(key, value)


def _run_lines(result: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The lines of the run's events.jsonl, or none where there is no such run."""
    runs = [result[key] for key in RUN_KEYS if isinstance(result.get(key), str)]
    try:
        for run in runs[:1]:
            path = folder / run / "events.jsonl"
            if path.stat().st_size <= LARGEST_RECORD:
                with path.open(encoding="utf-8", errors="replace") as file:
                    yield from file
    except (OSError, ValueError):
        return


def _event_value(record: Mapping[str, Any], key: str) -> Any:
    """A plain key is looked up in logs, one that begins with an event's name in events of that name; | is or."""
    key, _, others = key.partition("|")
    event, _, rest = key.partition(".")
    value = _MISSING
    if rest and record["event"] == event:
        value = look_up(record, rest)
    elif record["event"] == "log":
        value = look_up(record, key)
    return _event_value(record, others) if value is _MISSING and others else value


TICK = 0.1
LONGEST_SEARCH, LONGEST_OF_ALL = 3.0, 120.0
"""Seconds for one line, and for all lines of a run."""


class TooSlow(Exception):
    """A search was given up."""


class Stopwatch:
    """The time of one pattern's searches, in ticks that fell into them."""

    def __init__(self) -> None:
        self.all = self.search = 0.0

    def tick(self) -> None:
        """Count one; TooSlow where that is one too many."""
        self.all += TICK
        self.search += TICK
        if self.search > LONGEST_SEARCH:
            raise TooSlow(f"more than {LONGEST_SEARCH:g} seconds for one line")
        if self.all > LONGEST_OF_ALL:
            raise TooSlow(f"more than {LONGEST_OF_ALL:g} seconds for all lines")


class SearchLimit:
    """Whose search is on, if any. Set and reset for every line, so it is a plain attribute and no context."""

    def __init__(self) -> None:
        self.running: Stopwatch | None = None

    def begin(self, stopwatch: Stopwatch) -> None:
        """A search begins."""
        stopwatch.search = 0.0
        self.running = stopwatch

    def end(self) -> None:
        """No search is on."""
        self.running = None

    def _tick(self, number: int, frame: FrameType | None) -> None:
        if self.running is not None:
            self.running.tick()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold searches to their limits while the block runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGVTALRM, self._tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, TICK, TICK)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
