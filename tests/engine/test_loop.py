"""Compiled calls: K changes nothing, nothing is traced twice, the state is used up, all metrics come back."""

import re
import sys
import time
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_family as toy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from family_protocol import check_family, same_tree
from hotloop.engine import loop as looping
from hotloop.engine.batch_sources import Streamed
from hotloop.engine.blocks import Form
from hotloop.engine.feed import Resident
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state, count_native_calls
from hotloop.errors import HotloopError
from hotloop.traced_platform import find_traced_platform

UPDATES = 75


def train(program: Program, state: Any, updates: int = UPDATES) -> tuple[Any, dict[str, np.ndarray]]:
    """All updates in calls of the program's length, the last one shorter where it does not divide."""
    state, done, parts = copy_state(state), 0, []
    while done < updates:
        count = min(program.updates_per_call, updates - done)
        state, metrics = program(state, done, count, min(count, updates - done - count))
        parts.append(metrics)
        done += count
    return state, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def program(
    per_call: int, config: toy.Config | None = None, feed: Any = None, loop: Any = None, seed: int = 5
) -> Program:
    config = config or toy.Config()
    feed = feed or Resident(toy.data(), 16, seed=3)
    return Program(toy.update(config), feed, per_call, jax.random.key(seed), loop=loop)


WALK_START = {"w": np.zeros(3, np.float32)}


def walk(state: Any, batch: Any, key: jax.Array) -> Any:
    """The cheapest update that depends on the batch, the key and the state."""
    w = state["w"] + batch["x"].mean() * jax.random.uniform(key, (3,))
    return {"w": w}, {"loss": w.sum()}


def walking(per_call: int, seed: int = 0, loop: Any = None) -> Program:
    return Program(walk, Resident(toy.data(), 4, seed=seed), per_call, seed_key(seed), loop=loop)


def state_of(config: toy.Config | None = None) -> Any:
    return toy.init(config or toy.Config(), jax.random.key(0))


@cache
def trained(per_call: int, dtype: str = "float32") -> Any:
    config = toy.Config(dtype=dtype)
    return train(program(per_call, config), state_of(config))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_result_is_the_same_for_any_number_of_updates_a_call(dtype: str) -> None:
    runs = [trained(per_call, dtype) for per_call in (1, 7, 100)]
    for state, metrics in runs[1:]:
        same_tree(state, runs[0][0], "state")
        same_tree(metrics, runs[0][1], "metrics")
    metrics = runs[0][1]
    np.testing.assert_array_equal(metrics["step"], np.arange(UPDATES))
    assert metrics["loss"][-10:].mean() < metrics["loss"][:10].mean()


def test_scanned_calls_and_streamed_data_give_the_same_bits_too() -> None:
    expected = trained(100)
    same_tree(train(program(25, loop="scan"), state_of()), expected, "scan")
    with Streamed(toy.data(), 16, seed=3) as feed:
        same_tree(train(program(25, feed=feed), state_of()), expected, "streamed")


def traced_calls(loop: Any, spans: tuple[tuple[int, int], ...], per_call: int = 10) -> tuple[int, list[bool]]:
    """How often the update was traced, and which calls found their program compiled."""
    traced, ready = [], []

    def counted(state: Any, batch: Any, key: jax.Array) -> Any:
        traced.append(1)
        return walk(state, batch, key)

    calls = Program(counted, Resident(toy.data(), 4), per_call, jax.random.key(0), loop=loop)
    state = copy_state(WALK_START)
    calls.fit(state)
    for first, count in spans:
        ready.append(not calls.missing(count))
        state, _ = calls(state, first, count)
    return len(traced), ready


def test_a_program_for_a_known_platform_is_traced_for_no_other_and_once(monkeypatch: Any) -> None:
    seen = []

    def noted(state: Any, batch: Any, key: jax.Array) -> Any:
        seen.append(find_traced_platform())
        return walk(state, batch, key)

    for target in (None, "cpu"):
        monkeypatch.setattr(looping, "find_target", lambda target=target: target)
        calls = Program(noted, Resident(toy.data(), 4), 10, jax.random.key(0), loop="blocks")
        calls.fit(WALK_START)
        calls(copy_state(WALK_START), 0, 10)
    assert seen == [None, "cpu"]


