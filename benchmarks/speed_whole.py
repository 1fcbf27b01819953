"""Whole trainings to a result in the files of benchmarks/results, as rows of one kind; speed_tables.py shows them.

A row is what was trained by which command on a machine, of all the seeds that a file has. Every kind of file has a
reader here; nothing is computed but means over runs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from speed_cells import duration, figure, gibibytes, natural, spread
from speed_sources import Source, age, fault_of, read_document, read_source

COLUMNS = ("what", "machine", "result", "updates", "in all", "rate", "memory")
Documents = Mapping[str, Any]


@dataclass(frozen=True)
class Whole:
    """A training on a machine in words: its result, the time of its updates alone, and that of the whole command."""

    source: Source
    what: str
    result: str
    updates: str = ""
    in_all: str = ""
    rate: str = ""
    memory: int | None = None

    @property
    def cells(self) -> Sequence[str]:
        """In the order of COLUMNS."""
        words = (self.result, self.updates, self.in_all, self.rate, gibibytes(self.memory))
        return (self.what, self.source.machine, *words)

    @property
    def family(self) -> str:
        """By our command; empty for another program's."""
        return next(iter(re.findall(r"`hotloop (\w+)", self.what)), "")


def whole_runs(folder: Path) -> list[Whole]:
    """Of each training on a machine the newest file's, in the order of their names."""
    found: dict[tuple[str, str], Whole] = {}
    rows: list[Whole] = []
    for path in folder.glob("*.json"):
        with fault_of(path):
            rows += _rows_of(path)
    for row in sorted(rows, key=lambda row: age(row.source)):
        found[row.what, row.source.machine] = row
    return [found[key] for key in sorted(found, key=lambda key: (natural(key[0]), key[1]))]


def _rows_of(path: Path) -> Iterator[Whole]:
    document = read_document(path)
    results = document.get("results", [])
    first = next(iter(results.values() if isinstance(results, dict) else results), {})
    names = {*document, *(first if isinstance(first, dict) else {})}
    for needed, read in READERS:
        if needed <= names:
            yield from read(read_source(path, document), document)


def in_seconds(values: Sequence[float]) -> str:
    """One of them as people say it, of several the mean and the range."""
    if len(values) == 1:
        return duration(values[0])
    digits = 3 if mean(values) < 2 else 1 if mean(values) < 100 else 0
    return spread(values, f".{digits}f", "s")


def _percent(values: Sequence[float]) -> str:
    return spread([100 * value for value in values], ".2f", "%")


def _speedrun(source: Source, document: Documents) -> Iterator[Whole]:
    for name, found in document["results"].items():
        if len(found["runs"]) > 10:  # a few are for the compiler's time
            accuracy = _percent([run["accuracy"] for run in found["runs"]])
            seconds = in_seconds([run["seconds"] for run in found["runs"]])
            yield Whole(source, f"CIFAR-10 by `hotloop cnn speedrun`, {name}", accuracy, seconds)


def _beside(source: Source, document: Documents) -> Iterator[Whole]:
    """The speedrun and hiverge's own program, on one card one after the other."""
    for side in document["results"]:
        is_ours = side["side"] == "ours"
        program = "`hotloop cnn speedrun`, beside hiverge's" if is_ours else f"{side['side']}, beside ours"
        yield Whole(source, f"CIFAR-10 by {program}", _percent(side["accuracy"]), in_seconds(side["seconds"]))


def _estimator(source: Source, document: Documents) -> Iterator[Whole]:
    for recipe in dict.fromkeys(run["recipe"] for run in document["results"]):
        runs = [run for run in document["results"] if run["recipe"] == recipe]
        seed = (
            ", seed 1" if len(runs) == 1 else ""
        )  # docs/results.md has the others of `keras`, which are in no file
        early = in_seconds([run["seconds_to_75"] for run in runs])
        seconds = in_seconds([run["training_seconds"] for run in runs])
        yield Whole(
            source,
            f"CIFAR-10 by `hotloop estimator --recipe {recipe}`",
            f"{_percent([run['test_accuracy'] for run in runs])} after {runs[0]['updates']:,} updates{seed}",
            f"{seconds}; 75 % after {early}",
            empty_then_full([run["seconds"] for run in runs]),
            spread([run["images_per_second"] for run in runs], ",.0f", "images/s"),
        )


def _vcd(source: Source, document: Documents) -> Iterator[Whole]:
    for run in document["runs"].values():
        if run["updates"] == PAPER_UPDATES:
            test = run["test"]
            yield Whole(
                source,
                f"binarised MNIST by `hotloop vcd train --method {run['method']}`",
                f"{test['log_likelihood']:.2f} ± {test['standard_error']:.2f} nats after {run['updates']:,} updates, "
                f"seed {run['seed']}",
                duration(run["training_seconds"]),
                duration(run["whole_command_seconds"]),
                f"{figure(100 * run['updates_per_second']['median'])} images/s",
            )


