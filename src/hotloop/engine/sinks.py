"""Who is shown a run's records: the console, TensorBoard, Weights & Biases.

A record is one line on the console, the same in every family; figures that old benchmark files read with regular
expressions keep their wording, and have no thousands separators. No sink knows the loop, or what a metric means.
"""

import math
import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

from hotloop.engine.run import FRAME, Run, compose_record, write_all
from hotloop.engine.sink_group import Record, Sink, SinkGroup
from hotloop.errors import MissingExtra

SHOWN = ("start", "resume", "compile", "log", "validation", "warning", "profile", "sweep", "end")
"""Events with a line of their own; the others are for events.jsonl, or the family prints its own line."""
LAST = ("learning_rate", "seconds_per_10000_updates", "throughput", "memory_gib", "mfu")
"""What follows the metrics, in this order."""
PER_CENT = re.compile(r"(.*_)?(accuracy|top_\d+)|acceptance|mfu")
LABELS = {"seconds_per_10000_updates": "Time taken", "memory_gib": "memory"}
ACRONYMS = re.compile(r"\b(elbo|kl|mae|mfu|ndcg|rmse)\b")
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
_CURVES = ("log", "summary", "validation")


class ConsoleSink(Sink):
    """Prints records as lines, and waits for ever: who stops the terminal for a while wants to read on afterwards."""

    def __init__(self, say: Callable[[str], None], also: Collection[str] = ()):
        self._say, self._shown = say, (*SHOWN, *also)

    def write(self, record: Record) -> None:
        if record["event"] in self._shown:
            self._say(console_line(record))


def _numbers(record: Record) -> dict[str, float]:
    """The figures that make curves, as `log/loss`."""
    names = (name for name in record if name not in FRAME)
    values = {name: record[name] for name in names if type(record[name]) in (int, float)}
    return {f"{record['event']}/{name}": value for name, value in values.items()}


def check_tensorboard() -> None:
    if find_spec("tensorboardX") is None:
        raise MissingExtra("tensorboardX", "tensorboard", "writing TensorBoard records")


