"""A wrong kernel is refused, and the references are what the formulas say."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.optim_keys import OPTIMISERS
from hotloop.errors import WrongResult
from hotloop.families.kernels import bench, model, reference
from hotloop.families.kernels import config as configs
from hotloop.families.kernels.catalogue import BUILDERS, build
from hotloop.families.kernels.model import Job

DENSE = configs.Dense(batch_size=4, size=16, batches_per_step=2)
RNN = configs.Rnn(batch_size=4, timesteps=3, hidden_size=16, batches_per_step=2)


def checked(config, dtype="float32"):
    ready = bench.prepare(Job(config, dtype))
    if config.train:
        return bench.check_training(ready.job, ready.state, ready.feed)
    ready.step()
    return bench.check_inference(ready.job, ready.state, ready.feed)


@pytest.fixture
def wrong_dense(monkeypatch):
    """Puts another `apply` in the place of the dense layer's, which it is handed."""

    def put(wrong):
        right = BUILDERS[configs.Dense]

        def build_wrong(config):
            kernel = right(config)
            return replace(kernel, apply=partial(wrong, kernel.apply))

        monkeypatch.setitem(BUILDERS, configs.Dense, build_wrong)

    return put


def test_a_layer_that_is_slightly_wrong_is_refused(wrong_dense):
    wrong_dense(lambda apply, params, x: apply(params, x) * 1.0001)
    with pytest.raises(
        WrongResult, match=r"Dense layer: wrong result, not timed: .* output .* limit is 1e-05"
    ):
        checked(DENSE)


def test_a_layer_that_gives_nan_is_refused(wrong_dense):
    wrong_dense(lambda apply, params, x: apply(params, x).at[-1, -1].set(jnp.nan))
    with pytest.raises(WrongResult):
        checked(DENSE)


def test_a_layer_that_stops_a_gradient_is_refused(wrong_dense):
    def deaf(apply, params, x):
        return apply(params | {"bias": jax.lax.stop_gradient(params["bias"])}, x)

    wrong_dense(deaf)
    with pytest.raises(WrongResult, match="gradient"):
        checked(replace(DENSE, train=True))


def test_a_learning_rate_that_is_not_the_one_asked_for_is_refused(monkeypatch):
    other = Job(replace(DENSE, train=True, learning_rate=0.01), "float32")
    monkeypatch.setattr(model, "update", lambda job, update=model.update: update(other))
    with pytest.raises(WrongResult, match="parameters"):
        checked(replace(DENSE, train=True, learning_rate=0.011))


OTHERS = [name for name in OPTIMISERS if name != "sgd"]


@pytest.mark.parametrize("optimizer", OTHERS)
@pytest.mark.slow
def test_a_step_of_every_optimiser_is_held_against_float64_and_one_at_another_rate_refused(
    optimizer, monkeypatch
):
    asked = replace(DENSE, train=True, optimizer=optimizer, learning_rate=0.011)
    found = checked(asked)
    assert found.errors["parameters"] <= found.bounds["parameters"] < 2e-4
    other = Job(replace(asked, learning_rate=0.01), "float32")
    monkeypatch.setattr(model, "update", lambda job, update=model.update: update(other))
    with pytest.raises(WrongResult, match="parameters"):
        checked(asked)


def test_the_optimisers_are_those_of_the_engine():
    assert {"sgd", *OTHERS} == {*OPTIMISERS}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_within_their_bounds_and_outside_those_of_float32(dtype):
    found = checked(DENSE, dtype)
    limits = {name: bounds["output"] for name, bounds in bench.BOUNDS.items()}
    assert limits["float32"] < found.errors["output"] < limits[dtype]


def test_the_output_is_compared_on_the_rows_that_the_budget_allows(monkeypatch):
    flops = build(RNN).cost(1).flops
    monkeypatch.setattr(bench, "REFERENCE_FLOPS", flops / 2)
    found = checked(RNN)
    assert (found.rows, found.of_rows) == (2, 4)


def test_an_update_is_compared_at_full_shape_on_repeated_rows(monkeypatch):
    config = replace(DENSE, train=True)
    monkeypatch.setattr(bench, "REFERENCE_FLOPS", build(config).cost(1).flops / 2)
    found = checked(config)
    assert (found.rows, found.of_rows) == (2, 4)
    assert found.errors["gradient"] < 1e-6


