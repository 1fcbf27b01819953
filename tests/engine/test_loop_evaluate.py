"""Evaluation is exact: every sample once, whatever the batch size, and padding never counts."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from hotloop.engine import loop
from hotloop.engine.device import device_mesh
from hotloop.engine.loop import Evaluation, Prepared, evaluate_batches
from hotloop.engine.precision import SPLIT
from hotloop.errors import DataError, HotloopError

rng = np.random.default_rng(0)
DATA = {
    "x": rng.normal(size=(103, 5)).astype(np.float32),
    "label": rng.integers(0, 3, 103),
    "ratings": rng.integers(0, 100, 103).astype(np.uint8),
}
WEIGHTS = rng.normal(size=(5, 3)).astype(np.float32)


def evaluate(fn, state, data, batch_size):
    return Evaluation(fn, data, batch_size)(state)


def values(weights: Any, batch: Any) -> dict[str, jax.Array]:
    """Top-1, top-2, squared error, a count for each sample, and a one-hot row."""
    logits = jnp.matmul(batch["x"], weights, precision="highest")
    rank = (logits > jnp.take_along_axis(logits, batch["label"][:, None], 1)).sum(1)
    return {
        "top1": rank == 0,
        "top2": rank < 2,
        "squared_error": jnp.square(logits).sum(1),
        "ratings": batch["ratings"],
        "answers": jax.nn.one_hot(logits.argmax(1), 3, dtype=jnp.int32),
    }


def reference() -> dict[str, Any]:
    logits = DATA["x"].astype(np.float64) @ WEIGHTS.astype(np.float64)
    rank = (logits > np.take_along_axis(logits, DATA["label"][:, None], 1)).sum(1)
    return {
        "top1": int((rank == 0).sum()),
        "top2": int((rank < 2).sum()),
        "squared_error": float((logits**2).sum()),
        "ratings": int(DATA["ratings"].sum(dtype=np.int64)),
        "answers": np.bincount(logits.argmax(1), minlength=3),
        "samples": 103,
    }


def check(sums: dict[str, Any]) -> None:
    expected = reference()
    assert set(sums) == set(expected)
    for name in ("top1", "top2", "ratings", "samples"):
        assert sums[name] == expected[name] and type(sums[name]) is int, name
    np.testing.assert_array_equal(sums["answers"], expected["answers"])
    assert sums["squared_error"] == pytest.approx(expected["squared_error"], rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 10, 103, 1_000])
def test_any_batch_size_counts_every_sample_once(batch_size: int) -> None:
    check(evaluate(values, WEIGHTS, DATA, batch_size))


@pytest.mark.parametrize("sizes", [(103,), (50, 50, 3), (1, 50, 50, 2)])
def test_batches_from_the_host_may_have_any_length_up_to_the_one_announced(sizes: tuple[int, ...]) -> None:
    starts = np.cumsum((0, *sizes))
    batches = (
        {name: array[start : start + size] for name, array in DATA.items()}
        for start, size in zip(starts, sizes, strict=False)
    )
    check(evaluate_batches(values, WEIGHTS, batches, max(sizes)))


def halve(weights: Any) -> Any:
    """Known in a program by its cosine."""
    return jnp.cos(jnp.zeros_like(weights)) * weights / 2


def values_of_halves(halves: Any, batch: Any) -> dict[str, jax.Array]:
    return values(2 * halves, batch)


PREPARED = Prepared(halve, values_of_halves)


@pytest.mark.parametrize("batch_size", [10, 103])
def test_what_is_prepared_first_gives_the_same_sums(batch_size: int) -> None:
    check(evaluate(PREPARED, WEIGHTS, DATA, batch_size))
    check(Evaluation(PREPARED, DATA, batch_size, sharding=over(2))(WEIGHTS))
    check(evaluate_batches(PREPARED, WEIGHTS, [DATA], 103))
    check(Evaluation(PREPARED, DATA, batch_size).over(DATA)(WEIGHTS))


def test_it_is_prepared_once_for_all_batches_and_not_in_the_loop(monkeypatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(
        loop, "choose_options", lambda lowered, platform: texts.append(lowered.as_text()) or {}
    )
    for fn in (PREPARED, PREPARED.__call__):  # the second as any other function
        Evaluation(fn, DATA, 10)(WEIGHTS)
    outside, inside = (text.index("cosine") < text.index("stablehlo.while") for text in texts)
    assert outside and not inside
    assert [text.count("stablehlo.cosine") for text in texts] == [1, 1]


def test_each_call_prepares_the_state_that_it_is_given() -> None:
    evaluation = Evaluation(PREPARED, DATA, 10)
    evaluation(0 * WEIGHTS)
    check(evaluation(WEIGHTS))


def test_equal_parts_make_equal_wholes_that_are_compiled_once() -> None:
    traces: list[int] = []

    def counted(halves: Any, batch: Any) -> Any:
        traces.append(1)
        return values_of_halves(halves, batch)

    one, other = Prepared(halve, counted), Prepared(halve, counted)
    assert one == other != PREPARED
    assert hash(one) == hash(other)
    for fn in (one, other):
        check(evaluate_batches(fn, WEIGHTS, [DATA], 103))
    assert len(traces) == 1


def test_an_evaluation_compiles_once_for_state_after_state() -> None:
    traces: list[int] = []

    def counted(scale: jax.Array, batch: Any) -> dict[str, jax.Array]:
        traces.append(1)
        return {"total": batch["x"][:, 0] * scale}

    evaluation = Evaluation(counted, DATA, 20)
    evaluation.compile(jnp.float32(1))
    assert evaluation.lower_seconds > 0 and evaluation.compile_seconds > 0
    totals = [evaluation(jnp.float32(scale))["total"] for scale in (1, 2, 3)]
    assert len(traces) == 1
    assert totals[1] == pytest.approx(2 * totals[0]) and totals[2] == pytest.approx(3 * totals[0])
    assert evaluation.compiled.cost_analysis() is not None


def test_states_of_two_types_in_turn_have_a_program_each() -> None:
    traces: list[int] = []

    def counted(state: Any, batch: Any) -> dict[str, jax.Array]:
        traces.append(1)
        return {"total": batch["x"][:, 0] * state["scale"].astype(jnp.float32)}

    evaluation = Evaluation(counted, DATA, 20)
    found = [
        evaluation({"scale": jnp.asarray(0.7, dtype)})["total"] for dtype in (jnp.bfloat16, jnp.float32) * 2
    ]
    assert len(traces) == 2
    narrow = float(jnp.bfloat16(0.7))
    assert found[0] == found[2] == pytest.approx(found[1] * narrow / 0.7, rel=1e-6)
    assert found[1] == found[3] != found[0]


def test_what_padding_computes_is_left_out_even_if_it_is_not_a_number() -> None:
    def one_or_nan(_: Any, batch: Any) -> dict[str, jax.Array]:
        return {"ones": jnp.where(jnp.arange(len(batch["x"])) < 3, 1.0, jnp.nan)}

    short = {name: array[:3] for name, array in DATA.items()}
    assert evaluate_batches(one_or_nan, (), [short], 5) == {"ones": 3.0, "samples": 3}


def test_long_sums_keep_their_precision() -> None:
    tenths = {"x": np.full(100_000, 0.1, np.float32)}
    total = evaluate(lambda _, batch: {"x": batch["x"]}, (), tenths, 1)["x"]
    assert total == pytest.approx(100_000 * float(np.float32(0.1)), rel=1e-12)  # in float32 it is 9998.557


def test_half_precision_values_are_added_in_float32() -> None:
    halves = {"x": np.ones(4_096, np.float32)}
    assert evaluate(lambda _, b: {"x": b["x"].astype(jnp.bfloat16)}, (), halves, 4_096)["x"] == 4_096.0


def test_a_gather_of_ones_own_evaluates_ragged_rows() -> None:
    starts = jnp.array([0, 2, 2, 5])

    def lengths(data: Any, rows: jax.Array) -> jax.Array:
        return data[rows + 1] - data[rows]

    evaluation = Evaluation(lambda _, batch: {"items": batch}, starts, 2, samples=3, gather=lengths)
    assert evaluation(()) == {"items": 5, "samples": 3}


def over(devices: int) -> NamedSharding:
    if devices > jax.device_count():
        pytest.skip(f"{devices} devices")
    return NamedSharding(device_mesh(devices), SPLIT)


@pytest.mark.parametrize(("devices", "batch_size"), [(4, 8), (4, 6), (3, 1), (3, 1_000), (4, 103)])
def test_devices_share_the_evaluation_and_batches_are_filled_up_for_them(
    devices: int, batch_size: int
) -> None:
    check(Evaluation(values, DATA, batch_size, sharding=over(devices))(WEIGHTS))


@pytest.mark.parametrize(("devices", "sizes"), [(4, (50, 50, 3)), (3, (1, 50, 50, 2)), (4, (103,))])
def test_devices_share_batches_from_the_host(devices: int, sizes: tuple[int, ...]) -> None:
    ends = np.cumsum((0, *sizes))
    parts = [{name: array[a:b] for name, array in DATA.items()} for a, b in pairwise(ends)]
    none = {name: array[:0] for name, array in DATA.items()}
    check(evaluate_batches(values, WEIGHTS, [*parts, none], max(sizes), over(devices)))


@pytest.mark.parametrize("samples", [1, 3])
def test_fewer_samples_than_devices_are_counted_once(samples: int) -> None:
    few = {name: array[:samples] for name, array in DATA.items()}
    alone = Evaluation(values, few, samples)(WEIGHTS)
    for found in (
        Evaluation(values, few, samples, sharding=over(4))(WEIGHTS),
        evaluate_batches(values, WEIGHTS, [few], samples, over(4)),
    ):
        assert found["samples"] == samples and found["squared_error"] > 0
        assert found["squared_error"] == pytest.approx(alone["squared_error"], rel=1e-6)
        for name in ("top1", "top2", "ratings"):
            assert found[name] == alone[name]


def test_a_state_that_lies_on_one_device_is_brought_to_all() -> None:
    weights = jax.device_put(WEIGHTS, jax.devices()[0])
    check(Evaluation(values, DATA, 20, sharding=over(4))(weights))


def test_evaluations_that_cannot_work_say_why() -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        evaluate(values, WEIGHTS, {"x": np.zeros((0, 5))}, 1)
    with pytest.raises(DataError, match="batch size 0"):
        evaluate(values, WEIGHTS, DATA, 0)
    with pytest.raises(DataError, match="no batch to evaluate"):
        evaluate_batches(values, WEIGHTS, (), 5)
    with pytest.raises(DataError, match="a batch of 103 samples: at most 50 were announced"):
        evaluate_batches(values, WEIGHTS, [DATA], 50)
    with pytest.raises(HotloopError, match=r"gives loss of shape \(\): it needs one value for each of 10"):
        evaluate(lambda _, batch: {"loss": batch["x"].mean()}, (), DATA, 10)


@pytest.mark.parametrize("batch_size", [7, 200])
def test_of_what_is_united_any_sample_counts_once(batch_size):
    def rows(state: Any, batch: Any) -> dict[str, jax.Array]:
        return {"seen": jax.nn.one_hot(batch["ratings"], 100, dtype=bool), "sum": batch["ratings"]}

    found = Evaluation(rows, DATA, batch_size, united=("seen",))(None)
    expected = np.isin(np.arange(100), DATA["ratings"])
    assert 0 < expected.sum() < 100
    np.testing.assert_array_equal(found["seen"], expected)
    assert found["sum"] == DATA["ratings"].sum(dtype=int)
