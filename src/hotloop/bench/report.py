"""The report of `hotloop bench report`: everything that was found, on one page that opens anywhere.

It puts together what its neighbours make of the results (`report_runs`, `report_peers`, `roofline`) and measures
nothing itself; a part without results is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from hotloop.bench import report_peers, report_runs, roofline
from hotloop.bench.compare import COLUMNS
from hotloop.bench.page import Page
from hotloop.bench.report_sources import Sources
from hotloop.bench.results import Record, commit, device, sessions

SHOWN_PACKAGES = ("hotloop", "jax", "jaxlib", "numpy", "torch")
LOAD: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": median,
    "max": max,
}  # over the runs of a variant
MACHINES = ("device", "driver", "host", "commit", "python", "packages", "cpu")


def report(found: Sources, title: str = "Benchmarks") -> Page:
    """The whole page."""
    page = Page(title, lead(found))
    if found.records:
        runs(page, found.records)
    if found.kernels:
        rooflines(page, found.kernels, found.ceilings)
    if found.peers:
        peers(page, found.peers)
    if found.records:
        watched(page, found.records)
        machines(page, found.records)
    return page


def lead(found: Sources) -> str:
    """What there is, in a line."""
    ran = found.runs
    variants = {record["variant"] for record in ran}
    failed = sum(record["status"] != "passed" for record in ran)
    parts = [
        f"{len(ran)} runs of {len(variants)} variants, {failed} failed" if found.records else "",
        f"{sum(map(len, found.kernels.values()))} kernels" if found.kernels else "",
        f"{len(found.peers)} comparisons with peers" if found.peers else "",
        *sorted({device(record) for record in found.records}),
    ]
    return " · ".join(part for part in parts if part)


def runs(page: Page, records: Sequence[Record]) -> None:
    """Summary, failures, history, repeats, throughput against latency."""
    found = report_runs.sessions(records)
    rows = report_runs.summary(found)
    page.heading("Summary")
    page.text(
        "The median over repeats of whole runs, with an interval that is honest about few of them, in the latest "
        "folder of each device. Since before: against the folder before, where there is one."
    )
    page.table(report_runs.SUMMARY, rows)
    if verdicts := report_runs.turns(records):
        page.heading("In turns")
        page.text(
            "Two programs that ran in turns, A and B; the ratio and its interval are those of the pairs."
        )
        page.table(COLUMNS, verdicts)
    if failed := report_runs.failures(records):
        page.heading("Runs that did not pass")
        page.table(report_runs.FAILURES, failed)
    for heading, charts in (
        ("History", report_runs.histories(found)),
        ("Spread of repeats", report_runs.distributions(found)),
        ("Throughput and latency", report_runs.trade_offs(found)),
    ):
        if charts:
            page.heading(heading)
            page.charts(charts)


def rooflines(page: Page, kernels: Mapping[str, Mapping[str, Any]], ceilings: Mapping[str, Any]) -> None:
    """A chart and a table of each device's kernels."""
    page.heading("Roofline of the kernels")
    for name, shown in kernels.items():
        limits = ceilings.get(name)
        page.charts(
            [(roofline.roofline(shown, limits), f"{name}: lines are its own measured product and copy.")]
        )
        page.table(roofline.COLUMNS, roofline.rows(shown))


def peers(page: Page, rows: Sequence[report_peers.PeerRow]) -> None:
    """A chart for each family and device, and one table."""
    page.heading("Beside other programs")
    page.text(
        "Times as fast as the peer at the same work on the same device, taken in turns: the median of the rounds' "
        "ratios. Right of the line hotloop is faster. Boxes reach from the lowest to the highest round."
    )
    groups: dict[tuple[str, str], list[report_peers.PeerRow]] = {}
    for row in rows:
        groups.setdefault((row.family, row.device), []).append(row)
    page.charts(
        [
            (report_peers.chart(shown, f"{family} on {name}"), f"{family} on {name}.")
            for (family, name), shown in groups.items()
        ]
    )
    page.table(report_peers.COLUMNS, [report_peers.cells(row) for row in rows])


def watched(page: Page, records: Sequence[Record]) -> None:
    """How busy the machine was during the latest runs of each variant, where that was watched."""
    latest: dict[str, list[Mapping[str, Any]]] = {}
    for session in sessions(records):
        apart: dict[str, list[Mapping[str, Any]]] = {}
        for record in session:
            if len(said := record.get("monitor") or {}) > 1:
                apart.setdefault(record["variant"], []).append(said)
        latest |= apart
    names = dict.fromkeys(name for each in latest.values() for said in each for name in said)
    names.pop("samples", None)
    rows = [
        [variant, *(_load(said, name, key) for name in names for key in LOAD)]
        for variant, said in latest.items()
    ]
    if rows:
        page.heading("While they ran")
        columns = (f"{name.replace('_', ' ')}, {key}" for name in names for key in LOAD)
        page.table(["variant", *columns], rows)


def _load(runs: Sequence[Mapping[str, Any]], name: str, key: str) -> float | None:
    said = [value for run in runs if (value := run.get(name, {}).get(key)) is not None]
    return LOAD[key](said) if said else None


def machines(page: Page, records: Sequence[Record]) -> None:
    """Where the results come from."""
    page.heading("Machines")
    rows = {tuple(_machine(record)): None for record in records if record["machine"]}
    page.table(MACHINES, list(rows))


def _machine(record: Record) -> list[str]:
    said = record["machine"]
    packages = said.get("packages") or {}
    versions = ", ".join(f"{name} {packages[name]}" for name in SHOWN_PACKAGES if name in packages)
    processor = (said.get("cpu") or {}).get("name") or ""
    driver = (said.get("device") or {}).get("driver") or ""
    host, python = str(said.get("host") or ""), str(said.get("python") or "")
    return [device(record), driver, host, commit(record), python, versions, processor]
