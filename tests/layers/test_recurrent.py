"""Recurrent layers against numpy in float64; gradients against plain autodiff and finite differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hotloop.layers import recurrent
from hotloop.layers.recurrence import SHORT, unroll_for

CELLS = ["rnn", "gru", "lstm"]
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
INPUTS, H = 5, 4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def in_numpy(cell, params, x_TBI, state):
    """The formulas, one step and one gate after the other, in float64."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    outputs, h = [], np.asarray(state[0], np.float64)
    c = np.asarray(state[1], np.float64) if cell == "lstm" else None
    hidden = h.shape[1]

    def gate(number, x, h):
        columns = slice(number * hidden, (number + 1) * hidden)
        return x @ params["input"][:, columns] + h @ params["recurrent"][:, columns] + params["bias"][columns]

    for x in np.asarray(x_TBI, np.float64):
        if cell == "rnn":
            h = np.tanh(gate(0, x, h))
        elif cell == "gru":
            reset, update = sigmoid(gate(0, x, h)), sigmoid(gate(1, x, h))
            h = update * h + (1 - update) * np.tanh(gate(2, x, reset * h))
        else:
            c = sigmoid(gate(1, x, h) + 1) * c + sigmoid(gate(0, x, h)) * np.tanh(gate(2, x, h))
            h = sigmoid(gate(3, x, h)) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs), (h,) if c is None else (h, c)


def case(cell, timesteps, batch, dtype=np.float64, inputs=INPUTS, hidden=H):
    rng = np.random.default_rng(timesteps)
    gates = GATES[cell] * hidden
    shapes = {"input": (inputs, gates), "recurrent": (hidden, gates), "bias": (gates,)}
    params = {name: jnp.asarray(rng.standard_normal(s) * 0.5, dtype) for name, s in shapes.items()}
    x = jnp.asarray(rng.standard_normal((timesteps, batch, inputs)), dtype)
    state = [
        jnp.asarray(rng.standard_normal((batch, hidden)) * 0.5, dtype)
        for _ in range(2 if cell == "lstm" else 1)
    ]
    return params, x, tuple(state) if cell == "lstm" else state[0]


def states(state):
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize(
    ("way", "timesteps", "batch"), [("", 1, 1), ("", 5, 2), ("", SHORT + 3, 3), ("_stepwise", 5, 2)]
)
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_and_last_state_equal_numpy(cell, way, timesteps, batch):
    layer = jax.jit(getattr(recurrent, cell + way))
    with jax.enable_x64(True):
        params, x, state = case(cell, timesteps, batch)
        for given in (state, None):
            start = states(state) if given is not None else [np.zeros((batch, H))] * len(states(state))
            outputs, last = layer(params, x, given)
            expected, expected_last = in_numpy(cell, params, x, start)
            np.testing.assert_allclose(outputs, expected, rtol=1e-12, atol=1e-13)
            for ours, theirs in zip(states(last), expected_last, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


def weighted(layer, params, x, state):
    """A loss in which every output and every part of the last state counts differently."""
    outputs, last = layer(params, x, state)
    weights = jnp.cos(jnp.arange(outputs.size)).reshape(outputs.shape)
    return (weights * outputs**2).sum() + sum(
        (jnp.sin(part) * (3 + n)).sum() for n, part in enumerate(states(last))
    )


@pytest.mark.parametrize(
    ("timesteps", "batch", "from_zero"),
    [(5, 1, True), pytest.param(1, 2, False, marks=pytest.mark.slow), (SHORT + 3, 3, False)],
)
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_equal_those_of_the_plain_loop(cell, timesteps, batch, from_zero):
    with jax.enable_x64(True):
        params, x, state = case(cell, timesteps, batch)
        state = None if from_zero else state
        gradients = [
            jax.jit(jax.grad(partial(weighted, getattr(recurrent, cell + way)), (0, 1, 2)))(params, x, state)
            for way in ("", "_stepwise")
        ]
        assert jax.tree.structure(gradients[0]) == jax.tree.structure(gradients[1])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), *gradients)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_equal_finite_differences(cell):
    with jax.enable_x64(True):
        params, x, state = case(cell, 3, 2)
        layer = getattr(recurrent, cell)
        check_grads(
            jax.jit(partial(weighted, layer)),
            (params, x, state),
            order=1,
            modes=["rev"],
            rtol=1e-6,
            atol=1e-6,
        )


