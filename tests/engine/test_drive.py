"""Driving a plan: events when due and with true figures, pieces without effect, divergence caught, reports written."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_family as toy

from family_protocol import same_tree
from hotloop import startup
from hotloop.engine import drive as driving
from hotloop.engine import loop as looping
from hotloop.engine.batch_sources import Streamed
from hotloop.engine.blocks import Form
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepBest
from hotloop.engine.drive import Diverged, LogWindow, compile_first_piece, drive
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Program, copy_state
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run, read_events

BATCH = 8


def walk(state: Any, batch: Any, key: jax.Array) -> Any:
    """The cheapest update: its loss is the number of the update, from one."""
    step = state["step"] + 1
    w = state["w"] + batch["x"].mean() * jax.random.uniform(key, (3,))
    return {"w": w, "step": step}, {"loss": step.astype(jnp.float32), "rate": 1 / step, "row": w}


START = {"w": np.zeros(3, np.float32), "step": np.int32(0)}


def walking(plan: Plan, feed: Any = None, loop: Any = None) -> Program:
    feed = feed or Resident(toy.data(), BATCH, seed=3)
    return Program(walk, feed, plan.updates_per_call, jax.random.key(1), loop=loop)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path / "run", {}, command="test", environment={}) as run:
        yield run


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_events(run.path) if record["event"] == kind]


def test_every_log_averages_every_update_since_the_last(run: Run) -> None:
    plan = Plan.for_updates(25, log_every=10)
    drive(walking(plan), plan, START, run, latest=("rate",))
    logs = events(run, "log")
    assert [log["update"] for log in logs] == [10, 20, 25]
    assert [log["loss"] for log in logs] == [5.5, 15.5, 23.0]
    assert [log["rate"] for log in logs] == pytest.approx([1 / 10, 1 / 20, 1 / 25])
    assert all(log["throughput"] > 0 and "row" not in log for log in logs)


def test_events_come_in_order_and_the_compilation_is_one_of_its_own(run: Run, tmp_path: Path) -> None:
    plan = Plan.for_updates(6, log_every=3, validate_every=6, checkpoint_every=6)
    with Checkpoints(tmp_path / "steps") as checkpoints:
        program = walking(plan, loop="while")
        drive(program, plan, START, run, checkpoints, validate=lambda state: {"at": int(state["step"])})
    told = [(e["event"], e["update"]) for e in read_events(run.path)]
    assert told == [
        ("start", 0),
        ("compile", 0),
        ("first_update", 1),
        ("log", 3),
        ("log", 6),
        ("validation", 6),
        ("checkpoint", 6),
    ]
    compiled = events(run, "compile")[0]
    assert compiled["lower_seconds"] > 0 and compiled["compile_seconds"] > 0
    assert events(run, "validation")[0]["at"] == 6


def test_throughput_counts_calls_and_neither_compiling_nor_validating(run: Run) -> None:
    plan = Plan.for_updates(40, log_every=20, validate_every=20)

    def slow_validation(state: Any) -> dict[str, float]:
        time.sleep(0.3)
        return {}

    drive(walking(plan), plan, START, run, validate=slow_validation)
    for log in events(run, "log"):
        assert log["throughput"] > 20 * BATCH / 0.25


def test_a_program_that_is_compiled_while_a_piece_runs_is_not_in_the_throughput(run: Run) -> None:
    """37 updates are two pieces of 16 and one of 5, which is compiled when the second is on its way."""
    plan = Plan.for_updates(37, log_every=37)
    program = walking(plan, loop="scan")
    compile_quickly = program.compile

    def compile_slowly(state: Any, count: int) -> None:
        if program.missing(count):
            time.sleep(0.5)
        compile_quickly(state, count)

    program.compile = compile_slowly  # type: ignore[method-assign, assignment]
    drive(program, plan, START, run)
    assert [record["updates_per_call"] for record in events(run, "compile")] == [16, 5]
    assert events(run, "log")[0]["throughput"] > 37 * BATCH / 0.4


def test_a_piece_that_waits_behind_another_is_timed_from_when_the_device_was_free(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 updates are four pieces of 16, each a tenth of a second on a device of our own, by a clock of our own."""
    plan = Plan.for_updates(64, log_every=64)
    now = free = 0.0

    class Timed(Program):
        def __call__(self, *arguments: Any) -> Any:
            nonlocal free
            state, metrics = super().__call__(*arguments)
            ready = free = max(now, free) + 0.1

            def wait() -> None:
                nonlocal now
                now = max(now, ready)

            metrics.wait = wait  # type: ignore[method-assign]
            return state, metrics

    monkeypatch.setattr(driving, "time", SimpleNamespace(perf_counter=lambda: now))
    program = Timed(walk, Resident(toy.data(), BATCH, seed=3), 64, jax.random.key(1), loop="scan")
    drive(program, plan, START, run)
    assert [record["updates_per_call"] for record in events(run, "compile")] == [16]
    assert events(run, "log")[0]["throughput"] == pytest.approx(64 * BATCH / 0.4)