def _cnn(source: Source, document: Documents) -> Iterator[Whole]:
    for name, data, config in (
        ("resnet20", "CIFAR-10", "cifar_resnet20"),
        ("mnist_resnet8", "MNIST", "mnist_resnet8"),
    ):
        run = document[name]
        yield Whole(
            source,
            f"{data} by `hotloop cnn train --config {config}`",
            f"{_percent([run['best']['validation_accuracy']])} after {run['best']['epoch']:.0f} epochs",
            "",
            duration(run["time_to_train_seconds"]),
            f"{figure(run['images_per_second'])} images/s",
            run["memory_bytes"],
        )


def _averages(source: Source, document: Documents) -> Iterator[Whole]:
    """Trainings whose averaged weights count; the command has their preset."""
    runs = document["results"]
    accuracy = _percent([run["best"]["ema_accuracy"] for run in runs])
    yield Whole(
        source,
        f"CIFAR-10 by `{document['command'].split(' --dataset-path')[0]}`",
        f"{accuracy} after {runs[0]['best']['epoch']:.0f} epochs",
        "",
        empty_then_full([run["time_to_train_seconds"] for run in runs]),
        spread([run["images_per_second"] for run in runs], ",.0f", "images/s"),
        max((run["memory_bytes"] for run in runs if "memory_bytes" in run), default=None),
    )


def _results(source: Source, document: Documents) -> Iterator[Whole]:
    """Of benchmarks/time_to_result.py."""
    real = [
        row for row in document["results"] if not row["data"].startswith("random ")
    ]  # speed_rows.py has others
    for case in dict.fromkeys(row["case"] for row in real):
        runs = [row for row in real if row["case"] == case]
        command = runs[0]["command"].removesuffix(f" --seed {runs[0]['seed']}")
        result = _value(runs)
        if runs[0]["update"] == runs[0]["updates"]:
            result += f" after {runs[0]['updates']:,} updates"
        result += f", seed {runs[0]['seed']}" if len(runs) == 1 else ""
        updates = in_seconds([row["training_seconds"] for row in runs])
        if any(
            row["update"] < row["updates"] for row in runs
        ):  # it went on to see whether it would get better
            updates += f"; the best after {in_seconds([row['result_seconds'] for row in runs])}"
        if early := [row["target_seconds"] for row in runs if row["target_seconds"] is not None]:
            missed = "" if len(early) == len(runs) else f" in {len(early)} of {len(runs)} runs"
            updates += f"; {100 * runs[0]['target']:g} % after {in_seconds(early)}{missed}"
        yield Whole(
            source,
            f"{runs[0]['data']} by `{command}`",
            result,
            updates,
            empty_then_full([row["seconds"] for row in runs]),
            spread([row["samples_per_second"] for row in runs], ",.0f", runs[0]["unit"]),
            max(row["memory_bytes"] for row in runs),
        )


def _value(runs: Sequence[Mapping[str, Any]]) -> str:
    """The figure of all runs as people say it, with the standard error that a run itself gives."""
    lead, scale, form, unit = FIGURES[runs[0]["figure"]]
    errors = [row["standard_error"] for row in runs if row["standard_error"] is not None]
    own = scale * mean(errors) if errors else None
    return lead + spread([scale * row["value"] for row in runs], form, unit, own)


def empty_then_full(seconds: Sequence[float]) -> str:
    """Of whole commands: the first had an empty cache of programs, the others what was left there."""
    first, *others = seconds
    return f"{duration(first)}, then {duration(mean(others))}" if others else duration(first)


PAPER_UPDATES = 400_000  # vcd's paper; a run with fewer is of another network
FIGURES = {
    "validation_accuracy": ("", 100, ".2f", "%"),
    "accuracy": ("", 100, ".2f", "%"),
    "log_likelihood": ("", 1, ".2f", "nats"),
    "rmse": ("RMSE ", 1, ".4f", ""),
    "ndcg@10": ("NDCG@10 ", 1, ".4f", ""),
}
"""Of benchmarks/time_to_result.py: what stands before a figure, its factor, its form and its unit."""
READERS = (
    ({"runs", "lower_seconds"}, _speedrun),
    ({"side", "seconds", "accuracy"}, _beside),
    ({"recipe", "training_seconds"}, _estimator),
    ({"runs", "machine"}, _vcd),
    ({"resnet20"}, _cnn),
    ({"best", "time_to_train_seconds"}, _averages),
    ({"cache", "training_seconds"}, _results),
)
"""How each kind of file is read, by names in it or in the first of its results."""
