"""Where a run's records go besides its events.jsonl: the console, TensorBoard, Weights & Biases.

A sink is handed each record after it is written and adds nothing of its own, so all of them agree. How a record
reads on the console is in `lines`. No sink knows the run folder or the loop.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from hotloop.engine.lines import SHOWN, Record, console_line
from hotloop.engine.records import FRAME, write_whole
from hotloop.errors import MissingExtra

_CURVES = ("log", "summary", "validation")


class Sink(Protocol):
    """What a run feeds."""

    @property
    def patience(self) -> float | None:
        """Seconds after which a record counts as stuck; None: it may take any time, in the caller's own thread."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go."""


class ConsoleSink:
    """Prints records as lines with the function it is given: those that have one, and `also` where it is asked for."""

    patience = None  # a person who stops the terminal for a while wants to read on afterwards

    def __init__(self, say: Callable[[str], None], also: Collection[str] = ()):
        self._say, self._shown = say, (*SHOWN, *also)

    def write(self, record: Record) -> None:
        """Print it."""
        if record["event"] in self._shown:
            self._say(console_line(record))

    def close(self) -> None:
        """Nothing to do."""


def _numbers(record: Record) -> dict[str, float]:
    """The figures that make curves, as `log/loss`."""
    names = (name for name in record if name not in FRAME)
    values = {name: record[name] for name in names if type(record[name]) in (int, float)}
    return {f"{record['event']}/{name}": value for name, value in values.items()}


class TensorBoardSink:
    """Curves of log and validation figures, for `tensorboard --logdir FOLDER`.

    Written here and not by tensorboardX's SummaryWriter: its thread dies on a full disk, with a traceback, and
    whoever adds to its queue then waits for ever.
    """

    patience = 5.0

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        except ImportError:
            raise MissingExtra("tensorboardX", "tensorboard", "writing TensorBoard records") from None
        self._event, self._scalar = event_pb2.Event, summary.scalar
        self._checksum = record_writer.masked_crc32c
        self._folder = Path(folder)
        self._file: FileIO | None = None

    def write(self, record: Record) -> None:
        """Add a point to each curve."""
        if record["event"] in _CURVES:
            for tag, value in _numbers(record).items():
                point = {"summary": self._scalar(tag, value), "step": record["update"]}
                self._append(self._event(wall_time=record["time"], **point))

    def _append(self, event: Any) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
            self._file = (self._folder / name).open("ab", buffering=0)
            self._append(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        write_whole(self._file.fileno(), length + checksums[0] + data + checksums[1])

    def close(self) -> None:
        """Let the file go."""
        if self._file is not None:
            self._file.close()


class WandbSink:
    """Curves in a Weights & Biases project; where the service cannot be reached the run is kept offline.

    It is started by the first curve, when the run's folder is there.
    """

    patience = 30.0  # it must answer to a start within 20, and then start offline

    def __init__(
        self,
        project: str,
        name: str,
        config: Mapping[str, Any],
        folder: str | Path,
        tags: Collection[str] = (),
    ):
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "wandb", "logging to Weights & Biases") from None
        self._wandb: Any = wandb
        self._run: Any = None
        self._about: dict[str, Any] = {
            "project": project,
            "name": name,
            "config": dict(config),
            "dir": str(folder),
            "settings": {"init_timeout": 20},
        }
        if tags:
            self._about["tags"] = list(tags)

    def write(self, record: Record) -> None:
        """Add a point to each curve."""
        if record["event"] not in _CURVES:
            return
        if self._run is None:
            self._run = self._start()
        # Not as its own step: it drops what comes with an earlier one, as a validation after training does.
        self._run.log({**_numbers(record), "update": record["update"], "epoch": record["epoch"]})

    def _start(self) -> Any:
        try:
            return self._wandb.init(**self._about)
        except Exception:  # no key, no network, no service: the errors differ by version, the answer does not
            return self._wandb.init(**self._about, mode="offline")

    def close(self) -> None:
        """Send or keep what is left."""
        if self._run is not None:
            self._run.finish()