def test_the_throughput_after_a_resume_is_that_of_the_updates_of_this_process() -> None:
    window = LogWindow(saved={"sums": {"loss": 100.0}, "updates": 10})
    window.add({"loss": np.full(5, 4.0, np.float32)}, count=5, seconds=2.0)
    assert window.figures(batch_size=8) == {"loss": 120 / 15, "throughput": 8 * 5 / 2.0}


def test_what_a_slow_source_costs_is_part_of_the_throughput(run: Run) -> None:
    plan = Plan.for_updates(60, log_every=60)
    data = toy.data()

    def fetch(indices: np.ndarray) -> Any:
        time.sleep(0.01)
        return {name: array[indices] for name, array in data.items()}

    with Streamed(fetch, BATCH, samples=len(data["y"])) as feed:
        drive(walking(plan, feed), plan, START, run)
    # What was prepared while the program compiled comes for free: one piece of at most 30 updates.
    assert events(run, "log")[0]["throughput"] <= 2 * BATCH / 0.01


def test_pieces_change_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.for_updates(60, log_every=30)
    whole, pieces = walking(plan, loop="while"), []
    expected, done = copy_state(START), 0
    for count in (30, 30):
        expected, _ = whole(expected, done, count)
        done += count

    class Odd:
        def __init__(self, *_: Any):
            self.sizes = [1, 2, 7, 3, 11]

        def next(self, remaining: int) -> int:
            return min(self.sizes[0], remaining)

        def learn(self, count: int, seconds: float) -> None:
            self.sizes.append(self.sizes.pop(0))
            pieces.append(count)

    monkeypatch.setattr(driving, "Pieces", Odd)
    seen: dict[int, np.ndarray] = {}
    state = drive(
        walking(plan, loop="while"),
        plan,
        START,
        run,
        on_call=lambda first, metrics: seen.update({first: metrics["loss"]}),
    )
    same_tree(state, expected, "pieces")
    assert len(pieces) > 8 and sum(pieces) == 60
    np.testing.assert_array_equal(np.concatenate([seen[first] for first in sorted(seen)]), np.arange(1, 61))


def test_scanned_and_streamed_runs_end_in_the_same_state(run: Run) -> None:
    plan = Plan.for_updates(40, log_every=20)
    expected = drive(walking(plan), plan, START, run)
    same_tree(drive(walking(plan, loop="scan"), plan, START, run), expected, "scanned")
    with Streamed(toy.data(), BATCH, seed=3) as feed:
        same_tree(drive(walking(plan, feed), plan, START, run), expected, "streamed")
    assert [log["loss"] for log in events(run, "log")] == [10.5, 30.5] * 3


@pytest.mark.parametrize("log_every", [150, 650])
def test_an_accelerators_run_of_equal_calls_compiles_once(run: Run, log_every: int) -> None:
    plan = Plan.for_updates(2 * log_every, log_every=log_every)
    program = walking(plan, loop="blocks")
    drive(program, plan, START, run)
    assert [record["updates_per_call"] for record in events(run, "compile")] == [log_every]
    assert len(program.executables) == 1
    assert [log["loss"] for log in events(run, "log")] == [(log_every + 1) / 2, (3 * log_every + 1) / 2]


def test_what_calls_leave_over_is_compiled_while_blocks_run(run: Run) -> None:
    """Calls of 100 in blocks of 16: the rest of 4 comes after six blocks, by a program that a thread has compiled."""
    plan = Plan.for_updates(300, log_every=100)
    program = walking(plan, loop="blocks")
    program.form = Form(16, 16)
    seen: dict[int, int] = {}
    state = drive(
        program, plan, START, run, on_call=lambda first, metrics: seen.update({first: len(metrics["loss"])})
    )
    compiled = events(run, "compile")
    assert [(record["updates_per_call"], record.get("ahead")) for record in compiled] == [
        (16, None),
        (15, True),
    ]
    assert [record["update"] for record in compiled] == [0, 96]
    assert {96: 4, 196: 4, 296: 4}.items() <= seen.items() and sum(seen.values()) == 300
    assert [log["loss"] for log in events(run, "log")] == [50.5, 150.5, 250.5]
    (first,) = events(run, "first_update")
    assert (first["update"], first["updates"]) == (16, 16)
    with Run(run.path.parent / "other", {}, command="test", environment={}) as other:
        same_tree(state, drive(walking(plan, loop="while"), plan, START, other), "blocks")


