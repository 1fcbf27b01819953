"""Comparisons with other programs (`benchmarks/peers`): run family by family, each a process, and read from the
documents that they leave, which name things differently (`ours_us`, a `side` a row, nested timings), as rows of one
shape.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hotloop.bench.page import COLOURS, Axis, CaptionedChart, Page, Strip, Strips
from hotloop.bench.record import group_by, is_number, is_positive
from hotloop.errors import DataError, MissingExtra
from hotloop.options.files import parse_json

REPORT_COLUMNS = (
    *("family", "case", "peer", "hotloop", "the peer", "unit"),
    *("times as fast", "lowest–highest", "floor", "device", "date"),
)
FOLDER = Path(__file__).parents[3] / "benchmarks" / "peers"
PACKAGES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("kernels", "recommender", "cnn", "estimator"), ("torch",)),
    "vcd": ("torch", "blackjax"),
}
"""Family, which is also its program's name -> the packages that it needs."""
SAVE = {"kernels": "--save"}  # the option that names the file for the results, where it is not --json
ASK = "import jax; print(jax.default_backend())"
QUIET, LOOK = 0.3, 0.5  # busy cores above which a figure is not worth keeping, and seconds of looking
TABLE_COLUMNS = ("family", "case", "side", "ratio", "range", "floor", "missed")


class PeerRow(NamedTuple):
    """One case against one peer: `ratio` times as fast, with the lowest and highest of its rounds."""

    family: str
    case: str
    peer: str
    ours: float | None
    theirs: float | None
    unit: str
    ratio: float
    low: float
    high: float
    floor: float | None
    device: str
    date: str


def is_peer_document(document: Any) -> bool:
    results = document.get("results") if isinstance(document, Mapping) else None
    rows = results if isinstance(results, list) else []
    return any(isinstance(row, Mapping) and is_positive(row.get("ratio")) for row in rows)


def read_peer_rows(document: Mapping[str, Any], name: str) -> list[PeerRow]:
    """The rows of one document; `name` is its file's, without the ending."""
    where, device, results = document.get("environment"), "unknown", result_rows(document)
    if isinstance(where, Mapping):
        kinds = where.get("device_kinds")
        device = str(kinds[0]) if isinstance(kinds, list) and kinds else device
        if where.get("platform") == "cpu":
            device = f"{where.get('cpu', 'CPU')}, {where.get('cores', '?')} cores"
    date = str(document.get("date") or name[:10])
    words = [word for word in name.split("_") if not re.fullmatch(r"[\d-]+", word)] or [name]
    own = {_case(row): row for row in reversed(results) if row.get("side") == "ours"}
    rows = []
    for row in results:
        if row.get("side") == "ours" or not is_positive(row.get("ratio")):
            continue
        family, case = str(row.get("family") or document.get("family") or words[0]), _case(row)
        timed = [key.removesuffix("_us") for key in row if key.endswith("_us")]
        nested = [key for key, value in row.items() if isinstance(value, Mapping)]
        unnamed = next((key for key in (*timed, *nested) if key != "ours"), "peer")
        peer = str(row.get("side") or row.get("peer") or unnamed)
        if "ours_us" in row:
            unit, times = "µs", [row["ours_us"], row.get(f"{peer}_us")]
        else:  # both sides in one row, or a row of its own for each
            sides = (row["ours"], row.get(peer)) if "ours" in nested else (own.get(case), row)
            times = [side.get("milliseconds") if isinstance(side, Mapping) else None for side in sides]
            unit = "ms"
        ratio = float(row["ratio"])
        ends = (row[key] if is_positive(row.get(key)) else ratio for key in ("ratio_low", "ratio_high"))
        low, high = map(float, ends)
        ours, theirs, floor = map(number_or_none, (*times, row.get("floor")))
        numbers = (ours, theirs, unit, ratio, low, high, floor)
        rows.append(PeerRow(family, case, peer, *numbers, device, date))
    return rows


def result_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in document["results"] if isinstance(row, dict)]