def test_relative_errors_are_of_norms():
    assert bench.relative_error([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.5 / math.hypot(3, 4.5))
    assert bench.relative_error([0.0], [0.0]) == 0
    assert math.isnan(bench.relative_error([math.nan], [1.0]))
    assert bench.worst_leaf({"a": [1.0], "b": [0.02]}, {"a": [1.0], "b": [0.01]}) == pytest.approx(
        0.1, rel=1e-3
    )


def test_float64_is_float64_and_only_there():
    found = reference.in_float64(lambda x: x + 2.0**-40, np.float16(1))
    assert found.dtype == np.float64 and found != 1
    assert jnp.ones(1).dtype == jnp.float32


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_reference_cells_on_one_unit_by_hand():
    x = np.array([0.5, -1.0])[:, None, None]

    def params(gates):
        ramp = np.arange(1, gates + 1)
        second = {"recurrent_bias": 0.05 * ramp}  # which only one of them reads
        return {"input": 0.3 * ramp[None], "recurrent": -0.2 * ramp[None], "bias": 0.1 * ramp, **second}

    def sums(x, h, gate):
        return (gate + 1) * (0.3 * x - 0.2 * h + 0.1)

    h_rnn = h_gru = h_after = h_lstm = c = 0.0
    expected = {"rnn": [], "gru": [], "gru_reset_after": [], "lstm": []}
    for value in x[:, 0, 0]:
        h_rnn = math.tanh(sums(value, h_rnn, 0))
        reset, update = sigmoid(sums(value, h_gru, 0)), sigmoid(sums(value, h_gru, 1))
        h_gru = update * h_gru + (1 - update) * math.tanh(3 * (0.3 * value - 0.2 * reset * h_gru + 0.1))
        reset, update = (sigmoid(sums(value, h_after, gate) + 0.05 * (gate + 1)) for gate in range(2))
        candidate = math.tanh(3 * (0.3 * value + 0.1) + reset * 3 * (0.05 - 0.2 * h_after))
        h_after = update * h_after + (1 - update) * candidate
        i, f, g, o = (sums(value, h_lstm, gate) for gate in range(4))
        c = sigmoid(f + 1) * c + sigmoid(i) * math.tanh(g)
        h_lstm = sigmoid(o) * math.tanh(c)
        for states, h in zip(expected.values(), (h_rnn, h_gru, h_after, h_lstm), strict=True):
            states.append(h)
    for name, gates in (("rnn", 1), ("gru", 3), ("gru_reset_after", 3), ("lstm", 4)):
        found = reference.in_float64(getattr(reference, name), params(gates), x)
        np.testing.assert_allclose(found[:, 0, 0], expected[name], rtol=1e-14)


@pytest.mark.parametrize(("size", "stride", "kernel"), [(5, 1, 3), (7, 3, 3), (6, 2, 2), (2, 3, 3)])
def test_reference_convolution_by_its_definition(size, stride, kernel):
    generator = np.random.default_rng(0)
    x, w = generator.normal(size=(1, size, size, 4)), generator.normal(size=(kernel, kernel, 2, 6))
    found = reference.in_float64(lambda x, w: reference.grouped_conv(x, w, 2, stride), x, w)
    out = math.ceil(size / stride)
    assert found.shape == (1, out, out, 6)
    before = max((out - 1) * stride + kernel - size, 0) // 2
    for a, b, o in np.ndindex(out, out, 6):
        total = 0.0
        for i, j, c in np.ndindex(kernel, kernel, 2):
            row, column = a * stride + i - before, b * stride + j - before
            if 0 <= row < size and 0 <= column < size:
                total += x[0, row, column, (o // 3) * 2 + c] * w[i, j, c, o]
        assert found[0, a, b, o] == pytest.approx(total, abs=1e-12)


def test_reference_losses_by_hand():
    logits, labels = np.array([[[1.0, 2.0, 4.0]]]), np.array([[1]])
    total = math.exp(1) + math.exp(2) + math.exp(4)
    found = reference.in_float64(reference.cross_entropy, logits, labels)
    assert float(found) == pytest.approx(math.log(total) - 2)
    assert (
        float(reference.in_float64(reference.mean_square, np.array([1.0, 3.0]), np.array([0.0, 1.0]))) == 2.5
    )
