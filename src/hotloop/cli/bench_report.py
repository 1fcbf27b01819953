"""`hotloop bench report`: results as one page that opens offline."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.cli.command import Command, Context
from hotloop.errors import OptionError
from hotloop.options import argument, option

EPILOG = """RESULTS are log folders of `hotloop bench run` (several make a history), files that `hotloop kernel`,
`hotloop devices` or `hotloop demo` print with --json (for the roofline), comparisons with peers, or a folder of
such files."""


@dataclass(frozen=True)
class Report:
    """Options of `hotloop bench report`."""

    results: tuple[Path, ...] = argument("Log folders and files of results.", metavar="RESULTS")
    output: Path = option(Path("report.html"), "The page to write.", aliases=("-o",), metavar="FILE")
    title: str = option("Benchmarks", "The page's title.")


def run(config: Report, context: Context) -> Mapping[str, Any]:
    """Gather and write."""
    if not config.results:
        raise OptionError("RESULTS: at least one log folder or file of results is needed")
    from hotloop.bench.report import report
    from hotloop.bench.report_sources import gather

    found = gather(config.results)
    if found.left_out:
        context.warn(f"nothing that a report can show in {', '.join(found.left_out)}")
    path = report(found, config.title).write(config.output)
    context.say(f"page: {path}")
    return {
        "page": str(path),
        "runs": len(found.runs),
        "kernels": sum(map(len, found.kernels.values())),
        "peers": len(found.peers),
    }


COMMAND = Command("report", "Write results as one page that opens offline.", Report, run, epilog=EPILOG)
