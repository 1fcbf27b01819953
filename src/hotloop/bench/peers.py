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
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hotloop.bench.axes import Axis, format_value
from hotloop.bench.page import Page, Word
from hotloop.bench.record import group_by, is_number, is_positive
from hotloop.bench.strips import Strip, Strips
from hotloop.errors import DataError, MissingExtra
from hotloop.options.files import parse_json

REPORT_COLUMNS = (
    *("family", "case", "peer", "verdict", "times as fast", "lowest–highest"),
    *("hotloop", "the peer", "unit", "floor", "device", "date", "commit"),
)
UNITS = {"milliseconds": "ms", "ess_per_second": "ESS/s"}
"""What a side says of its speed, the first that it has -> its unit."""
ENDS = ("_low_us", "_high_us")  # of the rounds of a side
ALIKE = 0.02  # by which all rounds may differ and are the same
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
    commit: str = ""

    @property
    def word(self) -> str:
        """FAST or SLOW: so in every round. SAME: in every round within 2 %. AMBIGUOUS: the rounds disagree, or their
        range is not known."""
        if self.low == self.high:
            return "AMBIGUOUS"
        if self.low >= 1 / (1 + ALIKE) and self.high <= 1 + ALIKE:
            return "SAME"
        return "FAST" if self.low > 1 else "SLOW" if self.high < 1 else "AMBIGUOUS"


def is_peer_document(document: Any) -> bool:
    results = document.get("results") if isinstance(document, Mapping) else None
    rows = results if isinstance(results, list) else []
    return any(isinstance(row, Mapping) and is_positive(row.get("ratio")) for row in rows)


def read_peer_rows(document: Mapping[str, Any], name: str) -> list[PeerRow]:
    """The rows of one document; `name` is its file's, without the ending."""
    device, results = describe_device(document) or "unknown", result_rows(document)
    date = str(document.get("date") or name[:10])
    commit = describe_commit(document)
    words = [word for word in name.split("_") if not re.fullmatch(r"[\d-]+", word)] or [name]
    own = {_case(row): row for row in reversed(results) if row.get("side") == "ours"}
    rows = []
    for row in results:
        if row.get("side") == "ours" or not is_positive(row.get("ratio")):
            continue
        family, case = str(row.get("family") or document.get("family") or words[0]), _case(row)
        timed = [key.removesuffix("_us") for key in row if key.endswith("_us") and not key.endswith(ENDS)]
        nested = [key for key, value in row.items() if isinstance(value, Mapping)]
        unnamed = next((key for key in (*timed, *nested) if key != "ours"), "peer")
        peer = str(row.get("side") or row.get("peer") or unnamed)
        if "ours_us" in row:
            unit, times = "µs", [row["ours_us"], row.get(f"{peer}_us")]
        else:  # both sides in one row, or a row of its own for each
            sides = (row["ours"], row.get(peer)) if "ours" in nested else (own.get(case), row)
            known = [side if isinstance(side, Mapping) else {} for side in sides]
            figure = next((name for name in UNITS if any(name in side for side in known)), "milliseconds")
            times, unit = [side.get(figure) for side in known], UNITS[figure]
        ratio = float(row["ratio"])
        ends = (row[key] if is_positive(row.get(key)) else ratio for key in ("ratio_low", "ratio_high"))
        low, high = map(float, ends)
        ours, theirs, floor = map(number_or_none, (*times, row.get("floor")))
        numbers = (ours, theirs, unit, ratio, low, high, floor)
        rows.append(PeerRow(family, case, peer, *numbers, device, date, commit))
    return rows


def describe_device(document: Mapping[str, Any]) -> str:
    """The device that a document's environment names, a CPU with its cores; "" if unknown."""
    where = document.get("environment")
    if not isinstance(where, Mapping):
        return ""
    if where.get("platform") == "cpu":
        cores = where.get("cores", "?")
        return f"{where.get('cpu', 'CPU')}, {cores} core{'' if cores == 1 else 's'}"
    kinds = where.get("device_kinds")
    return str(kinds[0]) if isinstance(kinds, list) and kinds else ""


def describe_commit(document: Mapping[str, Any]) -> str:
    """The commit that a document's results are of, short, with a + where the tree had changes; "" if unknown."""
    where = document.get("environment")
    source = document if document.get("commit") else where if isinstance(where, Mapping) else {}
    said = str(source.get("commit") or "").split(" ")[0]
    return f"{said[:7]}{'+' if said and source.get('dirty') else ''}"


def result_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in document["results"] if isinstance(row, dict)]


def number_or_none(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _case(row: Mapping[str, Any]) -> str:
    parts = [str(row[key]) for key in ("case", "shape") if row.get(key)]
    parts += [f"{key.replace('_', ' ')} {row[key]}" for key in ("size", "batch_size") if row.get(key)]
    kinds = re.findall(r"dtype\('(\w+)'\)", str(row.get("precision", ""))) or [str(row.get("dtype") or "")]
    return ", ".join([*parts, *(kind for kind in kinds[:1] if kind)])


def latest_rows(rows: Sequence[PeerRow]) -> list[PeerRow]:
    """Of what was measured more than once, the last."""
    ordered = sorted(rows, key=lambda row: row.date)
    return list({(row.family, row.case, row.peer, row.device): row for row in ordered}.values())


def add_peers(page: Page, rows: Sequence[PeerRow]) -> None:
    page.section(
        "Beside other programs",
        "Times as fast as the peer at the same work on the same device, taken in turns: the median of the rounds' "
        "ratios, and a box from the lowest to the highest round. Right of the line hotloop is faster. FAST and SLOW: "
        "so in every round; SAME: within 2 % in every round; AMBIGUOUS: the rounds disagree.",
    )
    axis = Axis("times as fast as the peer", log=True)
    for (family, device), shown in group_by(rows, lambda row: (row.family, row.device)).items():
        often = Counter((row.case, row.peer) for row in shown)
        strips = []
        for row in sorted(shown, key=lambda row: row.date):
            # What was measured more than once is told apart by when, and by what.
            detail = f"{row.date[5:]} {row.commit}".strip() if often[row.case, row.peer] > 1 else ""
            name = f"{row.case} · {row.peer}"
            strips.append(Strip(name, row.low, row.ratio, row.high, detail=detail, word=row.word))
        strips.sort(key=lambda strip: _by_numbers(strip.name))
        days = sorted({row.date for row in shown})
        when = f"Measured on {days[0]}." if len(days) < 2 else f"Measured from {days[0]} to {days[-1]}."
        page.charts([(Strips(f"{family} on {device}", axis, strips, at=1.0), when)])
    cells = []
    for row in rows:
        ratio = (Word(row.word), row.ratio, f"{format_value(row.low)}–{format_value(row.high)}")
        numbers = (row.ours, row.theirs, row.unit, row.floor)
        cells.append((row.family, row.case, row.peer, *ratio, *numbers, row.device, row.date, row.commit))
    page.table(REPORT_COLUMNS, cells, "Comparisons with peers")


def _by_numbers(name: str) -> list[str | int]:
    """For an order in which 8 comes before 64: words and numbers by turns."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


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
