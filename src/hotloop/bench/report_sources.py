"""What a report is made of: sorts the named folders and files into records, kernels, peers and ceilings.

A folder is a log of `hotloop bench run`, or of two programs in turns, or holds JSON files; a file is a
`results.jsonl`, or what `hotloop kernel`, `devices` and `demo` print with --json, or a comparison with peers. It reads
and judges nothing else.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hotloop.bench.record_shape import number, positive
from hotloop.bench.report_peers import PeerRow, is_peers, peer_rows
from hotloop.bench.results import RECORDS, SIDES, Record, ended_well, printed_result, read, sessions
from hotloop.bench.roofline import is_kernel
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
        """The records of what was run, and not skipped."""
        return [record for record in self.records if record["status"] != "skipped"]


def gather(paths: Sequence[str | Path]) -> Sources:
    """Everything in the named folders and files."""
    found = Sources()
    for path in map(Path, paths):
        if all((path / side / RECORDS).exists() for side in SIDES):
            found.records += read([path / side for side in SIDES])
        elif path.is_dir() and not (path / RECORDS).exists():
            _folder(path, found)
        elif path.is_dir() or path.suffix == ".jsonl":
            found.records += read([path])
        elif not _document(_load(path), path, found):
            raise DataError(
                f"{path}: holds no results that a report can show; name log folders or --json results"
            )
    _printed_kernels(found)
    return found


def _folder(path: Path, found: Sources) -> None:
    files = sorted(path.glob("*.json"))
    if not files:
        raise DataError(
            f"{path}: has neither {RECORDS} nor JSON files; name a log folder of `hotloop bench run`"
        )
    for file in files:
        if not _document(_load(file), file, found):
            found.left_out.append(file.name)


def _load(path: Path) -> Any:
    try:
        return load_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from error


def _document(document: Any, file: Path, found: Sources) -> bool:
    """Add what a document holds; False if that is nothing."""
    try:
        return _added(document, file.stem, found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{file}: looks like results but is damaged ({error}); make it anew or leave it out"
        ) from error


def _added(document: Any, name: str, found: Sources) -> bool:
    if not isinstance(document, Mapping):
        return False
    limits = document.get("ceilings", document)
    if isinstance(limits, Mapping) and {"matmul_tflops", "copy_gbps", "device"} <= limits.keys():
        found.ceilings[str(limits["device"])] = _checked(limits)
        return True
    if is_peers(document):
        found.peers += peer_rows(document, name)
        return True
    return _add_kernels(document, name, found)


def _checked(limits: Result) -> Result:
    """Ceilings of the shape that a roofline draws."""
    peaks, copy = limits["matmul_tflops"], limits["copy_gbps"]
    if not isinstance(limits["device"], str):
        raise ValueError("device is no name")
    if not isinstance(peaks, Mapping) or not peaks or not all(map(positive, peaks.values())):
        raise ValueError("matmul_tflops has no numbers by name")
    if not positive(copy):
        raise ValueError("copy_gbps is no number above 0")
    return limits


def _add_kernels(document: Result, name: str, found: Sources) -> bool:
    """Kernels of one result, of `hotloop kernel all`, or of the demo."""
    several = document.get("kernels") or document.get("results")
    each = {name: document} if is_kernel(document) else several if isinstance(several, Mapping) else {}
    kernels = {one: result for one, result in each.items() if is_kernel(result)}
    for one, result in kernels.items():
        where = str(result.get("device") or document.get("device") or "unknown")
        found.kernels.setdefault(where, {})[one] = result
    return bool(kernels)


def _printed_kernels(found: Sources) -> None:
    """Kernels among the benchmarks: their runs printed results that can stand on a roofline.

    Of several repeats each number is the median, and of several folders the latest counts, as in the summary.
    """
    for session in sessions(found.records):
        printed: dict[str, list[Result]] = {}
        for record in session:
            if ended_well(record) and (result := printed_result(record)) is not None:
                printed.setdefault(record["variant"], []).append(result)
        for variant, results in printed.items():
            with suppress(AttributeError, TypeError):  # a program may print whatever it likes
                _add_kernels(_middle(results), variant, found)


def _middle(results: Sequence[Any]) -> Any:
    """One result for several of the same shape: the median of each number, anything else as the last has it."""
    last = results[-1]
    if isinstance(last, Mapping) and all(isinstance(one, Mapping) for one in results):
        return {name: _middle([one[name] for one in results if name in one]) for name in last}
    return median(results) if all(map(number, results)) else last
