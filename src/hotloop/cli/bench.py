"""`hotloop bench ...`: run benchmark files, compare results, make a page of them (report), time other programs (peers).

`run` and `compare` have modules of their own; what all of them do is in `hotloop.bench`.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotloop.cli import bench_compare, bench_run
from hotloop.cli.bench_run import finish
from hotloop.cli.command import Command, Context, Result
from hotloop.errors import OptionError
from hotloop.options import argument, option, positive

REPORT_EPILOG = """RESULTS are log folders of `hotloop bench run` (several make a history), files that `hotloop kernel`,
`hotloop devices` or `hotloop demo` print with --json (for the roofline), comparisons with peers, other results that say
when, where or of what they are, or a folder of such files."""
PEERS_EPILOG = """A ratio is the other program's time over ours: 2 is twice as fast as it. All sides take turns,
round after round; the range is that of the rounds. The status is 1 when a ratio is below its floor or a comparison
failed. Use a quiet machine; it takes a while. The file can be shown with `hotloop bench report`."""
Family = Literal["kernels", "vcd", "recommender", "cnn", "estimator"]
ALL: tuple[Family, ...] = ("kernels", "vcd", "recommender", "cnn", "estimator")


@dataclass(frozen=True)
class BenchReport:
    results: tuple[Path, ...] = argument("Log folders and files of results.", metavar="RESULTS")
    output: Path = option(Path("report.html"), "The page to write.", aliases=("-o",), metavar="FILE")
    title: str = option("Benchmarks", "The page's title.")


def run_report(config: BenchReport, context: Context) -> Result:
    from hotloop.bench.report import build_report, gather_sources

    found = gather_sources(config.results)
    if found.left_out:
        context.warn(f"nothing that a report can show in {', '.join(found.left_out)}")
    path = build_report(found, config.title).write(config.output)
    context.say(f"page: {path}")
    kernels = sum(map(len, found.kernels.values()))
    counts = {
        "runs": len(found.runs),
        "kernels": kernels,
        "peers": len(found.peers),
        "others": len(found.others),
    }
    return {"page": str(path), **counts}


@dataclass(frozen=True)
class BenchPeers:
    family: tuple[Family, ...] = option(ALL, "Only these families.", metavar="NAME")
    rounds: int | None = option(
        None, "Turns of each side; left out, each program's own number.", check=positive
    )
    seconds: float | None = option(
        None, "Seconds of a turn; left out, each program's own length.", check=positive
    )
    output: Path | None = option(
        None, "File for the results; left out, DATE_peers_DEVICE.json here.", aliases=("-o",), metavar="FILE"
    )


def run_peers(config: BenchPeers, context: Context) -> Result:
    """Status 1 where a floor is missed or a comparison failed."""
    from hotloop.bench import peers

    if context.device == "tpu":
        raise OptionError("--device tpu: the other programs run on a CPU or a GPU; take one of them")
    if config.output is not None and not config.output.absolute().parent.is_dir():
        raise OptionError(f"--output {config.output}: its folder is not there; make it first")
    peers.check_programs(config.family)
    if (load := peers.measure_load()) > peers.QUIET:
        context.warn(f"other work on this machine ({load:.1f} cores): a smoke test, not a measurement")
    device = peers.find_device() if context.device == "auto" else context.device
    if device == "cpu" and context.only_accelerator:
        raise OptionError("--only-accelerator: jax finds only a CPU here")
    stem, number = f"{time.strftime('%Y-%m-%d')}_peers_{device}", 2
    file = config.output or Path(f"{stem}.json")
    while config.output is None and file.exists():
        file, number = Path(f"{stem}_{number}.json"), number + 1
    given = {"--device": device, "--rounds": config.rounds, "--seconds": config.seconds}
    words = [word for name, value in given.items() if value is not None for word in (name, f"{value}")]
    documents: dict[str, Mapping[str, Any]] = {}
    failed: dict[str, str] = {}
    for family in dict.fromkeys(config.family):
        context.say(f"== {family}")
        sys.stdout.flush()
        output = 2 if context.json else None  # standard error
        document, wrong = peers.run_family(family, words, output)
        if document is not None:
            documents[family] = document
        if wrong:
            failed[family] = wrong
            context.warn(f"{family}: {wrong}")
        # The file is whole after each family.
        merged = peers.merge_documents(documents, failed, words, load)
        file.write_text(json.dumps(merged, indent=1) + "\n", "utf-8")
    rows = [row for family, document in documents.items() for row in peers.table_rows(document, family)]
    context.say("")
    if rows:
        context.table(peers.TABLE_COLUMNS, [peers.table_cells(row) for row in rows])
    missed = sum(row["missed"] for row in rows)
    context.say(f"floors missed: {missed}, families failed: {len(failed)}, results: {file}")
    result = {"rows": rows, "missed": missed, "failed": failed, "file": file}
    return finish(result, context, failed=bool(missed or failed))


REPORT = Command(
    "report", "Write results as one page that opens offline.", BenchReport, run_report, epilog=REPORT_EPILOG
)
PEERS_SUMMARY = "Compare every family with other programs; needs the source tree."
PEERS = Command("peers", PEERS_SUMMARY, BenchPeers, run_peers, epilog=PEERS_EPILOG)
COMMAND = Command(children=(bench_run.COMMAND, bench_compare.COMMAND, REPORT, PEERS))
