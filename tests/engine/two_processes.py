"""Starts the toy program in several processes on this machine, and reads what they left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import toy_family as toy

from hotloop.engine.checkpoint import Checkpoints, Restored
from hotloop.engine.launcher import Launch, run_processes
from hotloop.engine.loop import copy_state
from hotloop.engine.run import read_events

PROGRAM = Path(__file__).with_name("toy_program.py")
LIMIT = 90.0
"""Seconds after which a case counts as hanging: what is left is killed, and the test fails."""


def environment(devices: int, **more: str) -> dict[str, str]:
    """Of a child with so many virtual devices; programs are compiled quickly, and kept for the next one."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    times = {"HOTLOOP_HEARTBEAT": "5", "HOTLOOP_SHUTDOWN": "10", "HOTLOOP_MEETING": "30"}
    path = os.pathsep.join([str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path, **times, **more}


@dataclass
class Ended:
    """How a process ended, and what it said."""

    status: int
    out: str
    errors: str


@dataclass
class Started:
    """Processes that run together; those that are left at the end of a `with` are killed."""

    children: list[subprocess.Popen[str]]
    began: float

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.kill()
            child.communicate()

    def finish(self) -> list[Ended]:
        """Wait for all of them."""
        ended = []
        for child in self.children:
            out, errors = child.communicate(timeout=max(0.1, self.began + LIMIT - time.monotonic()))
            ended.append(Ended(child.returncode, out, errors))
        return ended

    def wait_for(self, condition: Callable[[], Any]) -> None:
        while not condition():
            assert time.monotonic() < self.began + LIMIT
            assert all(child.poll() is None for child in self.children), self.finish()
            time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def start(
    *options: str,
    processes: int = 2,
    devices: int = 2,
    program: Path = PROGRAM,
    own: Mapping[int, Sequence[str]] | None = None,
    folders: Sequence[Path] | None = None,
    port: int | None = None,
    missing: int | None = None,
    **more: str,
) -> Started:
    """The toy program with these options in so many processes. `own` are further options of one of them, `folders`
    where each starts; the process `missing` never comes."""
    port = port or free_port()
    children = []
    for number in range(processes):
        if number == missing:
            continue
        place = {
            "HOTLOOP_COORDINATOR": f"localhost:{port}",
            "HOTLOOP_PROCESSES": str(processes),
            "HOTLOOP_PROCESS": str(number),
        }
        words = [sys.executable, str(program), *options, *(own or {}).get(number, ())]
        children.append(
            subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folders[number] if folders else None,
                env=environment(devices, **place, **more),
            )
        )
    return Started(children, time.monotonic())


def launch(*options: str, processes: int = 2, devices: int = 2) -> None:
    """Run the toy program to its end by the launcher itself; its error where that is not a good one."""
    alike = environment(devices)
    program = sys.executable, str(PROGRAM)
    heartbeat = float(alike["HOTLOOP_HEARTBEAT"])
    asked = Launch(program, options, (alike,) * processes, total=processes, heartbeat=heartbeat)
    run_processes(asked, print)


def check(folder: Path) -> dict[str, Any]:
    """What `process_checks` finds in two processes of two devices; it saves in the folder."""
    with start(str(folder), program=PROGRAM.with_name("process_checks.py")) as started:
        ended = started.finish()
    assert [each.status for each in ended] == [0, 0], ended
    found: dict[str, Any] = json.loads(ended[0].out.splitlines()[-1])
    return found


def losses(folder: Path) -> "np.ndarray[Any, Any]":
    """Of every log of the run."""
    found = np.array([record["loss"] for record in read_events(folder) if record["event"] == "log"])
    assert found.size and np.isfinite(found).all() and (found != 0).all()
    return found


def restore(folder: Path, step: int | None = None) -> Restored:
    """A checkpoint of a run, on this process's first device."""
    like = copy_state(toy.init(toy.Config(), jax.random.key(0)))
    return Checkpoints(folder).restore(like, step)


def weights(folder: Path) -> "np.ndarray[Any, Any]":
    """All numbers of the last state, optimiser and counters too."""
    state = restore(folder / "checkpoints").state
    found = np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(state)])
    assert np.isfinite(found).all() and np.count_nonzero(found) > found.size / 2
    return found


def send(child: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
    child.send_signal(number)
