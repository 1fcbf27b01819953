"""The one way to run a training: what is refused first, what it records and saves, where it goes on, what is shown."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from family_protocol import same_tree
from hotloop import startup
from hotloop.engine import training as engine_training
from hotloop.engine.checkpoint import RunCheckpoints
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Program
from hotloop.engine.plan import Plan
from hotloop.engine.progress import Progress
from hotloop.engine.run import read_events, read_json
from hotloop.engine.training import check_place, open_training, train
from hotloop.errors import CheckpointError, OptionError, RunError
from listener import Listener

DATA = {"x": np.arange(12, dtype=np.float32)}
START = {"w": np.zeros(3, np.float32), "step": np.int32(0)}


def walk(state: Any, batch: Any, key: jax.Array) -> Any:
    """Its loss is the number of the update, from one."""
    step = state["step"] + 1
    w = state["w"] + batch["x"].mean() * jax.random.uniform(key, (3,))
    return {"w": w, "step": step}, {"loss": step.astype(jnp.float32)}


PROGRAM = Program(walk, Resident(DATA, 4, seed=3), 10, jax.random.key(1))
PLAN = Plan.for_updates(10, log_every=5, checkpoint_every=5)


class Bar(Progress):
    def __init__(self, title: str, total: float | None):
        self.title, self.total, self.moves = title, total, list[float]()

    def advance(self, amount: float = 1) -> None:
        self.moves.append(amount)


class Bars(list[Bar]):
    """What is shown, to look at afterwards."""

    @contextmanager
    def __call__(self, title: str, total: float | None = None) -> Iterator[Bar]:
        self.append(Bar(title, total))
        yield self[-1]


def kinds(folder: Path) -> list[str]:
    return [record["event"] for record in read_events(folder)]


def opened(folder: Path, **options: Any) -> Any:
    return open_training(folder, {"seed": 1}, command="test", **{"sinks": [], **options})


def test_one_call_leaves_settings_records_and_checkpoints(tmp_path: Path) -> None:
    state = train(PROGRAM, PLAN, START, tmp_path / "run", settings={"seed": 1}, sinks=[])
    assert int(state["step"]) == 10
    assert read_json(tmp_path / "run" / "config.json") == {"seed": 1}
    assert [each for each in kinds(tmp_path / "run") if each in ("log", "checkpoint", "end")] == [
        "log", "checkpoint", "log", "checkpoint", "end",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "00000005",
        "00000010",
    ]


def test_a_run_that_is_resumed_goes_on_from_its_newest_checkpoint_and_so_does_its_bar(tmp_path: Path) -> None:
    whole = train(PROGRAM, PLAN, START, tmp_path / "whole", sinks=[])
    bars, half = Bars(), Plan.for_updates(5, log_every=5, checkpoint_every=5, updates_per_epoch=10)
    with opened(tmp_path / "run", progress=bars) as training:
        assert training.newest(START) is None
        training.train(PROGRAM, half, START, title="first half")
    with opened(tmp_path / "run", resume=True, progress=bars) as training:
        assert training.newest(START).step == 5
        same_tree(training.train(PROGRAM, PLAN, START), whole, "resumed")
    assert [(bar.title, bar.total, bar.moves[0]) for bar in bars] == [
        ("first half", 5, 0),
        ("training", 10, 5),
    ]
    assert [sum(bar.moves) for bar in bars] == [5, 10]
    assert [each["update"] for each in read_events(tmp_path / "run") if each["event"] == "resume"] == [5]


def test_a_run_whose_every_checkpoint_is_damaged_does_not_start_over(tmp_path: Path) -> None:
    start = {**START, "step": 0}  # a plain number, as families write it
    train(PROGRAM, PLAN, start, tmp_path / "run", sinks=[])
    with opened(tmp_path / "run", resume=True, may_differ=("seed",)) as training:
        assert training.newest(start).step == 10
        for step in training.checkpoints.folder.iterdir():
            (step / "manifest.json").write_text("")
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            training.newest(start)


def test_a_new_run_does_not_go_on_from_what_lies_there(tmp_path: Path) -> None:
    for _ in range(2):
        train(PROGRAM, PLAN, START, tmp_path / "run", sinks=[])
        assert kinds(tmp_path / "run").count("log") == 2
        assert "resume" not in kinds(tmp_path / "run")
        for name in ("config.json", "events.jsonl"):
            (tmp_path / "run" / name).unlink()


def test_a_plan_without_end_has_a_bar_without_end(tmp_path: Path) -> None:
    bars = Bars()
    with opened(tmp_path / "run", progress=bars) as training:
        training.train(PROGRAM, PLAN, START, endless=True)
    assert bars[0].total is None


def test_a_plan_without_checkpoints_saves_none(tmp_path: Path) -> None:
    plan = Plan.for_updates(10, log_every=5, checkpoint_every=0)
    train(PROGRAM, plan, START, tmp_path / "run", sinks=[], enough=lambda: True)
    assert kinds(tmp_path / "run").count("log") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_notice_is_the_first_warning_on_record_and_repeated_at_a_good_end(tmp_path: Path) -> None:
    console = Listener()
    with opened(tmp_path / "good", notice="drawn, not real", console=console) as training:
        training.train(PROGRAM, PLAN, START)
        assert not console.warnings
    assert console.warnings == ["drawn, not real"]
    assert kinds(tmp_path / "good")[:2] == ["start", "warning"]
    with pytest.raises(ValueError, match="no"), opened(tmp_path / "bad", notice="drawn", console=console):
        raise ValueError("no")
    assert console.warnings == ["drawn, not real"]
    assert [each["status"] for each in read_events(tmp_path / "bad") if each["event"] == "end"] == ["failed"]


@pytest.mark.parametrize(
    ("where", "count", "mesh", "expected"),
    [("gpu", 1, None, True), ("tpu", 1, None, True), ("cpu", 1, None, False), ("gpu", 2, None, False),
     ("gpu", 1, object(), False)],
)  # fmt: skip
def test_a_program_is_compiled_ahead_on_one_accelerator_of_one_process(
    monkeypatch: Any, where: str, count: int, mesh: Any, expected: bool
) -> None:
    monkeypatch.setattr(engine_training, "platform", lambda: where)
    monkeypatch.setattr(engine_training.processes, "count", lambda: count)
    assert engine_training.compiles_ahead(mesh) == expected


def test_tracing_before_the_weights_is_none_of_their_time(tmp_path: Path) -> None:
    def slow(state: Any, batch: Any, key: jax.Array) -> Any:
        time.sleep(0.3)  # while it is traced, which is once
        return walk(state, batch, key)

    program = Program(slow, Resident(DATA, 4, seed=3), 10, jax.random.key(1))
    startup.start_again()
    with opened(tmp_path / "run") as run:
        run.compile_ahead(program, PLAN, START)
        run.train(program, PLAN, START)
    (first,) = [record for record in read_events(tmp_path / "run") if record["event"] == "first_update"]
    assert first["lower_seconds"] >= 0.3 > sum(first["parts"].values())


def test_a_callback_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="gaurd"):
        train(PROGRAM, PLAN, START, tmp_path / "run", sinks=[], gaurd="loss")  # type: ignore[call-arg]


def test_what_has_no_place_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    train(PROGRAM, PLAN, START, tmp_path / "run", sinks=[])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="already holds a run"):
        check_place(tmp_path / "run", resume=False)
    with pytest.raises(RunError, match="nothing to resume"):
        check_place(tmp_path / "new", resume=True)
    with pytest.raises(OptionError, match="cannot write there"):
        check_place(tmp_path / "new", resume=False, report=tmp_path / "file" / "report")
    check_place(tmp_path / "run", resume=True)
    check_place(tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()


def test_runs_that_share_a_folder_of_checkpoints_know_their_own(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    runs = [RunCheckpoints(shared, tmp_path / name, "walk") for name in ("one", "two")]
    for own, last in zip(runs, (10, 5), strict=True):
        assert own.run is not None
        plan = Plan.for_updates(last, checkpoint_every=5)
        with opened(own.run, checkpoints=lambda _, own=own: own.open()) as training:
            training.train(PROGRAM, plan, START)
    assert [own.steps() for own in runs] == [[5, 10], [5]]
    assert [own.other_steps() for own in runs] == [[], [10]]
    assert RunCheckpoints(shared, None, "walk").steps() == [5, 10]