class TensorBoardSink(Sink):
    """Curves of log and validation figures, for `tensorboard --logdir FOLDER`.

    Written here and not by tensorboardX's SummaryWriter: its thread dies on a full disk, with a traceback, and
    a thread that adds to its queue then waits for ever.
    """

    patience = 30.0  # its import alone takes seconds on a busy machine

    def __init__(self, folder: str | Path):
        check_tensorboard()
        self._folder = Path(folder)
        self._file: FileIO | None = None

    def write(self, record: Record) -> None:
        if record["event"] not in _CURVES:
            return
        # Imported in the sink's thread, with the first curve: no run should wait for it before its first update.
        from tensorboardX import record_writer, summary
        from tensorboardX.proto.event_pb2 import Event

        events = []
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{os.uname().nodename}.{os.getpid()}"
            self._file = (self._folder / name).open("ab", buffering=0)
            events.append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        for tag, value in _numbers(record).items():
            point = {"summary": summary.scalar(tag, value), "step": record["update"]}
            events.append(Event(wall_time=record["time"], **point))
        for event in events:
            data = event.SerializeToString()
            length = struct.pack("<Q", len(data))
            checksums = [struct.pack("<I", record_writer.masked_crc32c(part)) for part in (length, data)]
            write_all(self._file.fileno(), length + checksums[0] + data + checksums[1])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class WandbSink(Sink):
    """Curves in a Weights & Biases project, which the first one starts, when the run's folder is there; where the
    service cannot be reached the run is kept offline."""

    patience = 30.0  # it must answer to a start within 20, and then start offline

    def __init__(self, **about: Any):
        """`about` is what `wandb.init` takes: project, name, config, dir, tags."""
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "wandb", "logging to Weights & Biases") from None
        self._wandb: Any = wandb
        self._run: Any = None
        self._about = {**about, "settings": {"init_timeout": 20}}

    def write(self, record: Record) -> None:
        if record["event"] not in _CURVES:
            return
        if self._run is None:
            try:
                self._run = self._wandb.init(**self._about)
            except Exception:  # no key, network or service: the errors differ by version, the answer does not
                self._run = self._wandb.init(**self._about, mode="offline")
        # Not as its own step: it drops what comes with an earlier one, as a validation after training does.
        self._run.log({**_numbers(record), "update": record["update"], "epoch": record["epoch"]})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Announcer(AbstractContextManager["Announcer"]):
    """Records of work that leaves no folder, such as validating a finished run: sinks see them, nothing is written."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = SinkGroup(sinks, lambda text: self.event("warning", message=text))
        self._began = time.monotonic()

    def event(
        self, event: str, *, update: int | None = None, epoch: float | None = None, **figures: Any
    ) -> dict[str, Any]:
        elapsed = time.monotonic() - self._began
        record = compose_record(event, update or 0, epoch or 0.0, elapsed, figures)
        self._sinks.write(record)
        return record

    def __exit__(self, *exception: object) -> None:
        self._sinks.close()


Recorder = Run | Announcer
"""What events are handed to."""


def console_line(record: Record) -> str:
    """A record for people: `update 781, epoch 1.00:       loss:    1.25000, ..., time: 0:00:09`."""
    event = record["event"]
    if event == "warning" and "message" in record:
        return f"warning: {record['message']}"
    if event == "start" and "folder" in record:
        return f"start: {record['folder']}{', resumed' if record.get('resumed') else ''}"
    if event == "compile" and "compile_seconds" in record:
        seconds = record["lower_seconds"] + record["compile_seconds"]
        what = f" {record['program']}" if "program" in record else ""
        length = f", calls of {record['updates_per_call']:,} updates" if "updates_per_call" in record else ""
        meanwhile = " meanwhile" if record.get("ahead") else ""
        return f"compiled{what}{meanwhile} in {seconds:.1f} s{length}"
    figures = ", ".join(_figures(record))
    place = f"update {record['update']:,}" + (f", epoch {record['epoch']:.2f}" if "epoch" in record else "")
    if event == "log":
        return f"{f'{place}:':{PLACE}} {figures}, time: {format_clock(record['elapsed'])}"
    return f"{event} at {place}: {figures}".removesuffix(": ")


def format_clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def format_fixed(value: float, digits: int = 6) -> str:
    """So many significant digits without an exponent, always with a point: old patterns read `\\d*\\.\\d*`."""
    if not math.isfinite(value):
        return str(value)
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else digits - 1
    return f"{value:.{max(1, places)}f}"


def _figures(record: Record) -> Iterator[str]:
    """`validation RMSE: 0.91` and so on."""

    def rank(name: str) -> int:
        # Loss, accuracies, other metrics in the order of the record, then what is usual at the end.
        if name in LAST:
            return 3 + LAST.index(name)
        return 0 if name.rpartition("_")[2] == "loss" else 1 if PER_CENT.fullmatch(name) else 2

    aligned, odd = record["event"] == "log", record.get("nonfinite", {})
    for name in sorted((name for name in record if name not in FRAME), key=rank):
        value = odd.get(name, record[name])
        if value is None or isinstance(value, list | dict):
            continue
        is_share = PER_CENT.fullmatch(name) is not None
        if isinstance(value, str | bool):
            text = str(value)
        elif is_share:
            text = f"{100 * value:.2f}"
        elif isinstance(value, int) and name != "learning_rate":
            text = f"{value:,}"
        else:
            text = format_fixed(value, 4 if name == "learning_rate" else 6)
        label = LABELS.get(name) or ACRONYMS.sub(lambda word: word[0].upper(), name.replace("_", " "))
        read = READ.get(name.rpartition("_")[2])
        colon = "" if read and record["event"] not in read else ":"
        width = (SHARE if is_share else FIGURE) if aligned else 0
        yield f"{label}{colon} {text:>{width}}{' %' if is_share else UNITS.get(name, '')}"
