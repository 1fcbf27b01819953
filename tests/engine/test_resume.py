"""A run that is cut anywhere, even by SIGKILL, ends in the same bits as one that was not."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import digits_program
import jax
import numpy as np
import pytest
import toy_family as toy

from family_protocol import same_tree
from hotloop.engine.batch_sources import Streamed
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.drive import drive
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Program, copy_state
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run, read_events
from hotloop.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("signals_heard")

UPDATES = 30
PLAN = Plan.for_updates(UPDATES, log_every=10, checkpoint_every=30)
CONFIG = toy.Config(hidden=6)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path / "run", {}, command="test", environment={}) as run:
        yield run


def start() -> Any:
    return copy_state(toy.init(CONFIG, jax.random.key(0)))


def resident(**options: Any) -> Resident:
    return Resident(toy.data(), 8, **{"seed": 3, **options})


PROGRAM = Program(toy.update(CONFIG), resident(), PLAN.updates_per_call, jax.random.key(5))


def logs(run: Run) -> list[tuple[int, float]]:
    return [(e["update"], e["loss"]) for e in read_events(run.path) if e["event"] == "log"]


@pytest.mark.parametrize("cut", [1, 7, 10, 23, 29])
def test_a_run_cut_inside_a_call_or_between_calls_goes_on_bit_for_bit(
    run: Run, tmp_path: Path, cut: int
) -> None:
    expected = drive(PROGRAM, PLAN, start(), run)
    whole = logs(run)
    stop_there = cut_plan(cut)
    with Checkpoints(tmp_path / "steps") as checkpoints:
        drive(PROGRAM, stop_there, start(), run, checkpoints)
        resumed = checkpoints.restore(start())
        assert resumed.step == cut
        same_tree(drive(PROGRAM, PLAN, start(), run, checkpoints, resumed=resumed), expected, "resumed")
    again = logs(run)[len(whole) :]
    assert again == whole  # the window of the log that was open at the cut went along
    assert [e["update"] for e in read_events(run.path) if e["event"] == "resume"] == [cut]


def cut_plan(cut: int) -> Plan:
    """The plan as far as `cut`, with its logs but no log at the cut itself unless one is due."""
    logged = Plan.for_updates(UPDATES, log_every=10)
    marks = tuple(
        mark._replace(updates=range(10, cut + 1, 10)) for mark in logged.marks if mark.kind == "log"
    )
    saved = Plan.for_updates(cut, checkpoint_every=cut).marks
    return Plan(cut, UPDATES, PLAN.batch, tuple(mark for mark in (*marks, *saved) if mark.updates))


def test_data_on_the_device_and_from_the_host_may_continue_each_other(run: Run, tmp_path: Path) -> None:
    expected = drive(PROGRAM, PLAN, start(), run)
    with Checkpoints(tmp_path / "steps") as checkpoints, Streamed(toy.data(), 8, seed=3) as feed:
        drive(PROGRAM, cut_plan(10), start(), run, checkpoints)
        streamed = Program(toy.update(CONFIG), feed, 10, jax.random.key(5))
        resumed = checkpoints.restore(start())
        same_tree(drive(streamed, PLAN, start(), run, resumed=resumed), expected, "streamed")


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (resident(seed=4), "made with seed 3, this run has 4"),
        (Resident(toy.data(150), 8, seed=3), "made with samples 203, this run has 150"),
        (Resident(toy.data(), 4, seed=3), "made with batch size 8, this run has 4"),
    ],
)
def test_a_checkpoint_of_another_order_is_refused(run: Run, tmp_path: Path, feed: Any, message: str) -> None:
    with Checkpoints(tmp_path / "steps") as checkpoints:
        drive(PROGRAM, cut_plan(10), start(), run, checkpoints)
        other = Program(toy.update(CONFIG), feed, 10, jax.random.key(5))
        with pytest.raises(CheckpointError, match=message):
            drive(other, PLAN, start(), run, checkpoints, resumed=checkpoints.restore(start()))


def test_damaged_steps_that_were_passed_over_are_told_in_the_records(run: Run, tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "steps") as checkpoints:
        drive(PROGRAM, cut_plan(10), start(), run, checkpoints)
        (tmp_path / "steps" / "00000020").mkdir()
        drive(PROGRAM, PLAN, start(), run, checkpoints, resumed=checkpoints.restore(start()))
    warnings = [e["message"] for e in read_events(run.path) if e["event"] == "warning"]
    assert len(warnings) == 1 and "step 20" in warnings[0]


def initial_digits() -> Any:
    spec = importlib.util.spec_from_file_location("digits_example", digits_program.PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.init(module.Config(hidden=8), jax.random.key(0))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "whole"
    digits_program.finish(digits_program.start(folder))
    return folder


def kill_after(checkpoints: int, folder: Path, *options: str) -> None:
    process = digits_program.start(folder, *options)
    wanted = checkpoints * digits_program.CHECKPOINT_EVERY
    digits_program.wait_for(lambda: digits_program.reached(folder) >= wanted, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_process_resumes_to_the_same_weights_and_logs(tmp_path: Path, uninterrupted: Path) -> None:
    folder = tmp_path / "killed"
    kill_after(2, folder)
    kill_after(6, folder, "--resume")
    assert digits_program.reached(folder) < digits_program.UPDATES
    digits_program.finish(digits_program.start(folder, "--resume"))
    compare(folder, uninterrupted)


def interrupted(folder: Path, number: int) -> tuple[int, str]:
    """Send a signal to a run that has saved once; the update it stopped at, and its last line."""
    process = digits_program.start(folder)
    digits_program.wait_for(lambda: digits_program.reached(folder), process)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in errors, errors
    end = list(read_events(folder))[-1]
    assert (end["event"], end["status"]) == ("end", "interrupted")
    return end["update"], errors.strip().splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_saves_leaves_with_130_and_says_how_to_resume(tmp_path: Path, uninterrupted: Path) -> None:
    folder = tmp_path / "interrupted"
    update, last = interrupted(folder, signal.SIGINT)
    assert f"interrupted after update {update} of 400" in last
    assert digits_program.reached(folder) == update < 400
    command = last.split("to resume: ")[1].split()
    assert command[:2] == ["python", str(digits_program.PROGRAM)] and command[-1] == "--resume"
    digits_program.finish(digits_program.start(folder, "--resume"))
    compare(folder, uninterrupted)


def test_sigterm_is_heard_like_ctrl_c(tmp_path: Path) -> None:
    update, last = interrupted(tmp_path / "terminated", signal.SIGTERM)
    assert f"interrupted after update {update} of 400" in last


def compare(folder: Path, uninterrupted: Path) -> None:
    like = initial_digits()
    same_tree(digits_program.final(folder, like), digits_program.final(uninterrupted, like), "weights")
    assert digits_program.logged(folder) == digits_program.logged(uninterrupted)


def test_resuming_with_another_config_is_refused_in_one_line(uninterrupted: Path) -> None:
    process = digits_program.start(uninterrupted, "--resume", "--seed", "9")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and len(errors.strip().splitlines()) == 1 and "seed" in errors


def test_the_example_learns(uninterrupted: Path) -> None:
    losses = [loss for _, loss in digits_program.logged(uninterrupted)]
    assert len(losses) == 20 and np.mean(losses[-3:]) < 0.5 * losses[0]
