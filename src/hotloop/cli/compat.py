"""`hotloop compat`: a command line of the older scripts, translated (`hotloop.bench.compat`), shown and run."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from hotloop.cli.command import Command, Context
from hotloop.options import argument, option

EPILOG = """Examples:
  hotloop compat python3 lstm.py --train --popnn
  hotloop compat --dry-run poprun --num-replicas 4 python3 train.py --config resnet50_16ipus_8k_bn_pipeline
  hotloop compat python3 -m examples_utils benchmark --spec benchmarks.yml

Options of compat itself stand before the old command; what stands after it belongs to the old command. Serving
(send_request.py) is not there yet."""

LOOKING = ("--list", "--dry-run", "--validate")
"""Options of `bench run` with which it starts nothing anyway."""


@dataclass(frozen=True)
class CompatConfig:
    """Options of `hotloop compat`."""

    command: tuple[str, ...] = argument(
        "The old command: `python3`, variables, poprun and folders before the script are fine.",
        metavar="SCRIPT",
    )
    dry_run: bool = option(
        False, "Show the hotloop command and let it check options, files and devices, then stop."
    )


def run(config: CompatConfig, context: Context) -> Mapping[str, Any]:
    """Translate, tell, and run in this process; its status is the new command's."""
    from hotloop.bench.compat import translate

    found = translate(config.command)
    # Options of compat itself are meant for the new command, unless it has them already.
    words = found.command[1:]
    if context.device != "auto" and "--device" not in words:
        words += ["--device", context.device]
    flags = {"--json": context.json, "--debug": context.debug, "--only-accelerator": context.only_accelerator}
    words += [flag for flag, is_set in flags.items() if is_set and flag not in words]
    # Standard output belongs to the new command's JSON object, which the old command may have asked for.
    console = replace(context, json=context.json or "--json" in words)
    console.say(f"{found}")
    for notice in found.notices:
        console.warn(notice)
    os.environ.update(found.environment)
    if config.dry_run:
        reached = check(words, console)
        told = {"command": found.command, "environment": found.environment, "notices": found.notices}
        return {**told, "checked_until": reached or None}
    from hotloop.cli.main import main
    from hotloop.engine.interrupt import leave_at_once

    with leave_at_once():  # while the new command starts, as if it had been typed
        raise SystemExit(main(words))


def check(words: Sequence[str], console: Context) -> str:
    """Let the new command check everything that it checks before its work; what that work would begin with.

    An error is the command's own. What it says is not shown, but for warnings, and for what a benchmark file would
    run.
    """
    from hotloop.cli.main import dispatch
    from hotloop.rehearsal import rehearse

    quiet = [word for word in words if word != "--json"]
    with ExitStack() as stack:
        if words[:2] == ["bench", "run"]:
            quiet += [] if set(LOOKING) & set(words) else ["--dry-run"]
            stack.enter_context(redirect_stdout(sys.stderr if console.json else sys.stdout))
        else:
            stack.enter_context(redirect_stdout(StringIO()))
        reached = rehearse(lambda: dispatch(quiet))
    if reached:
        console.say(f"checked, up to {reached}")
    return reached


COMMAND = Command(
    "compat",
    "Run a command line of the older scripts.",
    CompatConfig,
    run,
    epilog=EPILOG,
    verbatim=True,
)