def number_or_none(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _case(row: Mapping[str, Any]) -> str:
    parts = [str(row[key]) for key in ("case", "shape") if row.get(key)]
    parts += [f"{key.replace('_', ' ')} {row[key]}" for key in ("size", "batch_size") if row.get(key)]
    kinds = re.findall(r"dtype\('(\w+)'\)", str(row.get("precision", ""))) or [str(row.get("dtype") or "")]
    return ", ".join([*parts, *(kind for kind in kinds[:1] if kind)])


def add_peers(page: Page, rows: Sequence[PeerRow]) -> None:
    page.section(
        "Beside other programs",
        "Times as fast as the peer at the same work on the same device, taken in turns: the median of the rounds' "
        "ratios. Right of the line hotloop is faster. Boxes reach from the lowest to the highest round.",
    )
    charts: list[CaptionedChart] = []
    axis = Axis("times as fast as the peer", log=True)
    for title, shown in group_by(rows, lambda row: f"{row.family} on {row.device}").items():
        peers, strips = list(dict.fromkeys(row.peer for row in shown)), []
        for row in shown:
            name, colour = f"{row.case} · {row.peer}", peers.index(row.peer) % COLOURS
            strips.append(Strip(name, row.low, row.ratio, row.high, colour=colour))
        charts.append((Strips(title, axis, strips, at=1.0), f"{title}."))
    page.charts(charts)
    cells = []
    for row in rows:
        numbers = (row.ours, row.theirs, row.unit, row.ratio, f"{row.low:.3g}–{row.high:.3g}", row.floor)
        cells.append((row.family, row.case, row.peer, *numbers, row.device, row.date))
    page.table(REPORT_COLUMNS, cells)


def check_programs(families: Sequence[str]) -> None:
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


def measure_load() -> float:
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


def find_device() -> str:
    """gpu where jax has one, else cpu; asked in a process, since here it would take the GPU's memory."""
    done = subprocess.run([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True, check=False)
    return "gpu" if done.stdout.split()[-1:] in (["gpu"], ["cuda"], ["rocm"]) else "cpu"


def run_family(family: str, words: Sequence[str], stdout: int | None) -> tuple[dict[str, Any] | None, str]:
    """Run one family's program with these options: its document, and if other than a floor went wrong, what."""
    with tempfile.TemporaryDirectory(prefix="hotloop-peers-") as folder:
        file = Path(folder) / f"{family}.json"
        save = [SAVE.get(family, "--json"), str(file)]
        argv = [sys.executable, str(FOLDER / f"{family}.py"), *words, *save]
        status = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=stdout, check=False).returncode
        try:
            document = parse_json(file.read_text("utf-8"))
        except (OSError, ValueError):
            document = None
    if not is_peer_document(document):
        return None, f"left no results (status {status})"
    others = sum(row.get("side") != "ours" for row in result_rows(document))
    if len(read_peer_rows(document, family)) < others:
        return document, "a ratio is not a number"
    if status and not any(row["missed"] for row in table_rows(document, family)):
        return document, f"ended with status {status}, and not for a floor"
    return document, ""


def table_rows(document: Mapping[str, Any], family: str) -> list[dict[str, Any]]:
    """The rows of a table, as JSON has them: every peer, and our own side where it is held to a speed."""
    rows = [
        {"case": one.case, "side": one.peer, "ratio": one.ratio, "low": one.low, "high": one.high}
        | {"floor": one.floor, "missed": one.floor is not None and one.ratio < one.floor}
        for one in read_peer_rows(document, family)
    ]
    for row in result_rows(document):
        if row.get("side") == "ours" and (floor := number_or_none(row.get("floor"))) is not None:
            own = {"case": str(row.get("case", "")), "side": "ours", "ratio": 1.0, "low": 1.0, "high": 1.0}
            rows.append(own | {"floor": floor, "missed": bool(row.get("missed"))})
    return [{"family": family, **row} for row in rows]


def table_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row under TABLE_COLUMNS; a floor of our own speed is no ratio, and is said in its own words."""
    speed, floor = row["side"] == "ours", row["floor"]
    ratio, spread = ("-", "-") if speed else (f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}")
    least = "-" if floor is None else f"{floor:g}{' a second' if speed else ''}"
    return row["family"], row["case"], row["side"], ratio, spread, least, "MISSED" if row["missed"] else ""


def merge_documents(
    documents: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str], words: Sequence[str], load: float
) -> dict[str, Any]:
    merged: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "command": ["hotloop", "bench", "peers"]}
    for document in documents.values():
        merged |= {key: value for key, value in document.items() if key not in (*merged, "results")}
    loads = {family: one["load_before"] for family, one in documents.items() if "load_before" in one}
    merged |= {"options": list(words), "load_at_start": load, "load_before": loads}
    rows = [{"family": family, **row} for family, one in documents.items() for row in result_rows(one)]
    return merged | {"failed": dict(failed), "results": rows}
