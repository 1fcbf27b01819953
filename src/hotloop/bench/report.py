"""The report of `hotloop bench report`: everything in the named folders and files, on one page that opens anywhere.

A folder is a log of `hotloop bench run`, or of two programs in turns, or holds JSON files; a file is a
`results.jsonl`, or what `hotloop kernel`, `devices` and `demo` print with --json, or a comparison with peers. It sorts
them, and puts together what its neighbours make of them (`report_runs`, `peers`, `roofline`); a part without results
is left out. It measures nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from hotloop.bench import report_runs, roofline
from hotloop.bench.benchmark import count_of
from hotloop.bench.compare import COLUMNS
from hotloop.bench.page import Page
from hotloop.bench.peers import (
    REPORT_COLUMNS,
    PeerRow,
    is_peer_document,
    peer_chart,
    read_peer_rows,
    report_cells,
)
from hotloop.bench.record import RECORDS, Record, is_number, is_positive
from hotloop.bench.results import (
    SIDES,
    commit_name,
    device_name,
    ended_well,
    group_by,
    group_sessions,
    read_printed_result,
    read_records,
)
from hotloop.bench.roofline import is_kernel
from hotloop.errors import DataError
from hotloop.options.files import load_json

Result = Mapping[str, Any]
SHOWN_PACKAGES = ("hotloop", "jax", "jaxlib", "numpy", "torch")
MACHINES = ("device", "driver", "host", "commit", "python", "packages", "cpu")
LOAD: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": median, "max": max}
"""What is shown of a load over the runs of a variant."""


@dataclass
class Sources:
    """All that was found, kernels and ceilings by device, and the names of files in folders that were none of it."""

    records: list[Record] = field(default_factory=list)
    kernels: dict[str, dict[str, Result]] = field(default_factory=dict)
    peers: list[PeerRow] = field(default_factory=list)
    ceilings: dict[str, Result] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Record]:
        return [record for record in self.records if record["status"] != "skipped"]


def gather_sources(paths: Sequence[str | Path]) -> Sources:
    found = Sources()
    for path in map(Path, paths):
        if all((path / side / RECORDS).exists() for side in SIDES):
            found.records += read_records([path / side for side in SIDES])
        elif path.is_dir() and not (path / RECORDS).exists():
            files = sorted(path.glob("*.json"))
            if not files:
                raise DataError(
                    f"{path}: has neither {RECORDS} nor JSON files; name a log folder of `hotloop bench run`"
                )
            found.left_out += [file.name for file in files if not _add_document(file, found)]
        elif path.is_dir() or path.suffix == ".jsonl":
            found.records += read_records([path])
        elif not _add_document(path, found):
            raise DataError(
                f"{path}: holds no results that a report can show; name log folders or --json results"
            )
    _add_printed_kernels(found)
    return found


def _add_document(file: Path, found: Sources) -> bool:
    """Add what a file holds; False if that is nothing."""
    try:
        document = load_json(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error})") from error
    try:
        if not isinstance(document, Mapping):
            return False
        limits = document.get("ceilings", document)
        if isinstance(limits, Mapping) and {"matmul_tflops", "copy_gbps", "device"} <= limits.keys():
            peaks = limits["matmul_tflops"]  # which a roofline must be able to draw
            if not isinstance(limits["device"], str):
                raise ValueError("device is no name")
            if not isinstance(peaks, Mapping) or not peaks or not all(map(is_positive, peaks.values())):
                raise ValueError("matmul_tflops has no numbers by name")
            if not is_positive(limits["copy_gbps"]):
                raise ValueError("copy_gbps is no number above 0")
            found.ceilings[limits["device"]] = limits
            return True
        if is_peer_document(document):
            found.peers += read_peer_rows(document, file.stem)
            return True
        return _add_kernels(document, file.stem, found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{file}: looks like results but is damaged ({error}); make it anew or leave it out"
        ) from error


def _add_kernels(document: Result, name: str, found: Sources) -> bool:
    """Kernels of one result, of `hotloop kernel all`, or of the demo."""
    several = document.get("kernels") or document.get("results")
    each = {name: document} if is_kernel(document) else several if isinstance(several, Mapping) else {}
    kernels = {one: result for one, result in each.items() if is_kernel(result)}
    for one, result in kernels.items():
        where = str(result.get("device") or document.get("device") or "unknown")
        found.kernels.setdefault(where, {})[one] = result
    return bool(kernels)


def _add_printed_kernels(found: Sources) -> None:
    """Kernels among the benchmarks: their runs printed results that can stand on a roofline.

    Of several repeats each number is the median, and of several folders the latest counts, as in the summary.
    """
    for session in group_sessions(found.records):
        printed: dict[str, list[Result]] = {}
        for record in session:
            if ended_well(record) and (result := read_printed_result(record)) is not None:
                printed.setdefault(record["variant"], []).append(result)
        for variant, results in printed.items():
            with suppress(AttributeError, TypeError):  # a program may print whatever it likes
                _add_kernels(_median_result(results), variant, found)


def _median_result(results: Sequence[Any]) -> Any:
    """One result for several of the same shape: the median of each number, anything else as the last has it."""
    last = results[-1]
    if isinstance(last, Mapping) and all(isinstance(one, Mapping) for one in results):
        return {name: _median_result([one[name] for one in results if name in one]) for name in last}
    return median(results) if all(map(is_number, results)) else last


def build_report(found: Sources, title: str = "Benchmarks") -> Page:
    parts = sorted({device_name(record) for record in found.records})
    if found.peers:
        parts.insert(0, f"{count_of(len(found.peers), 'comparison')} with peers")
    if found.kernels:
        parts.insert(0, count_of(sum(map(len, found.kernels.values())), "kernel"))
    if found.records:
        variants = count_of(len({record["variant"] for record in found.runs}), "variant")
        failed = sum(record["status"] != "passed" for record in found.runs)
        parts.insert(0, f"{count_of(len(found.runs), 'run')} of {variants}, {failed} failed")
    page = Page(title, " · ".join(parts))
    if found.records:
        add_runs(page, found.records)
    if found.kernels:
        page.heading("Roofline of the kernels")
    for name, kernels in found.kernels.items():
        chart = roofline.roofline_chart(kernels, found.ceilings.get(name))
        page.charts([(chart, f"{name}: lines are its own measured product and copy.")])
        page.table(roofline.COLUMNS, roofline.roofline_rows(kernels))
    if found.peers:
        add_peers(page, found.peers)
    if found.records:
        add_load(page, found.records)
        page.heading("Machines")
        machines = dict.fromkeys(_machine_row(record) for record in found.records if record["machine"])
        page.table(MACHINES, list(machines))
    return page


def add_runs(page: Page, records: Sequence[Record]) -> None:
    found = report_runs.build_history(records)
    page.heading("Summary")
    page.text(
        "The median over repeats of whole runs, with an interval that is honest about few of them, in the latest "
        "folder of each device. Since before: against the folder before, where there is one."
    )
    page.table(report_runs.SUMMARY, report_runs.summary_rows(found))
    if verdicts := report_runs.turns_rows(records):
        page.heading("In turns")
        page.text(
            "Two programs that ran in turns, A and B; the ratio and its interval are those of the pairs."
        )
        page.table(COLUMNS, verdicts)
    if failed := [run for run in records if run["status"] != "passed"]:
        page.heading("Runs that did not pass")
        rows = [
            [run["variant"], run.get("repeat"), run["status"], run.get("reason") or "", run["folder"]]
            for run in failed
        ]
        page.table(("variant", "repeat", "status", "reason", "log"), rows)
    for heading, charts in (
        ("History", report_runs.history_charts(found)),
        ("Spread of repeats", report_runs.spread_charts(found)),
        ("Throughput and latency", report_runs.trade_off_charts(found)),
    ):
        if charts:
            page.heading(heading)
            page.charts(charts)


def add_peers(page: Page, rows: Sequence[PeerRow]) -> None:
    page.heading("Beside other programs")
    page.text(
        "Times as fast as the peer at the same work on the same device, taken in turns: the median of the rounds' "
        "ratios. Right of the line hotloop is faster. Boxes reach from the lowest to the highest round."
    )
    groups = group_by(rows, lambda row: f"{row.family} on {row.device}")
    page.charts([(peer_chart(shown, title), f"{title}.") for title, shown in groups.items()])
    page.table(REPORT_COLUMNS, [report_cells(row) for row in rows])


def add_load(page: Page, records: Sequence[Record]) -> None:
    """How busy the machine was during the latest runs of each variant, where that was watched."""
    latest: dict[str, list[Record]] = {}
    for session in group_sessions(records):
        watched = [record for record in session if len(record.get("monitor") or {}) > 1]
        latest |= group_by(watched, itemgetter("variant"))
    names = dict.fromkeys(name for runs in latest.values() for run in runs for name in run["monitor"])
    names.pop("samples", None)
    shown = [(name, key) for name in names for key in LOAD]
    rows: list[list[Any]] = []
    for variant, runs in latest.items():
        loads = [[run["monitor"].get(name, {}).get(key) for run in runs] for name, key in shown]
        known = [[value for value in values if value is not None] for values in loads]
        cells = [LOAD[key](values) if values else None for (_, key), values in zip(shown, known, strict=True)]
        rows.append([variant, *cells])
    if rows:
        page.heading("While they ran")
        page.table(["variant", *(f"{name.replace('_', ' ')}, {key}" for name, key in shown)], rows)


def _machine_row(record: Record) -> tuple[str, ...]:
    said = record["machine"]
    packages = said.get("packages") or {}
    versions = ", ".join(f"{name} {packages[name]}" for name in SHOWN_PACKAGES if name in packages)
    processor = (said.get("cpu") or {}).get("name") or ""
    driver = (said.get("device") or {}).get("driver") or ""
    host, python = str(said.get("host") or ""), str(said.get("python") or "")
    return device_name(record), driver, host, commit_name(record), python, versions, processor
