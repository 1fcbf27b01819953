"""Starts the toy program in several processes on this machine, and reads what they left."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import toy_family as toy

import started_processes
from hotloop.engine.checkpoint import Checkpoints, Restored
from hotloop.engine.launcher import Launch, run_processes
from hotloop.engine.loop import copy_state
from hotloop.engine.run import read_events
from started_processes import Started, environment, run_together

PROGRAM = Path(__file__).with_name("toy_program.py")


def start(*options: str, program: Path = PROGRAM, **more: Any) -> Started:
    """The toy program with these options in so many processes."""
    return started_processes.start(program, *options, **more)


def launch(*options: str, processes: int = 2, devices: int = 2) -> None:
    """Run the toy program to its end by the launcher itself; its error where that is not a good one."""
    alike = environment(devices)
    program = sys.executable, str(PROGRAM)
    heartbeat = float(alike["HOTLOOP_HEARTBEAT"])
    asked = Launch(program, options, (alike,) * processes, total=processes, heartbeat=heartbeat)
    run_processes(asked, print)


def check(folder: Path) -> dict[str, Any]:
    """What `process_checks` finds in two processes of two devices; it saves in the folder."""
    found: dict[str, Any] = run_together(PROGRAM.with_name("process_checks.py"), folder, devices=2)
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