def test_one_compilation_serves_every_count_and_traces_the_update_once() -> None:
    spans = ((0, 10), (10, 1), (11, 10), (21, 3))
    assert traced_calls("while", spans) == (1, [False, True, True, True])


def test_scanning_compiles_the_counts_in_use_and_no_other() -> None:
    spans = ((0, 4), (4, 4), (8, 2), (10, 4))
    assert traced_calls("scan", spans) == (1, [False, True, False, True])


@pytest.mark.parametrize(
    ("per_call", "spans", "expected"),
    [
        (
            10,
            ((0, 10), (10, 1), (11, 10), (21, 3)),
            [False, False, True, True],
        ),  # a block, and any number below it
        (1000, ((0, 1000), (1000, 250), (1250, 13), (1263, 999)), [False, True, False, True]),
        (1, ((0, 1), (1, 1)), [False, True]),
    ],
)
def test_blocks_take_a_second_program_for_what_is_no_block_and_never_a_third(
    per_call: int, spans: Any, expected: list[bool]
) -> None:
    assert traced_calls("blocks", spans, per_call) == (1, expected)


@pytest.mark.parametrize(
    ("block", "capacity"),
    [
        (7, 14),
        *(pytest.param(*form, marks=pytest.mark.slow) for form in ((1, 75), (5, 75), (16, 64), (75, 75))),
    ],
)
def test_blocks_of_any_size_give_the_same_bits_and_every_update_of_the_metrics(
    block: int, capacity: int
) -> None:
    calls = program(75, loop="blocks")
    calls.form = Form(block, capacity)
    same_tree(train(calls, state_of()), trained(100), "one call")
    state, done, parts = copy_state(state_of()), 0, []
    for count in (1, 6, 16, 5, 40, 7):
        state, metrics = calls(state, done, count)
        parts.append(metrics["loss"])
        done += count
    same_tree((state, np.concatenate(parts)), (trained(100)[0], trained(100)[1]["loss"]), "several calls")


def test_a_program_that_a_thread_compiles_is_the_one_that_is_called() -> None:
    calls = program(75, loop="blocks")
    state = copy_state(state_of())
    calls.form = Form(16, 64)
    calls.compile(state, 64)
    before = calls.lower_seconds, calls.compile_seconds
    calls.compile_ahead(state, 75)
    calls.compile_ahead(state, 75)
    assert [*calls.executables] == [Form(16, 64)] and calls.is_ahead(75) and not calls.is_ahead(64)
    calls.compile(state, 75)
    assert [*calls.executables] == [Form(16, 64), Form(1, 15)] and not calls.missing(75)
    assert calls.lower_seconds > before[0] and calls.compile_seconds > before[1]
    same_tree(train(calls, state_of()), trained(100), "compiled by a thread")


@pytest.mark.parametrize("loop", ["while", "blocks", "scan"])
def test_what_is_compiled_from_forms_alone_is_the_same_program_for_any_state_of_those_forms(
    loop: Any,
) -> None:
    def draw(key: jax.Array) -> Any:
        # One leaf of a weak type, which decides what it becomes beside others.
        return {
            "w": jax.random.uniform(key, (3,), jnp.bfloat16),
            "rate": jnp.asarray(0.5),
            "key": jax.random.fold_in(key, 1),
        }

    def update(state: Any, batch: Any, key: jax.Array) -> Any:
        w = (state["w"] * state["rate"] + batch["x"].mean().astype(jnp.bfloat16)).astype(jnp.bfloat16)
        return {**state, "w": w}, {"loss": (w * state["rate"]).sum()}

    key = jax.random.key(2)
    texts, results = [], []
    for given in (jax.eval_shape(draw, key), copy_state(draw(key))):
        calls = Program(update, Resident(toy.data(), 4), 6, jax.random.key(0), loop=loop)
        texts.append(calls.lower(given).as_text())
        calls.compile_ahead(given, 6)
        assert calls.is_ahead(6)
        tied = jax.device_put(draw(key), jax.devices()[0])
        for state in (copy_state(draw(key)), tied):
            state, metrics = calls(state, 0, 6)
            results.append((state["w"], metrics["loss"]))
        assert len(calls.executables) == 1 and tied["w"].is_deleted()
    assert texts[0] == texts[1]
    for result in results[1:]:
        same_tree(result, results[0], "compiled from forms")


