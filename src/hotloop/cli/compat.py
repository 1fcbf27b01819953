"""`hotloop compat`: a command line of the older scripts, translated (`hotloop.bench.compat`), shown and run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotloop.cli.command import Command, Common, Context
from hotloop.options import argument, option, options_of

EPILOG = """Examples:
  hotloop compat python3 lstm.py --train --popnn
  hotloop compat --dry-run poprun --num-replicas 4 python3 train.py --config resnet50_16ipus_8k_bn_pipeline
  hotloop compat python3 -m examples_utils benchmark --spec benchmarks.yml

Options of compat itself stand before the old command; what stands after it belongs to the old command. Serving
(send_request.py) is not there yet."""


@dataclass(frozen=True)
class CompatConfig:
    """Options of `hotloop compat`."""

    command: tuple[str, ...] = argument(
        "The old command: `python3`, variables, poprun and folders before the script are fine.",
        metavar="SCRIPT",
    )
    dry_run: bool = option(False, "Show the hotloop command and check its options, then stop.")


def run(config: CompatConfig, context: Context) -> Mapping[str, Any]:
    """Translate, tell, and run in this process; its status is the new command's."""
    from hotloop.bench.compat import translate

    found = translate(config.command)
    words = [*found.command[1:], *inherited(context, found.command)]
    # Standard output belongs to the new command's JSON object, which the old command may have asked for.
    console = replace(context, json=context.json or "--json" in words)
    console.say(f"{found}")
    for notice in found.notices:
        console.warn(notice)
    if config.dry_run:
        check(words)
        return {"command": found.command, "environment": found.environment, "notices": found.notices}
    os.environ.update(found.environment)
    from hotloop.cli.main import main

    raise SystemExit(main(words))


def inherited(context: Context, given: Sequence[str]) -> list[str]:
    """Options of compat that are meant for the new command, unless it has them already."""
    flags = [
        f"--{name.replace('_', '-')}"
        for name in ("json", "debug", "only_accelerator")
        if getattr(context, name)
    ]
    device = ["--device", context.device] if context.device != "auto" and "--device" not in given else []
    return [*device, *(flag for flag in flags if flag not in given)]


def check(words: Sequence[str]) -> None:
    """Read the new command's options as it would itself; an OptionError where it would refuse them."""
    from hotloop.cli.configs import resolve
    from hotloop.cli.main import find_command
    from hotloop.cli.parser import scan

    command, _, rest = find_command(list(words))
    if not {"-h", "--help"} & set(rest):
        resolve(command, scan(rest, (*options_of(command.config), *options_of(Common))))


COMMAND = Command(
    "compat",
    "Run a command line of the older scripts.",
    CompatConfig,
    run,
    epilog=EPILOG,
    verbatim=True,
)
