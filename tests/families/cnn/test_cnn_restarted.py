"""`cnn train` in two processes of which one is killed: by the launcher all start again, and the run ends the same."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotloop.engine.checkpoint_folder import read_leaves, read_whole
from hotloop.engine.run import read_events
from process_groups import find_processes, wait_until_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc"),
    pytest.mark.usefixtures("signals_heard"),
]
UPDATES, EVERY, LIMIT = 120, 30, 400
WORDS = (
    *("--model-name", "toy_model_bn", "--micro-batch-size", "4", "--num-replicas", "2", "--seed", "5"),
    *("--dataset", "cifar10", "--synthetic-data", "host", "--precision", "32.32", "--validation", "False"),
    *("--weight-updates-per-epoch", str(UPDATES), "--logs-per-epoch", "4", "--ckpts-per-epoch", "4"),
    *("--lr-schedule-params", "{initial_learning_rate: 0.001}", "--optimizer-params", "{momentum: 0.9}"),
)


def start(run: Path, *more: str, launch: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=1"
    command = ["launch", "--num-instances", "2", *launch, "--", "cnn", "train", *WORDS, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "hotloop", *command, "--results-dir", str(run.parent), "--run-name", run.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )


def finish(started: "subprocess.Popen[str]") -> str:
    """What it said; it must end well."""
    try:
        out, errors = started.communicate(timeout=LIMIT)
    finally:
        started.kill()
    assert started.returncode == 0, out + errors
    return out + errors


def leaves(run: Path, update: int = UPDATES) -> dict[str, "np.ndarray[Any, Any]"]:
    folder = run / "checkpoints" / f"{update:08d}"
    found = read_leaves(folder, read_whole(folder, update))
    assert all(np.isfinite(leaf).all() for leaf in found.values())
    assert any(np.any(leaf) for name, leaf in found.items() if name.startswith("params"))
    return found


def test_after_a_kill_and_a_restart_the_weights_are_those_of_the_undisturbed_run(tmp_path):
    """The undisturbed run also writes a report, for which all wait and which one of them writes."""
    report, run = tmp_path / "report", tmp_path / "lost"
    finish(start(tmp_path / "whole", "--report", str(report)))
    written = {str(path.relative_to(report)) for path in report.rglob("*")}
    assert {"training/summary.json", "training/trace", "training/device_memory.json"} <= written
    assert len([*report.rglob("*.xplane.pb")]) == 1
    started = start(run, launch=("--heartbeat", "5", "--max-restarts", "1"))
    groups = find_processes(started.pid, 2)
    limit = time.monotonic() + LIMIT
    while not (run / "checkpoints" / f"{EVERY:08d}").exists():
        assert time.monotonic() < limit and started.poll() is None, started.communicate()
        time.sleep(0.01)
    os.kill(groups[1], signal.SIGKILL)
    assert "killed by SIGKILL; all start again (restart 1 of 1)" in finish(started)
    resumed = [record["update"] for record in read_events(run) if record["event"] == "resume"]
    assert len(resumed) == 1 and EVERY <= resumed[0] < UPDATES
    found, whole = leaves(run), leaves(tmp_path / "whole")
    assert found.keys() == whole.keys()
    assert all(found[name].tobytes() == leaf.tobytes() for name, leaf in whole.items())
    assert any(np.any(leaf != whole[name]) for name, leaf in leaves(run, resumed[0]).items())
    assert wait_until_gone(groups) == [[], []]