def test_a_program_that_a_thread_cannot_compile_says_so_where_it_is_needed(monkeypatch: Any) -> None:
    calls = walking(1, loop="blocks")
    state = copy_state(WALK_START)
    calls.fit(state)
    monkeypatch.setattr(looping, "_compile_lowered", lambda given: 1 / 0)
    calls.compile_ahead(state, 1)
    with pytest.raises(ZeroDivisionError):
        calls(state, 0, 1)


@pytest.mark.parametrize("loop", ["while", "blocks"])
def test_a_call_uses_up_the_state_it_is_given(loop: Any) -> None:
    given = copy_state(WALK_START)
    calls = walking(200, loop=loop)
    calls.form = Form(4, 200) if loop == "blocks" else None
    calls(given, 0, 10)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_an_owned_state_shares_nothing_and_keeps_the_original() -> None:
    ones = jnp.ones(3)
    given = {"params": ones, "average": ones, "step": 0, "key": jax.random.key(1), "host": np.arange(2)}
    feed = Resident(toy.data(), 4)

    def touch(state: Any, batch: Any, key: jax.Array) -> Any:
        return {**state, "params": state["params"] * 2}, {"loss": jnp.float32(0)}

    after, _ = Program(touch, feed, 3, jax.random.key(0))(copy_state(given), 0, 3)
    np.testing.assert_array_equal(after["params"], 8 * np.ones(3))
    np.testing.assert_array_equal(after["average"], np.ones(3))
    np.testing.assert_array_equal(ones, np.ones(3))
    assert after["step"].dtype == jnp.int32 and not after["step"].weak_type


def test_a_call_returns_device_metrics_that_become_numpy_when_asked_for() -> None:
    _, metrics = walking(5)(copy_state(WALK_START), 0, 3)
    assert set(metrics) == {"loss"} and len(metrics) == 1
    metrics.wait()
    assert isinstance(metrics["loss"], np.ndarray) and metrics["loss"].shape == (3,)


def test_array_metrics_are_stacked_as_well() -> None:
    def update(state: Any, batch: Any, key: jax.Array) -> Any:
        return state + 1, {"loss": state, "histogram": jnp.arange(3) + state}

    for loop in ("while", "blocks", "scan"):
        calls = Program(update, Resident(toy.data(), 4), 4, jax.random.key(0), loop=loop)  # type: ignore[arg-type]
        _, metrics = calls(jnp.int32(5), 0, 4)
        assert metrics["histogram"].shape == (4, 3)
        np.testing.assert_array_equal(metrics["histogram"][:, 0], [5, 6, 7, 8])


def test_compiling_ahead_of_time_is_timed_apart_and_reports_cost_and_memory() -> None:
    calls = walking(4)
    assert calls.lower_seconds == calls.compile_seconds == 0.0
    calls.compile(WALK_START)
    assert calls.lower_seconds > 0 and calls.compile_seconds > 0
    assert calls.compiled.cost_analysis() and calls.compiled.memory_analysis() is not None
    before = calls.compile_seconds
    calls(copy_state(WALK_START), 0, 4)
    assert calls.compile_seconds == before


def test_the_tracing_that_a_blocks_length_is_chosen_by_counts_as_lowering() -> None:
    def slow(state: Any, batch: Any, key: jax.Array) -> Any:
        time.sleep(0.3)  # while it is traced, which is once
        return walk(state, batch, key)

    calls = Program(slow, Resident(toy.data(), 4), 4, jax.random.key(0), loop="blocks")
    calls.fit(WALK_START)
    assert calls.lower_seconds == 0.0
    calls.compile(WALK_START)
    assert calls.lower_seconds >= 0.3


def test_another_seed_is_the_same_program_and_gives_other_numbers() -> None:
    texts, losses = [], []
    for seed in (1, 2**40):
        calls = walking(3, seed)
        _, metrics = calls(copy_state(WALK_START), 0, 3)
        instructions = [line for line in calls.compiled.as_text().splitlines() if " = " in line]
        texts.append(
            [re.sub(r"metadata=\{[^}]*\}", "", line) for line in instructions]
        )  # source places may vary
        losses.append(metrics["loss"])
    assert len(texts[0]) > 20 and texts[0] == texts[1]
    assert np.all(losses[0] != losses[1])


def test_a_count_that_does_not_fit_is_refused() -> None:
    calls = walking(5)
    for count in (0, 6):
        with pytest.raises(ValueError, match="1 to 5"):
            calls(WALK_START, 0, count)


