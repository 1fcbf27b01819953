"""The words of the speed tables: figures, durations and memory as people write them, and whole trainings as rows."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from speed_rows import Source, read_source

LINK = "../benchmarks/results"


def figure(value: float) -> str:
    """Three digits at least, and thousands apart."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """In the unit that a person would take."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds)} s" if seconds >= 0.1 else f"{figure(1_000 * seconds)} ms"


def gibibytes(count: int | None) -> str:
    """Empty where it was not counted."""
    return (
        "" if count is None else f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.0f} MiB"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table of Markdown, line by line."""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def made(source: Source) -> str:
    """Date and commit, with the way to the file."""
    return f"[{source.date}]({LINK}/{source.file}), {source.commit}"


def spread(values: Sequence[float], form: str, unit: str) -> str:
    """The mean, and where there are several their number, the lowest and the highest."""
    said = f"{mean(values):{form}} {unit}"
    if len(values) == 1:
        return said
    return f"{said} ({min(values):{form}} to {max(values):{form}}, {len(values)} runs)"


def whole_runs(folder: Path) -> Iterator[Sequence[str]]:
    """Time to a result: (what, machine, result, time, rate, made) of the whole trainings in the files."""
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        source = read_source(path, document)
        for ending, read in READERS.items():
            if path.stem.endswith(ending):
                for what, result, time, rate in read(document):
                    yield what, source.machine, result, time, rate, made(source)


def _speedrun(document: dict[str, Any]) -> Iterator[Sequence[str]]:
    for name, found in document["results"].items():
        if len(found["runs"]) > 10:  # a few are for the compiler's time
            accuracy = spread([100 * run["accuracy"] for run in found["runs"]], ".2f", "%")
            seconds = spread([run["seconds"] for run in found["runs"]], ".3f", "s")
            yield f"CIFAR-10 by `hotloop cnn speedrun`, {name}", accuracy, seconds, ""


def _estimator(document: dict[str, Any]) -> Iterator[Sequence[str]]:
    for recipe in dict.fromkeys(run["recipe"] for run in document["results"]):
        runs = [run for run in document["results"] if run["recipe"] == recipe]
        accuracy = spread([100 * run["test_accuracy"] for run in runs], ".2f", "%")
        early = spread([run["seconds_to_75"] for run in runs], ".1f", "s")
        seconds = spread([run["training_seconds"] for run in runs], ".1f", "s")
        rate = spread([run["images_per_second"] for run in runs], ",.0f", "images/s")
        what = f"CIFAR-10 by `hotloop estimator --recipe {recipe}`, {runs[0]['updates']:,} updates"
        yield what, accuracy, f"{seconds}; 75 % after {early}", rate


def _vcd(document: dict[str, Any]) -> Iterator[Sequence[str]]:
    for run in document["runs"].values():
        if run["updates"] == PAPER_UPDATES:
            test = f"{run['test']['log_likelihood']:.2f} ± {run['test']['standard_error']:.2f} nats"
            rate = f"{figure(run['updates_per_second']['median'])} updates/s"
            what = (
                f"binarised MNIST by `hotloop vcd train --method {run['method']}`, {run['updates']:,} updates"
            )
            yield what, test, duration(run["training_seconds"]), rate


def _cnn(document: dict[str, Any]) -> Iterator[Sequence[str]]:
    for name, config in (("resnet20", "cifar_resnet20"), ("mnist_resnet8", "mnist_resnet8")):
        run = document[name]
        accuracy = f"{100 * run['best']['validation_accuracy']:.2f} % after {run['best']['epoch']:.0f} epochs"
        rate = f"{figure(run['images_per_second'])} images/s"
        what = f"`hotloop cnn train --config {config}`"
        yield what, accuracy, duration(run["time_to_train_seconds"]), rate


def _averages(document: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Trainings whose averaged weights count; the command has their preset."""
    runs = document["results"]
    accuracy = spread([100 * run["best"]["ema_accuracy"] for run in runs], ".2f", "%")
    seconds = spread([run["time_to_train_seconds"] for run in runs], ".0f", "s")
    rate = spread([run["images_per_second"] for run in runs], ",.0f", "images/s")
    what = document["command"].split(" --dataset-path")[0]
    yield f"CIFAR-10 by `{what}`", f"{accuracy} after {runs[0]['best']['epoch']:.0f} epochs", seconds, rate


PAPER_UPDATES = 400_000  # vcd's paper; a run with fewer is of another network
READERS = {
    "_speedrun_h200": _speedrun,
    "_cnn_h200_accuracy": _cnn,
    "_cifar10_wide_h200": _averages,
    "_estimator_h200": _estimator,
    "_vcd_h200": _vcd,
}
"""How each file of whole trainings is read, by the end of its name."""
