"""The page of `hotloop bench report`: log folders, what `hotloop kernel`, `devices` and `demo` print with --json,
comparisons with peers and other results are read, sorted and shown below a headline; a part without results is left
out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hotloop.bench import record
from hotloop.bench.benchmark import count_of
from hotloop.bench.other_results import OtherResult, add_other, read_lines_of_results, read_other
from hotloop.bench.page import Page
from hotloop.bench.peers import PeerRow, add_peers, is_peer_document, latest_rows, read_peer_rows
from hotloop.bench.record import RECORDS, SIDES, Record, group_sessions, is_positive
from hotloop.bench.roofline import Kernels, Result, add_kernels, add_roofline, median_result
from hotloop.bench.run_sections import SummaryRow, add_machines, add_runs, summarise
from hotloop.bench.statistics import median
from hotloop.errors import DataError
from hotloop.options.files import load_json

MOST_NAMES = 4  # of peers or other results in the headline; the sections below name all


@dataclass
class Sources:
    """All that was found, kernels and ceilings by device, and the names of files in folders that were none of it."""

    records: list[Record] = field(default_factory=list)
    kernels: Kernels = field(default_factory=dict)
    peers: list[PeerRow] = field(default_factory=list)
    ceilings: dict[str, Result] = field(default_factory=dict)
    others: list[OtherResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Record]:
        return [run for run in self.records if run["status"] != "skipped"]


def gather_sources(paths: Sequence[str | Path]) -> Sources:
    found = Sources()
    for path in map(Path, paths):
        if all((path / side / RECORDS).exists() for side in SIDES):
            found.records += record.read_records([path / side for side in SIDES])
        elif path.is_dir() and not (path / RECORDS).exists():
            files = sorted([*path.glob("*.json"), *path.glob("*.jsonl")])
            if not files:
                neither = f"has neither {RECORDS} nor JSON files"
                raise DataError(f"{path}: {neither}; name a log folder of `hotloop bench run`")
            found.left_out += [file.name for file in files if not _add_document(file, found)]
        elif path.suffix == ".jsonl" and (other := read_lines_of_results(path)):
            found.others.append(other)
        elif path.is_dir() or path.suffix == ".jsonl":
            found.records += record.read_records([path])
        elif not _add_document(path, found):
            nothing = "holds no results that a report can show"
            raise DataError(f"{path}: {nothing}; name log folders or --json results")
    # Kernels among the benchmarks: their runs printed results that can stand on a roofline. Of several repeats each
    # number is the median, and of several folders the latest counts, as in the summary.
    for session in group_sessions(found.records):
        printed: dict[str, list[Result]] = {}
        for run in session:
            if record.ended_well(run) and (result := record.read_printed_result(run)) is not None:
                printed.setdefault(run["variant"], []).append(result)
        for variant, results in printed.items():
            with suppress(AttributeError, TypeError):  # a program may print whatever it likes
                add_kernels(median_result(results), variant, found.kernels)
    return found


def _add_document(file: Path, found: Sources) -> bool:
    """Add what a file holds; False if that is nothing."""
    if file.suffix == ".jsonl":
        if other := read_lines_of_results(file):
            found.others.append(other)
        return other is not None
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
        if add_kernels(document, file.stem, found.kernels):
            return True
        if other := read_other(document, file.stem):
            found.others.append(other)
        return other is not None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        damaged = f"looks like results but is damaged ({error})"
        raise DataError(f"{file}: {damaged}; make it anew or leave it out") from error


def build_report(found: Sources, title: str = "Benchmarks") -> Page:
    parts = []
    if found.records:
        variants = count_of(len({run["variant"] for run in found.runs}), "variant")
        failed = sum(run["status"] != "passed" for run in found.runs)
        parts.append(f"{count_of(len(found.runs), 'run')} of {variants}, {failed} failed")
    if found.kernels:
        parts.append(count_of(sum(map(len, found.kernels.values())), "kernel"))
    if found.peers:
        parts.append(f"{count_of(len(found.peers), 'comparison')} with peers")
    if found.others:
        parts.append(count_of(len(found.others), "other result"))
    devices = {
        *map(record.device_name, found.records), *found.kernels, *(row.device for row in found.peers),
        *(other.device for other in found.others),
    } - {"", "unknown"}  # fmt: skip
    page = Page(title, " · ".join([*parts, *sorted(devices)]))
    summary = summarise(found.records)
    page.tally = Counter(
        word
        for word in (*(row.word for row in latest_rows(found.peers)), *(row.word for row in summary))
        if word
    )
    page.headline = write_headline(found, summary)
    if found.records:
        add_runs(page, found.records, summary)
    if found.kernels:
        add_roofline(page, found.kernels, found.ceilings)
    if found.peers:
        add_peers(page, found.peers)
    for other in found.others:
        add_other(page, other)
    if found.records:
        add_machines(page, found.records)
    return page


def write_headline(found: Sources, summary: Sequence[SummaryRow]) -> str:
    """What came out, in a sentence for each kind of result."""
    said = []
    if judged := Counter(row.word for row in summary if row.word):
        total = count_of(sum(judged.values()), "metric")
        said.append(f"Of {total} measured before, {judged['FAST']} got faster and {judged['SLOW']} slower.")
    elif summary:
        variants = count_of(len({row.variant for row in summary}), "variant")
        said.append(
            f"{variants}, {count_of(len(summary), 'metric')}: medians of whole runs, nothing to compare with yet."
        )
    if latest := latest_rows(found.peers):
        words, peers = Counter(row.word for row in latest), sorted({row.peer for row in latest})
        others = ", ".join(peers[:MOST_NAMES])
        others += f" and {len(peers) - MOST_NAMES} more" if len(peers) > MOST_NAMES else ""
        said.append(
            f"hotloop is faster in {words['FAST']} of {count_of(len(latest), 'comparison')} with {others}, and slower "
            f"in {words['SLOW']}; in the middle one it is {median([row.ratio for row in latest]):.2f} times as fast."
        )
        if len(latest) < len(found.peers):
            said.append("Of what was measured more than once the last counts here.")
    shares = [
        100 * one["roofline"]
        for some in found.kernels.values()
        for one in some.values()
        if one.get("roofline")
    ]
    if shares:
        kernels = count_of(len(shares), "kernel")
        ends = " to ".join(dict.fromkeys(f"{share:.0f}" for share in (min(shares), max(shares))))
        said.append(f"{kernels} at {ends} % of what the device can do.")
    if found.others:
        names = dict.fromkeys(
            f"{other.name} of {other.date}" if other.date else other.name for other in found.others
        )
        shown = [*names][:MOST_NAMES]
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        said.append(f"As their programs left them: {', '.join(shown)}{more}.")
    return " ".join(said)
