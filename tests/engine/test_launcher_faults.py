"""The launcher with processes that train together: one that is killed or stopped takes the others with it, is named,
and with a restart the run ends as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from launch_fakes import started
from two_processes import PROGRAM

from hotloop.engine.checkpoint_folder import find_steps, read_leaves, read_whole
from hotloop.engine.launcher import find_free_port
from hotloop.engine.run import read_events
from process_groups import find_processes, wait_until_gone
from started_processes import LIMIT, environment

pytestmark = [
    pytest.mark.usefixtures("signals_heard"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc"),
]
HEARTBEAT = 4
TOY = "--replicas {count} --streamed --updates 8 --log-every 2 --checkpoint-every 2"


def words(run: Path, count: int, **options: float) -> list[str]:
    more = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    toy = f"--run {run} {TOY.format(count=count)} {more}"
    return ["--count", str(count), "--heartbeat", str(HEARTBEAT), "--program", str(PROGRAM), toy]


def wait_for_update(run: Path, update: int, process: "subprocess.Popen[str]") -> None:
    """Until a checkpoint of this update is on record."""
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit and process.poll() is None:
        if (run / "events.jsonl").exists():
            records = read_events(run)
            if any(each["event"] == "checkpoint" and each["update"] >= update for each in records):
                return
        time.sleep(0.02)
    pytest.fail(f"no checkpoint of update {update}: {process.communicate(timeout=1)}")


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, errors = process.communicate(timeout=LIMIT)
    return process.returncode, errors


def weights(run: Path, step: int = 8) -> "np.ndarray[Any, Any]":
    """The bytes of all leaves of the last step, which must be this one."""
    steps = find_steps(run / "checkpoints")
    assert max(steps) == step
    leaves = read_leaves(steps[step], read_whole(steps[step], step))
    numbers = np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves.values()])
    assert np.isfinite(numbers).all()
    assert np.count_nonzero(numbers) > numbers.size / 2
    return np.concatenate([np.frombuffer(leaf.tobytes(), np.uint8) for leaf in leaves.values()])


def train(run: Path, count: int) -> "np.ndarray[Any, Any]":
    with started(*words(run, count), env=environment(1)) as process:
        assert finish(process)[0] == 0
    return weights(run)


@cache
def undisturbed(count: int) -> "np.ndarray[Any, Any]":
    """The last weights of a run of so many processes that nothing happens to."""
    with TemporaryDirectory() as folder:
        return train(Path(folder) / "run", count)


def disturb(run: Path, count: int, victim: int, number: int, *before: str) -> tuple[int, str, float]:
    """Send a signal to one process after the checkpoint of update 4: status, what was said, seconds until the end."""
    given = [*before, *words(run, count, seconds=0.05)]
    with started(*given, env=environment(1)) as process:
        groups = find_processes(process.pid, count)
        wait_for_update(run, 4, process)
        began = time.monotonic()
        os.kill(groups[victim], number)
        status, errors = finish(process)
        took = time.monotonic() - began
    assert wait_until_gone(groups) == [[]] * count
    return status, errors, took


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(1, id="a worker"), pytest.param(0, id="process 0")])
def test_after_a_kill_and_a_restart_the_weights_are_those_of_the_undisturbed_run(tmp_path, victim):
    whole = undisturbed(2)
    status, errors, _ = disturb(tmp_path / "run", 2, victim, signal.SIGKILL, "--max-restarts", "1")
    assert status == 0, errors
    assert re.search(
        rf"process {victim} of 2 on \S+ was lost while \w+, at update \d+: killed by SIGKILL; all start again",
        errors,
    )
    assert (weights(tmp_path / "run") == whole).all()
    assert [each["event"] for each in read_events(tmp_path / "run")].count("resume") == 1


@pytest.mark.slow
def test_a_run_that_is_lost_before_its_first_update_starts_over_in_its_folder(tmp_path):
    run = tmp_path / "run"
    with started("--max-restarts", "1", *words(run, 2, dying=1), env=environment(1)) as process:
        groups = find_processes(process.pid, 2)
        status, errors = finish(process)
    assert status == 0, errors
    assert re.search(r"process 1 of 2 on .* killed by SIGKILL; all start again", errors)
    assert (weights(run) == undisturbed(2)).all()
    assert [each["event"] for each in read_events(run)].count("start") == 2
    assert wait_until_gone(groups) == [[], []]


def test_process_0_that_is_killed_is_named_and_ends_all(tmp_path):
    status, errors, took = disturb(tmp_path / "run", 2, 0, signal.SIGKILL)
    assert status == 134
    assert re.search(
        r"error: process 0 of 2 on \S+ was lost while \w+, at update \d+: killed by SIGKILL\n", errors
    )
    assert took < HEARTBEAT + 15


@pytest.mark.slow
def test_a_process_that_is_stopped_is_lost(tmp_path):
    status, errors, took = disturb(tmp_path / "run", 2, 1, signal.SIGSTOP)
    assert status == 134
    assert re.search(r"error: process 1 of 2 on \S+ was lost while \w+, at update \d+: .*\(SIGSTOP\)", errors)
    assert took < HEARTBEAT + 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGKILL),
        (0, signal.SIGSTOP),
        (2, signal.SIGSTOP),
        (1, signal.SIGSEGV),
    ],
)
def test_of_three_processes_any_may_be_lost_and_the_run_ends_the_same(tmp_path, victim, number):
    whole = undisturbed(3)
    status, errors, _ = disturb(tmp_path / "run", 3, victim, number, "--max-restarts", "1")
    assert status == 0, errors
    assert f"process {victim} of 3 on " in errors
    assert (weights(tmp_path / "run") == whole).all()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_each_machines_launcher_watches_its_own_and_starts_again_when_a_peer_elsewhere_is_lost(
    tmp_path, victim
):
    """Two launchers of one process each, as on two machines."""
    whole, run = undisturbed(2), tmp_path / "run"
    toy = words(run, 2, seconds=0.05)[2:]
    where = [
        "--count",
        "1",
        "--total",
        "2",
        "--coordinator",
        f"localhost:{find_free_port()}",
        "--max-restarts",
        "1",
    ]
    with (
        started(*where, *toy, env=environment(1)) as first,
        started(*where, "--first", "1", *toy, env=environment(1)) as second,
    ):
        launchers = (first, second)
        groups = [find_processes(each.pid, 1)[0] for each in launchers]
        wait_for_update(run, 4, first)
        os.kill(groups[victim], signal.SIGKILL)
        ended = [finish(each) for each in launchers]
    assert [status for status, _ in ended] == [0, 0], ended
    assert re.search(
        rf"process {victim} of 2 on \S+ was lost .*: killed by SIGKILL; all start", ended[victim][1]
    )
    other = ended[1 - victim][1]
    assert re.search(
        rf"process {1 - victim} of 2 on \S+ was lost .*: aborted, as jax does when a peer is gone", other
    )
    assert (weights(run) == whole).all()
    assert wait_until_gone(groups) == [[], []]


@pytest.mark.slow
def test_a_process_that_never_comes_is_one_line_and_status_2(tmp_path):
    """Two of three are started; the third, on another machine, is not."""
    where = ["--total", "3", "--coordinator", f"localhost:{find_free_port()}"]
    began = time.monotonic()
    with started(*where, *words(tmp_path / "run", 2), env=environment(1, HOTLOOP_MEETING="8")) as process:
        groups = find_processes(process.pid, 2)
        status, errors = finish(process)
    assert status == 2, errors
    assert 8 < time.monotonic() - began < 60
    assert re.search(r"error: process [01] of 3: .* within 8 s", errors)
    assert errors.count("error:") == 1, errors
    assert wait_until_gone(groups) == [[], []]


def notes_of(process: int) -> Path:
    """The folder where the processes of its launch keep their notes."""
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return Path(next(each[14:] for each in variables if each.startswith(b"HOTLOOP_NOTES=")).decode())


def wait_for_phase(process: int, phase: str) -> None:
    folder, limit = notes_of(process), time.monotonic() + LIMIT
    while time.monotonic() < limit:
        with suppress(OSError, ValueError):
            if json.loads((folder / "1.json").read_text())["phase"] == phase:
                return
        time.sleep(0.001)
    pytest.fail(f"never in phase {phase}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "to"),
    [
        *((phase, "the launcher") for phase in ("starting", "loading", "compiling", "training", "saving")),
        ("loading", "process 0"),
        ("compiling", "process 1"),
        ("training", "process 0"),
        ("saving", "process 1"),
    ],
)
def test_a_stop_at_any_time_ends_all_and_the_run_goes_on_from_there(tmp_path, phase, to):
    whole, run = undisturbed(2), tmp_path / "run"
    options = words(run, 2, seconds=0.2)
    with started(*options, env=environment(1)) as process:
        groups = find_processes(process.pid, 2)
        wait_for_phase(groups[1], phase)
        victim = process.pid if to == "the launcher" else groups[int(to[-1])]
        os.kill(victim, signal.SIGTERM)
        status, errors = finish(process)
    assert status == 130, errors
    assert wait_until_gone(groups) == [[], []]
    assert "Traceback" not in errors
    begun = (run / "events.jsonl").exists()
    if begun:
        ends = [each["status"] for each in read_events(run) if each["event"] == "end"]
        assert ends in (["interrupted"], []), ends
    options[-1] += " --resume" * begun
    with started(*options, env=environment(1)) as process:
        status, errors = finish(process)
    assert status == 0, errors
    assert (weights(run) == whole).all()


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_process_alone_is_one_line_and_status_2(tmp_path, failing):
    began = time.monotonic()
    with started(*words(tmp_path / "run", 2, failing=failing), env=environment(1)) as process:
        groups = find_processes(process.pid, 2)
        status, errors = finish(process)
    assert status == 2
    assert time.monotonic() - began < LIMIT
    assert errors.count("image 17 is broken") == 1, errors
    assert errors.count("error:") == 1, errors
    assert wait_until_gone(groups) == [[], []]
