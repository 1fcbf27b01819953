"""A launcher as a program of its own, so that it can be signalled and killed: options, then the words of its processes,
which are fake ones or those of another program."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotloop.engine.interrupt import Stopped, listen, print_to_stderr
from hotloop.engine.launcher import FailedProcess, Launch, LostProcess, run_processes

FAKE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_process.py")))


def make_launch(words: str, count: int, program: tuple[str, ...] = FAKE, **settings: Any) -> Launch:
    return Launch(program, tuple(words.split()), ({},) * count, **{"total": count, **settings})


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
