"""A run's record as one line for people, the same in every family: place, loss, accuracy, other metrics, rate, speed.

Figures that old benchmark files read with regular expressions keep their wording, and have no thousands separators.
It must not know what a metric means, nor where the line goes.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hotloop.engine.records import FRAME

Record = Mapping[str, Any]
SHOWN = ("start", "resume", "compile", "log", "validation", "warning", "profile", "sweep", "end")
"""Events with a line of their own; the others are for events.jsonl, or are told by the family in its own words."""
LAST = ("learning_rate", "seconds_per_10000_updates", "throughput", "memory_gib", "mfu")
"""What follows the metrics, in this order."""
PER_CENT = re.compile(r"(.*_)?(accuracy|top_\d+)|acceptance|mfu")
LABELS = {"seconds_per_10000_updates": "Time taken", "memory_gib": "memory"}
ACRONYMS = re.compile(r"\b(elbo|mae|mfu|rmse)\b")
UNITS = {
    "throughput": " samples/sec",
    "memory_gib": " GiB",
    # Old patterns read `Time taken: X,`.
    "seconds_per_10000_updates": ", for 10,000 updates",
}
READ = {"loss": ("log",), "accuracy": ("log", "validation"), "throughput": ("log",)}
"""What old patterns look for, and the events that they mean: in others it has no colon, or the last loss of a
training would be that of its validation."""
PLACE, FIGURE, SHARE = 29, 10, 6
"""Least widths in a log: of `update 999,999, epoch 999.99:`, of a figure from 0.001 on, of `100.00`."""


def console_line(record: Record) -> str:
    """A record for people: `update 781, epoch 1.00:       loss:    1.25000, ..., time: 0:00:09`."""
    event = record["event"]
    if event == "warning" and "message" in record:
        return f"warning: {record['message']}"
    if event == "start" and "folder" in record:
        return f"start: {record['folder']}{', resumed' if record.get('resumed') else ''}"
    if event == "compile" and "compile_seconds" in record:
        return _compile_line(record)
    figures = ", ".join(_figures(record))
    place = f"update {record['update']:,}" + (f", epoch {record['epoch']:.2f}" if "epoch" in record else "")
    if event == "log":
        return f"{f'{place}:':{PLACE}} {figures}, time: {clock(record['elapsed'])}"
    return f"{event} at {place}: {figures}".removesuffix(": ")


def _compile_line(record: Record) -> str:
    seconds = record["lower_seconds"] + record["compile_seconds"]
    what = f" {record['program']}" if "program" in record else ""
    length = f", calls of {record['updates_per_call']:,} updates" if "updates_per_call" in record else ""
    return f"compiled{what} in {seconds:.1f} s{length}"


def clock(seconds: float) -> str:
    """`h:mm:ss`."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def fixed(value: float, digits: int = 6) -> str:
    """So many significant digits without an exponent, always with a point: old patterns read `\\d*\\.\\d*`."""
    if not math.isfinite(value):
        return str(value)
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else digits - 1
    return f"{value:.{max(1, places)}f}"


def _figures(record: Record) -> Iterator[str]:
    aligned = record["event"] == "log"
    odd = record.get("nonfinite", {})
    for name in sorted((name for name in record if name not in FRAME), key=_rank):
        value = odd.get(name, record[name])
        if value is None or isinstance(value, list | dict):
            continue
        read = READ.get(name.rpartition("_")[2])
        colon = "" if read and record["event"] not in read else ":"
        width = (SHARE if _is_share(name) else FIGURE) if aligned else 0
        yield f"{_label(name)}{colon} {_text(name, value):>{width}}{' %' if _is_share(name) else UNITS.get(name, '')}"


def _label(name: str) -> str:
    """`validation_rmse` is `validation RMSE`."""
    return LABELS.get(name) or ACRONYMS.sub(lambda word: word[0].upper(), name.replace("_", " "))


def _rank(name: str) -> int:
    """Loss, accuracies, other metrics in the order of the record, then what is usual at the end."""
    if name in LAST:
        return 3 + LAST.index(name)
    return 0 if name.rpartition("_")[2] == "loss" else 1 if _is_share(name) else 2


def _is_share(name: str) -> bool:
    return PER_CENT.fullmatch(name) is not None


def _text(name: str, value: Any) -> str:
    if isinstance(value, str | bool):
        return str(value)
    if _is_share(name):
        return f"{100 * value:.2f}"
    if name == "learning_rate":
        return fixed(value, 4)
    return f"{value:,}" if isinstance(value, int) else fixed(value)
