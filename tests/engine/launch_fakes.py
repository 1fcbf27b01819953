"""A launcher as a program of its own, so that it can be signalled and killed: options, then the words of its processes,
which are fake ones or those of another program. Helpers find them and what is left of them."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hotloop.engine.interrupt import Stopped, listen, print_to_stderr
from hotloop.engine.launcher import FailedProcess, Launch, LostProcess, run_processes

FAKE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_process.py")))
LONGEST = 30.0


def make_launch(words: str, count: int, program: tuple[str, ...] = FAKE, **settings: Any) -> Launch:
    return Launch(program, tuple(words.split()), ({},) * count, **{"total": count, **settings})


def living_members(group: int) -> list[int]:
    """The processes of a group that run; one that nobody has asked after is none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = entry.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


@contextmanager
def started(*words: str, env: Mapping[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """A launcher of its own; it is killed at the end, if it still runs."""
    process = subprocess.Popen(
        [sys.executable, __file__, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def find_processes(launcher: int, count: int) -> list[int]:
    """The processes of a launcher, by their numbers, once there are so many; each leads a group of its own."""
    limit = time.monotonic() + LONGEST
    while time.monotonic() < limit:
        found = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, parent = entry.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == launcher and state not in "ZX":
                    variables = entry.with_name("environ").read_bytes().split(b"\0")
                    numbers = [each[16:] for each in variables if each.startswith(b"HOTLOOP_PROCESS=")]
                    found |= {int(number): int(entry.parent.name) for number in numbers}
        if len(found) == count:
            return [found[number] for number in sorted(found)]
        time.sleep(0.02)
    raise TimeoutError(f"{count} processes did not start")


def wait_until_gone(groups: Sequence[int]) -> list[list[int]]:
    """What is left of these groups, waited for a while."""
    limit = time.monotonic() + LONGEST
    while any(living_members(group) for group in groups) and time.monotonic() < limit:
        time.sleep(0.02)
    return [living_members(group) for group in groups]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--heartbeat", type=float, default=5)
    parser.add_argument("--stall", type=float, default=60)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--total", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("--program")
    parser.add_argument("words")
    given = vars(parser.parse_args())
    program = given.pop("program")
    given["total"] = given["total"] or given["count"]
    listen()
    try:
        launch = make_launch(**given, program=(sys.executable, program) if program else FAKE)
        run_processes(launch, print_to_stderr)
    except (Stopped, LostProcess, FailedProcess) as error:
        if getattr(error, "number", None) != 0 or isinstance(error, Stopped):  # process 0 has said so itself
            print_to_stderr(f"error: {error}")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
