"""Signals become requests: the first is noted even while compiled code runs, the second ends the process at once."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_family as toy

from hotloop.engine import interrupt
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.drive import Interrupted, drive
from hotloop.engine.feed import Resident
from hotloop.engine.interrupt import Stopped, hold_stops, leave_at_once, note_stops, raise_stops
from hotloop.engine.loop import Program
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run, read_events

pytestmark = pytest.mark.usefixtures("signals_heard")


def count(state: Any, batch: Any, key: jax.Array) -> Any:
    return state + 1, {"loss": state.astype(jnp.float32)}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path / "run", {}, command="test", environment={}) as run:
        yield run


def counting(per_call: int) -> Program:
    return Program(count, Resident(toy.data(), 8), per_call, jax.random.key(0))


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_request_and_is_answered_in_words(number: int) -> None:
    said: list[str] = []
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped), note_stops(said.append) as request:
        assert request.number is None
        os.kill(os.getpid(), number)
        wait_until(lambda: request.number is not None)
        wait_until(lambda: said)
    assert len(said) == 1 and "Once more leaves at once" in said[0]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "hotloop-signals"]


@pytest.mark.parametrize("answer", ["note", "raise"])
def test_one_of_several_is_told_that_ctrl_c_alone_leaves_at_once(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "PATIENCE", 0.1)
    said: list[str] = []
    listener = interrupt._Listener(answer, said.append)
    with interrupt.share_stops():
        listener._answer_first(signal.SIGTERM, "SIGTERM")
        wait_until(lambda: said)
    listener._answer_first(signal.SIGTERM, "SIGTERM")
    wait_until(lambda: len(said) == 2)
    assert ["Ctrl-C leaves at once" in text for text in said] == [True, False]


def test_after_the_context_ctrl_c_is_pythons_own_again() -> None:
    with note_stops():
        pass
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def interrupt_at(update: int) -> Any:
    """A hook that presses Ctrl-C once after the piece that holds an update."""

    def on_call(first: int, metrics: Any) -> None:
        if first <= update < first + len(metrics["loss"]):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the thread that reads the signal has its own pace

    return on_call


def test_a_request_stops_the_run_saved_at_the_end_of_a_piece(run: Run, tmp_path: Path) -> None:
    plan = Plan.for_updates(10_000_000, checkpoint_every=10_000_000)  # one call, and nobody would wait for it
    run.how_to_resume = "do this"
    with Checkpoints(tmp_path / "steps") as checkpoints:
        with pytest.raises(Interrupted, match=r"interrupted after update .* to resume: do this$") as stop:
            drive(
                counting(plan.updates_per_call),
                plan,
                np.int32(0),
                run,
                checkpoints,
                on_call=interrupt_at(0),
            )
        restored = checkpoints.restore(jnp.int32(0))
    assert isinstance(stop.value, KeyboardInterrupt) and stop.value.exit_status == 130
    assert restored.step == stop.value.update == int(restored.state)
    assert 1 <= restored.step < 10_000_000


def test_a_run_without_checkpoints_says_that_nothing_is_saved(run: Run) -> None:
    plan = Plan.for_updates(1_000_000, log_every=500_000)
    with pytest.raises(Interrupted, match="nothing was saved"):
        drive(counting(plan.updates_per_call), plan, np.int32(0), run, on_call=interrupt_at(0))


def test_a_request_during_the_last_piece_is_a_stop_and_no_validation_begins(run: Run, tmp_path: Path) -> None:
    plan = Plan.for_updates(3, log_every=3, validate_every=3, checkpoint_every=3)
    with Checkpoints(tmp_path / "steps") as checkpoints:
        with pytest.raises(Interrupted, match="after update 3 of 3, saved"):
            drive(
                counting(3),
                plan,
                np.int32(0),
                run,
                checkpoints,
                validate=pytest.fail,
                on_call=interrupt_at(2),
            )
        resumed, seen = checkpoints.restore(jnp.int32(0)), []
        last = drive(
            counting(3), plan, np.int32(0), run, checkpoints, resumed=resumed,
            validate=lambda state: seen.append(int(state)) or {"seen": 1},
        )  # fmt: skip
        assert int(last) == 3 and seen == [3]  # what the stop left undone was done
        assert checkpoints.restore(jnp.int32(0)).metrics["seen"] == 1


def test_a_request_that_came_too_late_to_be_seen_is_raised_at_the_end() -> None:
    with pytest.raises(Stopped, match="stopped by SIGTERM") as stop, note_stops() as request:
        signal.raise_signal(signal.SIGTERM)
        assert request.number is not None
    assert stop.value.exit_status == 143


def test_the_record_of_an_interrupted_run_ends_with_its_status(tmp_path: Path) -> None:
    plan = Plan.for_updates(1_000_000)
    with (
        pytest.raises(Interrupted),
        Run(tmp_path / "run", {}, command="test", environment={}) as run,
        Checkpoints(run.checkpoints) as checkpoints,
    ):
        drive(counting(1_000_000), plan, np.int32(0), run, checkpoints, on_call=interrupt_at(0))
    last = list(read_events(tmp_path / "run"))[-1]
    assert (last["event"], last["status"]) == ("end", "interrupted") and last["update"] > 0


def test_off_the_main_thread_runs_go_on_without_handlers(run: Run) -> None:
    plan, results = Plan.for_updates(5, log_every=5), []
    thread = threading.Thread(target=lambda: results.append(int(drive(counting(5), plan, np.int32(0), run))))
    thread.start()
    thread.join()
    assert results == [5]


STUCK = """
import jax
from hotloop.engine.interrupt import note_stops

def forever(n):
    return jax.lax.while_loop(lambda x: x >= 0, lambda x: (x + 1) % 7, n)

with note_stops():
    compiled = jax.jit(forever).lower(0).compile()
    print("running", flush=True)
    compiled(0).block_until_ready()
"""


def test_a_second_ctrl_c_leaves_at_once_even_from_inside_compiled_code() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout and process.stderr
            assert process.stdout.readline() == "running\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            assert "finishing the running piece" in process.stderr.readline()
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()


@pytest.fixture
def own_listener(monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of a command's own process, whose thread is slower than what it listens to."""
    listener = interrupt._Listener("leave", lambda text: None)
    listener.stays = True
    monkeypatch.setattr(interrupt, "_listener", listener)
    return listener


def test_a_signal_just_before_stops_are_raised_is_not_lost(own_listener: Any) -> None:
    own_listener._handle(signal.SIGTERM, None)
    with pytest.raises(Stopped, match="SIGTERM"), raise_stops():
        pytest.fail("went on")
    assert own_listener.answer == "leave"


@pytest.mark.parametrize("elsewhere", [leave_at_once, note_stops, hold_stops])
def test_a_signal_just_before_stops_are_raised_again_is_not_lost(elsewhere: Any, own_listener: Any) -> None:
    with pytest.raises(Stopped, match="SIGTERM"), raise_stops():
        with elsewhere():
            own_listener._handle(signal.SIGTERM, None)
        pytest.fail("went on")
