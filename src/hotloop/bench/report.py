"""The page of `hotloop bench report`: log folders, what `hotloop kernel`, `devices` and `demo` print with --json, and
comparisons with peers are sorted, and shown by `report_runs`, `peers` and `roofline`; a part without results is left
out.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hotloop.bench.benchmark import count_of
from hotloop.bench.page import Page
from hotloop.bench.peers import PeerRow, add_peers, is_peer_document, read_peer_rows
from hotloop.bench.record import RECORDS, Record, is_number, is_positive
from hotloop.bench.report_runs import add_machines, add_runs
from hotloop.bench.results import (
    SIDES,
    device_name,
    ended_well,
    group_sessions,
    read_printed_result,
    read_records,
)
from hotloop.bench.roofline import add_roofline, is_kernel
from hotloop.errors import DataError
from hotloop.options.files import load_json

Result = Mapping[str, Any]


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
        add_roofline(page, name, kernels, found.ceilings.get(name))
    if found.peers:
        add_peers(page, found.peers)
    if found.records:
        add_machines(page, found.records)
    return page
