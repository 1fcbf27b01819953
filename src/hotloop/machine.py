"""The machine that this process runs on: its processor, and where what can be made again is kept between processes.

It imports no jax, and knows nothing of what is computed: layers and engine both ask it.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from platform import machine, processor

from hotloop.errors import OptionError
from hotloop.options import expand_path

OFF = ("0", "off", "false", "no")


def is_switched_off(variable: str) -> bool:
    """Whether a variable of the environment switches off what it stands for."""
    return os.environ.get(variable, "").lower() in OFF


def cache_folder() -> Path | None:
    """Where everything that may be thrown away is kept; None when `HOTLOOP_CACHE=off`."""
    if is_switched_off("HOTLOOP_CACHE"):
        return None
    if named := os.environ.get("HOTLOOP_CACHE", ""):
        try:
            return expand_path(named)
        except ValueError as error:
            raise OptionError(f"HOTLOOP_CACHE {named}: {error}") from None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotloop"


def cpu_model() -> str:
    return search_file(r"(?m)^model name\s*:\s*(.+)$", "/proc/cpuinfo") or processor() or machine()


def usable_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def search_file(pattern: str, file: str) -> str | None:
    """The first group of a pattern in a file of the system; None where there is none of either."""
    try:
        found = re.search(pattern, Path(file).read_text())
    except OSError:
        return None
    return found[1].strip() if found else None


def run_child(words: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int, str]:
    """Run a program to its end, with no input: its status (below 0: the signal that ended it), and the last line of its
    standard error. OSError where it does not start, subprocess.TimeoutExpired where it takes longer."""
    done = subprocess.run(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )
    return done.returncode, (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