def test_a_call_is_no_longer_than_its_feeds_buffer() -> None:
    with Streamed(toy.data(), 16, buffer_bytes=16 * 16 * 3) as feed:  # 12 uint8 and one int32 a sample
        assert Program(walk, feed, 100, jax.random.key(0)).updates_per_call == 3


def wrong_tree(state: Any, batch: Any, key: jax.Array) -> Any:
    return {"w": state["w"], "extra": state["w"]}, {"loss": jnp.float32(0)}


def wrong_type(state: Any, batch: Any, key: jax.Array) -> Any:
    return {"w": state["w"].astype(jnp.bfloat16)}, {"loss": jnp.float32(0)}


def wrong_metrics(state: Any, batch: Any, key: jax.Array) -> Any:
    return state, jnp.float32(0)


def nested_metrics(state: Any, batch: Any, key: jax.Array) -> Any:
    return state, {"train": {"loss": jnp.float32(0)}}


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (wrong_tree, "it differs in extra"),
        (wrong_type, r"w was float32\[2\], became bfloat16\[2\]"),
        (wrong_metrics, "metrics a flat dict"),
        (nested_metrics, "metrics a flat dict"),
    ],
)
@pytest.mark.parametrize("loop", ["while", "blocks", "scan"])
def test_an_update_that_returns_the_wrong_thing_is_told_in_one_line(
    update: Any, message: str, loop: Any
) -> None:
    calls = Program(update, Resident(toy.data(), 4), 2, jax.random.key(0), loop=loop)
    with pytest.raises(HotloopError, match=message) as caught:
        calls({"w": jnp.ones(2)}, 0, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_replicas_share_the_batch_and_reach_the_same_weights() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("replica",))
    feed = Resident(toy.data(), 16, seed=3, sharding=NamedSharding(mesh, PartitionSpec("replica")))
    spread = jax.device_put(copy_state(state_of()), NamedSharding(mesh, PartitionSpec()))
    calls = program(10, feed=feed)
    state, metrics = train(calls, spread)
    assert "all-reduce" in calls.compiled.as_text()
    assert all(leaf.sharding.num_devices == 4 for leaf in jax.tree.leaves(state))
    alone, expected = trained(100)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-5)
    for name in ("first", "second"):
        np.testing.assert_allclose(state["params"][name], alone["params"][name], atol=1e-5)


def test_the_toy_family_keeps_the_protocol() -> None:
    check_family(toy.init, toy.update, toy.evaluate, toy.Config(), toy.data(37), 8)


def test_the_protocol_catches_an_evaluation_that_depends_on_the_batch() -> None:
    def centred(config: str) -> Any:
        return lambda state, batch: {
            "centred": batch["x"][:, 0] - batch["x"][:, 0].astype(jnp.float32).mean()
        }

    with pytest.raises(AssertionError, match="centred"):
        check_family(lambda *_: WALK_START, lambda _: walk, centred, "config", toy.data(37), 8)


def test_calls_of_native_kernels_are_counted_by_name(monkeypatch):
    class Lowered:
        def as_text(self):
            call = "%1 = stablehlo.custom_call @{}(%0)\n"
            return "".join(map(call.format, ["hotloop_a", "hotloop_b", "hotloop_a", "Sharding"]))

    monkeypatch.delitem(sys.modules, "hotloop_native", raising=False)
    assert count_native_calls(Lowered()) == {}
    monkeypatch.setitem(sys.modules, "hotloop_native", object())
    assert count_native_calls(Lowered()) == {"hotloop_a": 2, "hotloop_b": 1}


def test_a_copy_of_a_state_is_one_program_and_shares_nothing():
    shared = jnp.arange(5.0)
    state = {"a": shared, "b": [shared, jnp.ones((2, 3))], "key": jax.random.key(3)}
    before = looping._copy_together._cache_size()
    copied = copy_state(state)
    assert looping._copy_together._cache_size() == before + 1
    same_tree(copied, state, "copy")
    arrays = [*jax.tree.leaves({**state, "key": 0})[:-1], *jax.tree.leaves({**copied, "key": 0})[:-1]]
    assert (
        len({array.unsafe_buffer_pointer() for array in arrays}) == 5
    )  # `shared` is there twice before the copy