@pytest.mark.parametrize("loop", ["while", "blocks"])
def test_throughput_leaves_out_what_the_first_record_takes(run: Run, loop: str, monkeypatch) -> None:
    """Libraries that keep records are imported there, while the next piece runs."""
    keep = run.event

    def slow_event(kind: str, **figures: Any) -> None:
        keep(kind, **figures)
        if kind == "first_update":
            time.sleep(0.5)

    monkeypatch.setattr(run, "event", slow_event)
    plan = Plan.for_updates(40, log_every=20)
    drive(walking(plan, loop=loop), plan, START, run)
    first, second = events(run, "log")
    assert min(first["throughput"], second["throughput"]) > 20 * BATCH / 0.25


def test_the_first_update_is_on_record_with_what_came_before_it(run: Run) -> None:
    plan = Plan.for_updates(6, log_every=3)
    startup.end_part("weights")
    program = walking(plan, loop="while")
    drive(program, plan, START, run)
    (first,), (compiled,) = events(run, "first_update"), events(run, "compile")
    assert (first["update"], first["updates"]) == (1, 1)
    assert first["parts"]["weights"] > 0 and first["call_seconds"] > 0
    spent = {name: compiled[name] for name in ("lower_seconds", "compile_seconds")}
    assert spent.items() <= first.items()
    assert first["seconds"] > sum(spent.values()) + first["call_seconds"] + first["parts"]["weights"]
    drive(program, plan, START, run)  # nothing is compiled for a second run of the same program
    assert len(events(run, "first_update")) == 1