def test_a_loss_of_the_last_state_alone_has_the_same_gradient():
    with jax.enable_x64(True):
        params, x, _ = case("lstm", SHORT + 2, 2)
        last = jax.jit(jax.grad(lambda p: (recurrent.lstm(p, x)[1][0] ** 2).sum()))(params)
        outputs = jax.jit(jax.grad(lambda p: (recurrent.lstm(p, x)[0][-1] ** 2).sum()))(params)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), last, outputs)


def test_a_stack_is_its_layers_one_after_the_other():
    with jax.enable_x64(True):
        first, x, _ = case("lstm", SHORT + 1, 2)
        second = case("lstm", 7, 2, inputs=H)[0]

        def one_by_one(stack):
            return recurrent.lstm_stepwise(stack[1], recurrent.lstm_stepwise(stack[0], x)[0])[1][0]

        stack = [first, second]
        np.testing.assert_allclose(
            jax.jit(recurrent.lstm_stack)(stack, x), jax.jit(one_by_one)(stack), rtol=1e-12
        )
        ours = jax.jit(jax.grad(lambda s: (recurrent.lstm_stack(s, x) ** 2).sum()))(stack)
        theirs = jax.jit(jax.grad(lambda s: (one_by_one(s) ** 2).sum()))(stack)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13), ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_training_inside_a_scan_equals_training_outside(cell):
    params, x, _ = case(cell, 5, 1, np.float32)

    def update(params, _):
        gradient = jax.grad(lambda p: (getattr(recurrent, cell)(p, x)[0] ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), None

    inside = jax.lax.scan(update, params, length=3)[0]
    outside = params
    for _ in range(3):
        outside = jax.jit(update)(outside, None)[0]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), inside, outside)


@pytest.mark.parametrize(
    ("way", "dtype", "unit"),
    [
        ("", jnp.bfloat16, 2**-8),
        pytest.param("", jnp.float16, 2**-11, marks=pytest.mark.slow),
        pytest.param("_stepwise", jnp.bfloat16, 2**-8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("cell", CELLS)
def test_sixteen_bits_stay_within_a_few_roundings_over_fifty_steps(cell, way, dtype, unit):
    """Only z and h are rounded, half a unit each a step, and the gates forget: errors do not add up for ever."""
    params, x, _ = case(cell, 50, 4, dtype, inputs=16, hidden=16)
    params["recurrent"] = params["recurrent"] * jnp.asarray(0.25, dtype)
    outputs, last = jax.jit(getattr(recurrent, cell + way))(params, x)
    assert outputs.dtype == dtype and all(part.dtype == dtype for part in states(last))
    exact, _ = in_numpy(cell, params, x, [np.zeros((4, 16))] * 2)
    assert np.abs(np.asarray(outputs, np.float64) - exact).max() < 8 * unit


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_sixteen_bit_gradients_point_the_same_way(cell):
    params, x, _ = case(cell, 20, 4, jnp.bfloat16, inputs=16, hidden=16)
    gradient = jax.jit(
        jax.grad(lambda p, x: (getattr(recurrent, cell)(p, x)[0].astype(jnp.float32) ** 2).sum())
    )
    rounded, exact = (
        gradient(params, x),
        gradient(*jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))),
    )
    for name, leaf in rounded.items():
        assert leaf.dtype == jnp.bfloat16
        a, b = np.float64(leaf).ravel(), np.float64(exact[name]).ravel()
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b)


def test_initial_parameters_are_those_of_tensorflows_cells():
    for cell, gates in GATES.items():
        params = getattr(recurrent, f"init_{cell}")(jax.random.key(0), 30, 50)
        assert {name: leaf.shape for name, leaf in params.items()} == {
            "input": (30, gates * 50),
            "recurrent": (50, gates * 50),
            "bias": (gates * 50,),
        }
        kernels = np.concatenate([params["input"], params["recurrent"]])
        assert kernels.var() == pytest.approx(2 / (80 + gates * 50), rel=0.05)
    bias = recurrent.init_gru(jax.random.key(0), 30, 50)["bias"]
    assert bool((bias[:100] == 1).all()) and not bias[100:].any()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_short_sequences_are_written_out_and_long_ones_are_not(platform):
    assert unroll_for(SHORT, platform) == SHORT
    assert unroll_for(1, platform) == 1
    assert 1 <= unroll_for(200, platform) < 200
