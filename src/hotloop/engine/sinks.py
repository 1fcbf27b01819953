"""Where a run's records go besides its events.jsonl: the console, TensorBoard, Weights & Biases.

A sink is handed each record after it is written and adds nothing of its own, so all of them agree. The
console keeps the wording that the old benchmark files look for. No sink knows the run folder or the loop.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from hotloop.errors import MissingExtra

Record = Mapping[str, Any]
FRAME = ("event", "update", "epoch", "time", "elapsed", "nonfinite")
_CURVES = ("log", "summary", "validation")


class Sink(Protocol):
    """What a run feeds."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go."""


def fixed(value: float) -> str:
    """Six significant digits without an exponent, always with a point: old patterns read `\\d*\\.\\d*`."""
    if value == 0 or not math.isfinite(value):
        return "0.0" if value == 0 else str(value)
    text = f"{value:.{max(1, 5 - math.floor(math.log10(abs(value))))}f}".rstrip("0")
    return text + "0" if text.endswith(".") else text


def _figures(record: Record) -> Iterator[str]:
    for name, value in record.items():
        value = record.get("nonfinite", {}).get(name, value)
        if name in FRAME or value is None or isinstance(value, list | dict):
            continue
        text = fixed(value) if isinstance(value, float) else str(value)
        if name == "throughput":
            text += " samples/sec"
        elif name.endswith("accuracy"):
            text = f"{fixed(100 * value) if isinstance(value, float | int) else text} %"
        yield f"{name.replace('_', ' ')}: {text}"


def console_line(record: Record) -> str:
    """A record for people: `update 781, epoch 1.00: loss: 1.25, throughput: 5120.0 samples/sec`."""
    event = record["event"]
    figures = ", ".join(_figures(record))
    if event == "warning":
        return f"warning: {record.get('message', figures)}"
    if event in ("start", "compile"):
        return f"{event}: {figures}"
    epoch = f", epoch {record['epoch']:.2f}" if "epoch" in record else ""
    place = f"update {record['update']}{epoch}"
    return f"{place}: {figures}" if event == "log" else f"{event} at {place}: {figures}".removesuffix(": ")


class ConsoleSink:
    """Prints each record as one line with the function it is given; summaries are for curves alone."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say

    def write(self, record: Record) -> None:
        """Print it."""
        if record["event"] != "summary":
            self._say(console_line(record))

    def close(self) -> None:
        """Nothing to do."""


def _numbers(record: Record) -> dict[str, float]:
    """The figures that make curves, as `log/loss`."""
    names = (name for name in record if name not in FRAME)
    values = {name: record[name] for name in names if type(record[name]) in (int, float)}
    return {f"{record['event']}/{name}": value for name, value in values.items()}


class TensorBoardSink:
    """Curves of log and validation figures, for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise MissingExtra("tensorboardX", "tensorboard", "writing TensorBoard records") from None
        self._writer = SummaryWriter(str(folder), write_to_disk=True)

    def write(self, record: Record) -> None:
        """Add a point to each curve."""
        if record["event"] in _CURVES:
            for tag, value in _numbers(record).items():
                self._writer.add_scalar(tag, value, record["update"], walltime=record["time"])

    def close(self) -> None:
        """Flush to disk."""
        self._writer.close()


class WandbSink:
    """Curves in a Weights & Biases project; where the service cannot be reached the run is kept offline."""

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
        about: dict[str, Any] = {"project": project, "name": name, "config": dict(config), "dir": str(folder)}
        if tags:
            about["tags"] = list(tags)
        try:
            self._run = wandb.init(**about)
        except Exception:  # no key, no network, no service: the errors differ by version, the answer does not
            self._run = wandb.init(**about, mode="offline")

    def write(self, record: Record) -> None:
        """Add a point to each curve."""
        if record["event"] in _CURVES:
            # Not as its own step: it drops what comes with an earlier one, as a validation after training does.
            self._run.log({**_numbers(record), "update": record["update"], "epoch": record["epoch"]})

    def close(self) -> None:
        """Send or keep what is left."""
        self._run.finish()