@pytest.mark.parametrize("loop", ["while", "blocks", "scan"])
@pytest.mark.parametrize("log_every", [3, 40, 150])
def test_what_a_thread_compiles_before_there_is_a_state_is_what_the_first_piece_needs(
    run: Run, loop: str, log_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, compile_lowered = [], looping._compile_lowered

    def compile_counted(given: Any) -> Any:
        compiled.append(given)

        def compile_slowly(**options: Any) -> Any:
            time.sleep(0.4)
            return given.call.compile(**options)

        return compile_lowered(given._replace(call=SimpleNamespace(compile=compile_slowly)))

    monkeypatch.setattr(looping, "_compile_lowered", compile_counted)
    plan = Plan.for_updates(2 * log_every, log_every=log_every)
    program = walking(plan, loop=loop)
    compile_first_piece(program, plan, jax.eval_shape(lambda: copy_state(START)), 0)
    startup.leave_out()
    time.sleep(0.3)  # as if weights were drawn
    startup.end_part("weights")
    state = drive(program, plan, START, run)
    (first,), records = events(run, "first_update"), events(run, "compile")
    assert len(compiled) == len(records) == len(program.executables)
    assert records[0]["ahead"] and records[0]["compile_seconds"] >= 0.4
    # What kept the first update waiting, so that it adds up with what was done meanwhile.
    assert first["compile_seconds"] < records[0]["compile_seconds"] - 0.25
    assert first["lower_seconds"] == records[0]["lower_seconds"] > 0
    parts = sum(first["parts"].values()) + first["lower_seconds"] + first["compile_seconds"]
    assert parts + first["call_seconds"] < first["seconds"] + 1e-3
    with Run(run.path.parent / "other", {}, command="test", environment={}) as other:
        same_tree(state, drive(walking(plan, loop="while"), plan, START, other), "compiled ahead")


def test_what_is_wrong_with_an_update_is_said_where_it_is_traced_ahead() -> None:
    plan = Plan.for_updates(4)
    program = Program(lambda *_: (1, 2, 3), Resident(toy.data(), BATCH), 4, jax.random.key(0), loop="blocks")
    with pytest.raises(ValueError, match="too many values"):
        compile_first_piece(program, plan, START, 0)


def test_nothing_is_compiled_ahead_where_no_update_is_left() -> None:
    plan = Plan.for_updates(4)
    program = walking(plan)
    compile_first_piece(program, plan, START, 4)
    assert not program.executables and program.form is None


def test_progress_moves_by_every_update(run: Run) -> None:
    class Bar:
        moved = 0.0

        def advance(self, n: float) -> None:
            self.moved += n

    plan, bar = Plan.for_updates(25, log_every=10), Bar()
    drive(walking(plan), plan, START, run, progress=bar)
    assert bar.moved == 25


def test_what_on_log_adds_is_recorded(run: Run) -> None:
    plan = Plan.for_updates(4, log_every=2)
    drive(walking(plan), plan, START, run, on_log=lambda event, figures: {"twice": 2 * figures["loss"]})
    assert [log["twice"] for log in events(run, "log")] == [3.0, 7.0]


def test_the_callers_state_survives(run: Run) -> None:
    plan = Plan.for_updates(2)
    mine = {"w": jnp.zeros(3), "step": jnp.int32(0)}
    drive(walking(plan), plan, mine, run)
    np.testing.assert_array_equal(mine["w"], np.zeros(3))


def test_validation_figures_choose_the_best_checkpoint(run: Run, tmp_path: Path) -> None:
    plan = Plan.for_updates(9, validate_every=3, checkpoint_every=3)
    score = {3: 0.2, 6: 0.9, 9: 0.5}
    with Checkpoints(tmp_path / "steps", KeepBest("accuracy", mode="max")) as checkpoints:
        drive(
            walking(plan),
            plan,
            START,
            run,
            checkpoints,
            validate=lambda state: {"accuracy": score[int(state["step"])]},
        )
        assert checkpoints.best() == 6


def spoiled(at: int) -> Any:
    def update(state: Any, batch: Any, key: jax.Array) -> Any:
        new, metrics = walk(state, batch, key)
        loss = jnp.where(new["step"] == at, jnp.nan, metrics["loss"])
        return new, {"loss": loss}

    return update


def test_a_loss_that_is_no_number_stops_the_run_with_advice(run: Run, tmp_path: Path) -> None:
    plan = Plan.for_updates(20, log_every=5, checkpoint_every=5)
    program = Program(spoiled(13), Resident(toy.data(), BATCH), 5, jax.random.key(0))
    with Checkpoints(tmp_path / "steps") as checkpoints:
        with pytest.raises(
            Diverged, match=r"loss is nan at update 13: lower the learning rate .* step 10$"
        ) as caught:
            drive(program, plan, START, run, checkpoints, guard="loss")
        assert checkpoints.steps() == [5, 10]
    assert "\n" not in str(caught.value)


def test_a_state_that_is_not_finite_is_not_saved(run: Run, tmp_path: Path) -> None:
    def update(state: Any, batch: Any, key: jax.Array) -> Any:
        new, metrics = walk(state, batch, key)
        return {**new, "w": jnp.where(new["step"] == 10, jnp.inf, new["w"])}, metrics

    plan = Plan.for_updates(20, checkpoint_every=5)
    program = Program(update, Resident(toy.data(), BATCH), 5, jax.random.key(0))
    with Checkpoints(tmp_path / "steps") as checkpoints:
        with pytest.raises(Diverged, match="the state is not finite after update 10"):
            drive(program, plan, START, run, checkpoints, guard="loss")
        assert checkpoints.steps() == [5]


def test_without_a_guard_a_bad_loss_is_recorded_and_the_run_goes_on(run: Run) -> None:
    plan = Plan.for_updates(10, log_every=5)
    program = Program(spoiled(3), Resident(toy.data(), BATCH), 5, jax.random.key(0))
    drive(program, plan, START, run)
    logs = events(run, "log")
    assert logs[0]["loss"] is None and logs[0]["nonfinite"] == {"loss": "nan"}
    assert logs[1]["loss"] == 8.0


def test_a_report_holds_the_program_and_a_profile_of_one_piece(run: Run, tmp_path: Path) -> None:
    plan = Plan.for_updates(6, log_every=3)
    drive(walking(plan), plan, START, run, report=tmp_path / "report")
    folder = tmp_path / "report" / "training"
    assert json.loads((folder / "summary.json").read_text())["compile_seconds"] > 0
    assert (folder / "program.hlo.txt").stat().st_size > 0
    assert list((folder / "trace").rglob("*.json.gz"))
    assert len(events(run, "profile")) == 1
    assert [log["loss"] for log in events(run, "log")] == [2.0, 5.0]


def test_a_resumed_plan_that_is_complete_does_nothing(run: Run, tmp_path: Path) -> None:
    plan = Plan.for_updates(4)
    with Checkpoints(tmp_path / "steps") as checkpoints:
        state = drive(walking(plan), plan, START, run, checkpoints)
        again = drive(
            walking(plan), plan, START, run, checkpoints, resumed=checkpoints.restore(copy_state(START))
        )
    same_tree(again, state, "complete")
