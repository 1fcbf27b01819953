"""Records on disk: strict JSON, files replaced in one piece, lines read back after a kill, what stands of a run.

A record is an event with its place and figures; what the figures mean is not known here.
"""

import glob
import json
import math
import os
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.errors import RunError
from hotloop.options import to_jsonable
from hotloop.options.files import load_json, parse_json, whole_file

FRAME = ("event", "update", "epoch", "time", "elapsed", "nonfinite")
DISTURBANCE_EVENTS = ("resume", "stop")
"""Records of a run that was stopped or killed, and of no other."""
PROCESS_EVENTS: Mapping[str, tuple[str, ...]] = {
    "start": (),
    "compile": ("updates_per_call",),
    "profile": (),
    "warning": ("message",),
}
"""Records that every process makes of itself, and the figures that tell two of them apart: the first one stays."""


def compose_record(
    event: str, update: int, epoch: float, elapsed: float, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """A record as JSON holds it; NaN and infinity become null and are named in `nonfinite`, as `some` in a list."""
    if taken := set(figures) & set(FRAME):
        raise ValueError(f"figures cannot be called {sorted(taken)}: every record has these already")
    frame = {"event": event, "update": update, "epoch": epoch, "time": time.time(), "elapsed": elapsed}
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in figures.items()}
    odd = {
        name: str(value) if isinstance(value, float) else "some"
        for name, value in values.items()
        if _any_nonfinite(value)
    }
    record: dict[str, Any] = to_jsonable({**frame, **figures, **({"nonfinite": odd} if odd else {})})
    return record


def to_exact(value: Any) -> Any:
    """As `to_jsonable`, but NaN and infinity are kept, as `{"float": "nan"}`; `from_exact` brings them back."""
    return to_jsonable(value, lambda number: {"float": str(number)})


def from_exact(value: Any) -> Any:
    """What `to_exact` was given, with lists for tuples and arrays."""
    if isinstance(value, list):
        return [from_exact(item) for item in value]
    if isinstance(value, dict):
        return (
            float(value["float"]) if set(value) == {"float"} else {k: from_exact(v) for k, v in value.items()}
        )
    return value


def _any_nonfinite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_any_nonfinite, value))
    return isinstance(value, float) and not math.isfinite(value)


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
