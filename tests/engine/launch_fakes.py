"""A launcher of fake processes as a program of its own, so that it can be signalled and killed: options, then acts."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from hotloop.engine.interrupt import Stopped, listen, print_to_stderr
from hotloop.engine.launcher import FailedProcess, Launch, LostProcess, run_processes

PROGRAM = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_process.py")))


def make_launch(acts: str, count: int, **settings: float) -> Launch:
    return Launch(PROGRAM, tuple(acts.split()), ({},) * count, total=count, **settings)


def living_members(group: int) -> list[int]:
    """The processes of a group that run; one that nobody has asked after is none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = entry.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--heartbeat", type=float, default=5)
    parser.add_argument("--stall", type=float, default=60)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("acts")
    given = vars(parser.parse_args())
    listen()
    try:
        run_processes(make_launch(given.pop("acts"), **given), print_to_stderr)
    except (Stopped, LostProcess, FailedProcess) as error:
        print_to_stderr(f"error: {error}")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
