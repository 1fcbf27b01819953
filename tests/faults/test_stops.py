"""Stops and kills at any moment of a small run in this process: the records and checkpoints that are left are those
of a run that nothing disturbed."""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine import drive as driving
from hotloop.engine.checkpoint_folder import KeepBest, KeepLast
from hotloop.engine.drive import Interrupted
from hotloop.engine.feed import Resident
from hotloop.engine.interrupt import StopRequest
from hotloop.engine.loop import Program, copy_state
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run, current_records, read_events
from hotloop.engine.training import open_training
from undisturbed import assert_same_run, records

PLAN = Plan.for_updates(30, log_every=4, validate_every=10, checkpoint_every=10)


def walk(state: Any, batch: Any, key: jax.Array) -> Any:
    step = state["step"] + 1
    w = state["w"] + batch["x"].mean() * jax.random.uniform(key, (3,))
    # Of sizes so different that the sum depends on the order in which it is made.
    return {"w": w, "step": step}, {"loss": jnp.exp(20 * w[0] % 1 - 10), "rate": 1 / step}


START = {"w": np.zeros(3, np.float32), "step": np.int32(0)}
DATA = {"x": np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)}
PROGRAM = Program(walk, Resident(DATA, 8, seed=1), PLAN.updates_per_call, jax.random.key(1), loop="while")


class Asked(StopRequest):
    """A request that is made between two looks at it."""

    def __init__(self, looks: int):
        self.looks = looks

    @property
    def number(self) -> int | None:  # type: ignore[override]
        self.looks -= 1
        return signal.SIGTERM if self.looks < 0 else None


class Killed(BaseException):
    """The process is gone: nothing more is written."""


EVENT = Run.event


def dying(records: int) -> Any:
    """Writes so many records, and is killed before the next."""
    left = [True] * records

    def event(self: Run, event: str, **figures: Any) -> dict[str, Any]:
        if not left:
            raise Killed
        left.pop()
        return EVENT(self, event, **figures)

    return event


def once(folder: Path, resume: bool) -> None:
    """A process: all that is left of the run, and an evaluation after it."""
    keep = KeepLast(2) | KeepBest("score")
    with open_training(folder, {}, command="test", resume=resume, keep=keep, sinks=[]) as training:
        state = training.train(
            PROGRAM,
            PLAN,
            START,
            validate=lambda state: {"score": float(state["w"][1])},
            latest=("rate",),
            guard="loss",
        )
        training.record.event("evaluation", split="test", sum=float(state["w"].sum()))
        training.record.event("evaluation", split="other", sum=float(state["w"].max()))


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "TARGET_SECONDS", 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    PROGRAM.compile(copy_state(START))  # once for all runs: compiling is no part of what is compared
    folder = tmp_path_factory.mktemp("whole") / "run"
    once(folder, resume=False)
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_stops_at_any_moment_leave_no_trace(
    seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments, stops = random.Random(seed), 0
    for process in count():
        looks = moments.randrange(60)

        @contextmanager
        def note_stops(looks: int = looks) -> Iterator[StopRequest]:
            yield Asked(looks)

        monkeypatch.setattr(driving, "note_stops", note_stops)
        try:
            once(tmp_path / "run", resume=process > 0)
            break
        except Interrupted as stop:
            assert stop.exit_status == 143
            stops += 1
    assert stops
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("seed", range(4))
def test_kills_between_any_two_records_leave_no_trace(
    seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = random.Random(seed)
    for process in range(4):
        monkeypatch.setattr(Run, "event", dying(moments.randrange(2, 14)))
        with suppress(Killed):
            once(tmp_path / "run", resume=process > 0)
    monkeypatch.setattr(Run, "event", EVENT)
    once(tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_a_finished_run_that_is_resumed_has_every_record_once(whole: Path, tmp_path: Path) -> None:
    once(tmp_path / "run", resume=False)
    once(tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", whole)
    kinds = [record["event"] for record in records(tmp_path / "run")]
    assert kinds.count("evaluation") == 2 and kinds.count("end") == kinds.count("start") == 1


def test_a_kill_right_after_a_checkpoint_loses_not_even_its_record(whole: Path, tmp_path: Path) -> None:
    once(tmp_path / "run", resume=False)
    events = tmp_path / "run" / "events.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if b'"checkpoint"' in line)
    events.write_bytes(b"".join(lines[:last]))
    once(tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(whole: Path, tmp_path: Path) -> None:
    with suppress(Killed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "event", dying(3))
        once(tmp_path / "run", resume=False)
    assert [record["update"] for record in current_records(read_events(tmp_path / "run"))][-1] == 8
    once(tmp_path / "run", resume=True)
    resumes = [record["update"] for record in read_events(tmp_path / "run") if record["event"] == "resume"]
    assert resumes == [0]
    assert_same_run(tmp_path / "run", whole)
