"""`hotloop compat`: a command line of the older scripts, translated (`hotloop.bench.compat`), shown and run."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import TextIO

from hotloop.cli.command import Command, Context, Result
from hotloop.engine.interrupt import before_leaving, leave_at_once
from hotloop.options import argument, option
from hotloop.rehearsal import rehearse

EPILOG = """Examples:
  hotloop compat python3 lstm.py --train --popnn
  hotloop compat --dry-run poprun --num-instances 2 --num-replicas 4 python3 train.py --model resnet50
  hotloop compat python3 -m examples_utils benchmark --spec benchmarks.yml

Options of compat itself stand before the old command; what stands after it belongs to the old command."""


@dataclass(frozen=True)
class CompatConfig:
    command: tuple[str, ...] = argument(
        "The old command: `python3`, variables, poprun and folders before the script are fine.",
        metavar="SCRIPT",
    )
    dry_run: bool = option(
        False, "Show the hotloop command and let it check options, files and devices, then stop."
    )


def run(config: CompatConfig, context: Context) -> Result:
    """Translate, tell, and run in this process; its status is the new command's."""
    from hotloop.bench.compat import translate

    found = translate(config.command)
    *before, words = (context.hand_on(command[1:]) for command in (*found.before, found.command))
    # Standard output belongs to the new command's JSON object, which the old command may have asked for.
    console = replace(context, json=context.json or "--json" in words)
    console.say(f"{found}")
    for notice in found.notices:
        console.warn(notice)
    os.environ.update(found.environment)
    from hotloop.cli.main import dispatch, main

    if not config.dry_run:
        for first in before:
            if status := run_first(first, sys.stderr if console.json else None):
                raise SystemExit(status)
        with leave_at_once():  # while the new command starts, as if it had been typed
            raise SystemExit(main(words))
    for first in before:
        with redirect_stdout(StringIO()):
            rehearse(partial(dispatch, [word for word in first if word != "--json"]))
    # The new command checks all that it checks before its work; an error is its own. What it says is not shown, but
    # for warnings, and for what a benchmark file would run.
    quiet = [word for word in words if word != "--json"]
    shown: TextIO = StringIO()
    if words[:2] == ["bench", "run"]:
        starts_nothing = {"--list", "--dry-run", "--validate"} & set(words)
        quiet += [] if starts_nothing else ["--dry-run"]
        shown = sys.stderr if console.json else sys.stdout
    with redirect_stdout(shown):
        reached = rehearse(lambda: dispatch(quiet))
    if reached:
        console.say(f"checked, up to {reached}")
    described = {"command": found.command, "environment": found.environment, "notices": found.notices}
    return {**described, "checked_until": reached or None}


def run_first(words: Sequence[str], out: TextIO | None) -> int:
    """Run a command that must have ended before the one that counts, in a process of its own; its status."""
    from hotloop.sweeps.children import ChildProcesses

    children = ChildProcesses()
    with before_leaving(partial(children.stop, grace=0)):
        try:
            child = children.start([sys.executable, "-m", "hotloop", *words], os.environ, out)
            status = child.wait()
        except BaseException:
            children.stop()
            raise
    return status if status >= 0 else 128 - status


COMMAND = Command(config=CompatConfig, run=run, epilog=EPILOG, verbatim=True)
