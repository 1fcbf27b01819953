"""Programs that tests start in several processes of this machine, which meet each other without a launcher."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.engine.launcher import find_free_port

LIMIT = 90.0
"""Seconds after which processes count as hanging: what is left is killed, and the test fails."""


def environment(devices: int, **more: str) -> dict[str, str]:
    """Of a child with so many virtual devices; programs are compiled quickly, and kept for the next one."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    times = {"HOTLOOP_HEARTBEAT": "5", "HOTLOOP_SHUTDOWN": "10", "HOTLOOP_MEETING": "30"}
    # The modules of the tests' own folder, which are for all of them.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    known = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    return {**os.environ, **known, **times, **more}


@dataclass
class Ended:
    """How a process ended, and what it said."""

    status: int
    out: str
    errors: str


@dataclass
class Started(AbstractContextManager["Started"]):
    """Processes that run together; those that are left at the end of a `with` are killed."""

    children: list[subprocess.Popen[str]]
    began: float
    limit: float

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.kill()
            child.communicate()

    def finish(self) -> list[Ended]:
        """Wait for all of them."""
        ended = []
        for child in self.children:
            out, errors = child.communicate(timeout=max(0.1, self.began + self.limit - time.monotonic()))
            ended.append(Ended(child.returncode, out, errors))
        return ended

    def wait_for(self, condition: Callable[[], Any]) -> None:
        while not condition():
            assert time.monotonic() < self.began + self.limit
            assert all(child.poll() is None for child in self.children), self.finish()
            time.sleep(0.01)


def start(
    program: Path,
    *words: Any,
    processes: int = 2,
    devices: int = 2,
    own: Mapping[int, Sequence[str]] | None = None,
    folders: Sequence[Path] | None = None,
    port: int | None = None,
    missing: int | None = None,
    limit: float = LIMIT,
    **more: str,
) -> Started:
    """A program with these words in so many processes. `own` are further words of one of them, `folders` where each
    starts; the process `missing` never comes."""
    port = port or find_free_port()
    children = []
    for number in range(processes):
        if number == missing:
            continue
        place = {
            "HOTLOOP_COORDINATOR": f"localhost:{port}",
            "HOTLOOP_PROCESSES": str(processes),
            "HOTLOOP_PROCESS": str(number),
        }
        command = [sys.executable, str(program), *map(str, words), *(own or {}).get(number, ())]
        children.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folders[number] if folders else None,
                env=environment(devices, **place, **more),
            )
        )
    return Started(children, time.monotonic(), limit)


def run_together(program: Path, *words: Any, processes: int = 2, devices: int, limit: float = LIMIT) -> Any:
    """The last line that process 0 printed, which is JSON; every process must end well."""
    with start(program, *words, processes=processes, devices=devices, limit=limit) as started:
        ended = started.finish()
    assert [each.status for each in ended] == [0] * processes, ended
    return json.loads(ended[0].out.splitlines()[-1])
