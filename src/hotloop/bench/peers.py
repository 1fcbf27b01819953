"""The comparisons with other programs, family by family: each a process, their results put together in one document.

The programs lie in the source tree (`benchmarks/peers`); both sides take turns inside each of them. The document is
what `hotloop bench report` reads. It knows nothing of what is compared.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hotloop.bench.report_peers import is_peers, number_or_none, peer_rows
from hotloop.errors import DataError, MissingExtra
from hotloop.options.files import parse_json

FOLDER = Path(__file__).parents[3] / "benchmarks" / "peers"
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "kernels": ("torch",),
    "vcd": ("torch", "blackjax"),
    "recommender": ("torch",),
    "cnn": ("torch",),
    "estimator": ("torch",),
}
"""Family, which is also its program's name -> the packages that it needs."""
SAVE = {"kernels": "--save"}
"""The option that names the file for the results, where it is not --json."""
ASK = "import jax; print(jax.default_backend())"
QUIET, LOOK = 0.3, 0.5
"""Busy cores above which a figure is not worth keeping, and seconds of looking."""
COLUMNS = ("family", "case", "side", "ratio", "range", "floor", "missed")


@dataclass(frozen=True)
class Turns:
    """How a comparison is run; what is None is the program's own choice."""

    device: str = "cpu"
    rounds: int | None = None
    seconds: float | None = None
    load: float = 0.0
    """Of the machine, before the first of them."""

    def words(self) -> list[str]:
        """The options of a program."""
        given = {"--device": self.device, "--rounds": self.rounds, "--seconds": self.seconds}
        return [word for name, value in given.items() if value is not None for word in (name, f"{value}")]


@dataclass(frozen=True)
class Row:
    """One side of one case; `ratio` is its time over ours, so more is better for us."""

    family: str
    case: str
    side: str
    ratio: float
    low: float
    high: float
    floor: float | None
    missed: bool


def check(families: Sequence[str]) -> None:
    """One clear line, before anything runs, where a program or a package is not there."""
    if not FOLDER.is_dir():
        raise DataError(
            "the programs that are compared are part of the source tree (benchmarks/peers), and this hotloop is "
            "installed without it; take a checkout and install it with pip install -e '.[peers]'"
        )
    for family in families:
        for package in PACKAGES[family]:
            if find_spec(package) is None:
                raise MissingExtra(package, "peers", f"the comparison of {family}")
        if not (FOLDER / f"{family}.py").is_file():
            raise DataError(f"{FOLDER / family}.py: not there; is the checkout complete?")


def load() -> float:
    """Cores that are busy at this moment; an average over a minute would count what has just ended."""
    busy, began = _core_seconds(), time.perf_counter()
    time.sleep(LOOK)
    return round((_core_seconds() - busy) / (time.perf_counter() - began), 2)


def _core_seconds() -> float:
    """Seconds that all cores have worked since the machine started; 0 where it does not say."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    except OSError:
        return 0.0
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for disks


def default_device() -> str:
    """gpu where jax has one, else cpu; asked in a process, since here it would take the GPU's memory."""
    done = subprocess.run([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True, check=False)
    return "gpu" if done.stdout.split()[-1:] in (["gpu"], ["cuda"], ["rocm"]) else "cpu"


def compare(family: str, turns: Turns, stdout: int | None) -> tuple[dict[str, Any] | None, str]:
    """Run one family's program: its document, and if something other than a floor went wrong, what."""
    with tempfile.TemporaryDirectory(prefix="hotloop-peers-") as folder:
        file = Path(folder) / f"{family}.json"
        save = [SAVE.get(family, "--json"), str(file)]
        argv = [sys.executable, str(FOLDER / f"{family}.py"), *turns.words(), *save]
        status = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=stdout, check=False).returncode
        try:
            document = parse_json(file.read_text("utf-8"))
        except (OSError, ValueError):
            document = None
    if not is_peers(document):
        return None, f"left no results (status {status})"
    if len(peer_rows(document, family)) < sum(row.get("side") != "ours" for row in results(document)):
        return document, "a ratio is not a number"
    if status and not any(row.missed for row in rows(document, family)):
        return document, f"ended with status {status}, and not for a floor"
    return document, ""


def results(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a program wrote of each side of each case."""
    return [row for row in document["results"] if isinstance(row, dict)]


def rows(document: Mapping[str, Any], family: str) -> list[Row]:
    """The rows of a table: every peer, and our own side where it is held to a speed."""
    found = [
        Row(
            family,
            one.case,
            one.peer,
            one.ratio,
            one.low,
            one.high,
            one.floor,
            one.floor is not None and one.ratio < one.floor,
        )
        for one in peer_rows(document, family)
    ]
    own = [(row, number_or_none(row.get("floor"))) for row in results(document) if row.get("side") == "ours"]
    return found + [
        Row(family, str(row.get("case", "")), "ours", 1.0, 1.0, 1.0, floor, bool(row.get("missed")))
        for row, floor in own
        if floor is not None
    ]


def cells(row: Row) -> tuple[str, ...]:
    """A row under COLUMNS; a floor of our own speed is no ratio, and is said in its own words."""
    speed = row.side == "ours"
    ratio, spread = ("-", "-") if speed else (f"{row.ratio:.2f}", f"{row.low:.2f} to {row.high:.2f}")
    floor = "-" if row.floor is None else f"{row.floor:g}{' a second' if speed else ''}"
    return row.family, row.case, row.side, ratio, spread, floor, "MISSED" if row.missed else ""


def together(
    documents: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str], turns: Turns
) -> dict[str, Any]:
    """One document of all families' results: where they were made, with what versions, and what failed."""
    merged: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "command": ["hotloop", "bench", "peers"]}
    for document in documents.values():
        merged |= {key: value for key, value in document.items() if key not in (*merged, "results")}
    loads = {family: one["load_before"] for family, one in documents.items() if "load_before" in one}
    merged |= {
        "options": turns.words(),
        "load_at_start": turns.load,
        "load_before": loads,
        "failed": dict(failed),
    }
    return merged | {
        "results": [{"family": family, **row} for family, one in documents.items() for row in results(one)]
    }


def dated(folder: Path, device: str) -> Path:
    """A file name that is not taken: 2026-11-15_peers_cpu.json, then ..._cpu_2.json."""
    stem = f"{time.strftime('%Y-%m-%d')}_peers_{device}"
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}_{number}.json", number + 1
    return path
