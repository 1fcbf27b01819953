"""`hotloop bench peers`: every family against other programs, one table of ratios, and a dated file."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotloop.cli.bench_show import leave
from hotloop.cli.command import Command, Context
from hotloop.errors import OptionError
from hotloop.options import option, positive

if TYPE_CHECKING:
    from hotloop.bench.peers import Turns

EPILOG = """A ratio is the other program's time over ours: 2 is twice as fast as it. All sides take turns, round after
round; the range is that of the rounds. The status is 1 when a ratio is below its floor or a comparison failed. Use a
quiet machine; it takes a while. The file can be shown with `hotloop bench report`."""
Family = Literal["kernels", "vcd", "recommender", "cnn", "estimator"]
ALL: tuple[Family, ...] = ("kernels", "vcd", "recommender", "cnn", "estimator")
STANDARD_ERROR = 2


@dataclass(frozen=True)
class Peers:
    """Options of `hotloop bench peers`."""

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


def run(config: Peers, context: Context) -> Mapping[str, Any]:
    """Check that it can work, compare family by family, tell."""
    from hotloop.bench import peers

    if context.device == "tpu":
        raise OptionError("--device tpu: the other programs run on a CPU or a GPU; take one of them")
    if config.output is not None and not config.output.absolute().parent.is_dir():
        raise OptionError(f"--output {config.output}: its folder is not there; make it first")
    peers.check(config.family)
    if (load := peers.load()) > peers.QUIET:
        context.warn(f"other work on this machine ({load:.1f} cores): a smoke test, not a measurement")
    device = peers.default_device() if context.device == "auto" else context.device
    if device == "cpu" and context.only_accelerator:
        raise OptionError("--only-accelerator: jax finds only a CPU here")
    file = config.output if config.output else peers.dated(Path(), device)
    turns = peers.Turns(device, config.rounds, config.seconds, load)
    result = compare(config.family, turns, file, context)
    if result["missed"] or result["failed"]:
        leave(result, context)
    return result


def compare(families: tuple[str, ...], turns: "Turns", file: Path, context: Context) -> Mapping[str, Any]:
    """Run the families one after the other; the file is written after each."""
    from hotloop.bench import peers

    documents: dict[str, Mapping[str, Any]] = {}
    failed: dict[str, str] = {}
    for family in dict.fromkeys(families):
        context.say(f"== {family}")
        sys.stdout.flush()
        document, wrong = peers.compare(family, turns, STANDARD_ERROR if context.json else None)
        if document is not None:
            documents[family] = document
        if wrong:
            failed[family] = wrong
            context.warn(f"{family}: {wrong}")
        file.write_text(json.dumps(peers.together(documents, failed, turns), indent=1) + "\n", "utf-8")
    rows = [row for family, document in documents.items() for row in peers.rows(document, family)]
    context.say("")
    if rows:
        context.table(peers.COLUMNS, [peers.cells(row) for row in rows])
    missed = sum(row.missed for row in rows)
    context.say(f"floors missed: {missed}, families failed: {len(failed)}, results: {file}")
    return {"rows": [asdict(row) for row in rows], "missed": missed, "failed": failed, "file": file}


COMMAND = Command(
    "peers", "Compare every family with other programs; needs the source tree.", Peers, run, epilog=EPILOG
)
