"""Layers by the persistent kernels from end to end, in Pallas' interpreter, against float64: outputs, states, and the
gradients of inputs, state and every weight and bias.

The interpreter knows no semaphores, so a block has all units here; what blocks exchange is counted in
test_persistent_exchange.py, and the same comparison is made on a card in test_persistent_card.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrence_oracle as oracle

from hotloop.layers import paths, persistent_tiles, recurrent
from hotloop.layers.persistent_tiles import Tile

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < paths.CARD_JAX, reason="kernels are built with jax 0.11.2 or later"
)
T, INPUTS = 4, 24
CELLS = list(oracle.CELLS)
BOUNDS = {jnp.float16: 2e-3, jnp.bfloat16: 1.6e-2}  # four of a type's roundings of numbers around 1
STARTS = pytest.mark.parametrize("has_state", [False, True], ids=["zero state", "given state"])
ALL = ("outputs", "last")


def case(cell, batch, hidden, dtype, has_state, uses=ALL):
    """Parameters, inputs, state, and the gradients of what is used."""
    rng = np.random.default_rng(0)

    def draw(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    def state():
        h = draw(batch, hidden, scale=0.5)
        return (h, draw(batch, hidden, scale=0.5)) if cell == "lstm" else h

    gates = {"rnn": 1, "lstm": 4}.get(cell, 3) * hidden
    params = {
        "input": draw(INPUTS, gates, scale=INPUTS**-0.5),
        "recurrent": draw(hidden, gates, scale=0.5 * hidden**-0.5),
        "bias": draw(gates, scale=0.1),
    }
    if cell == "gru_reset_after":
        params["recurrent_bias"] = draw(gates, scale=0.1)
    x, start = draw(T, batch, INPUTS), state() if has_state else None
    gradients = {"outputs": draw(T, batch, hidden), "last": state()}
    return params, x, start, [gradients[name] if name in uses else None for name in ALL]


@pytest.fixture
def runs(monkeypatch, capfd):
    """The kernels' jobs, in the order in which they run from then on, interpreted. No two warpgroups, and no copy and a
    warpgroup, may meet in shared memory unless one waits for the other."""
    from hotloop.layers import persistent_alone, persistent_backward, persistent_forward
    from hotloop.layers.persistent_chain import plgpu

    jobs = []

    def interpret(run, job, *given):
        jobs.append(job)
        return run(job, *given, interpret=plgpu.InterpretGPUParams(detect_races=True))

    for module in (persistent_forward, persistent_backward, persistent_alone):
        monkeypatch.setattr(module, "run", partial(interpret, module.run))
    yield jobs
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.fixture
def cut(monkeypatch):
    """Makes a shape one that kernels are for, by this tile."""

    def put(tile, *key):
        for table in (persistent_tiles.INFER, persistent_tiles.FORWARD, persistent_tiles.BACKWARD):
            monkeypatch.setitem(table, key, tile)

    return put


def by_kernels(function, cell, *given):
    with paths.force_path(paths.PERSISTENT):
        return function(getattr(recurrent, cell), *given)


def assert_outputs_are_exact(cell, given, bound):
    def infer(layer, *given):
        return layer(*given)

    found, exact = by_kernels(infer, cell, *given), oracle.in_float64(infer, cell, *given)
    oracle.assert_values_near(found, exact, bound)


def assert_gradients_are_exact(cell, given, bound):
    found, gradients = by_kernels(oracle.differentiate, cell, *given)
    exact, right = oracle.in_float64(oracle.differentiate, cell, *given)
    oracle.assert_values_near(found, exact, bound)
    oracle.assert_gradients_near(gradients, right, bound)


@pytest.mark.parametrize(
    ("uses", "dtype"),
    [(("outputs",), jnp.float16), (("last",), jnp.float16), (ALL, jnp.bfloat16)],
    ids=["outputs-float16", "last-float16", "both-bfloat16"],
)
@STARTS
@pytest.mark.parametrize("cell", CELLS)
def test_trained_layers_have_the_states_and_all_gradients_of_float64(runs, cut, cell, uses, has_state, dtype):
    cut(Tile(64, 16, 1, 64, 2), cell, 16, 64)
    assert_gradients_are_exact(cell, case(cell, 16, 64, dtype, has_state, uses), BOUNDS[dtype])
    forward, backward = runs
    assert (forward.keeps, forward.has_state) == (True, has_state)
    assert backward.has_outputs == ("outputs" in uses)


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float16", "bfloat16"])
@STARTS
@pytest.mark.parametrize("cell", CELLS)
def test_inference_has_the_outputs_and_the_last_state_of_float64(runs, cut, cell, has_state, dtype):
    cut(Tile(64, 16, 1, 64, 2), cell, 16, 64)
    assert_outputs_are_exact(cell, case(cell, 16, 64, dtype, has_state)[:3], BOUNDS[dtype])
    assert [job.keeps for job in runs] == [False]


@pytest.mark.parametrize("cell", CELLS)
def test_each_chain_and_each_group_of_rows_has_its_own_sequences(runs, cut, cell):
    cut(Tile(64, 16, 2, 64, 2), cell, 64, 64)
    assert_gradients_are_exact(cell, case(cell, 64, 64, jnp.float16, True), BOUNDS[jnp.float16])
    assert [job.grid for job in runs] == [(2, 1), (2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_products_of_more_parts_than_there_is_room_for_are_whole(runs, cut, cell):
    cut(Tile(192, 16, 1, 64, 2), cell, 16, 192)
    assert_gradients_are_exact(cell, case(cell, 16, 192, jnp.float16, True), BOUNDS[jnp.float16])


@STARTS
@pytest.mark.parametrize("uses", [("outputs",), ("last",), ALL], ids=" and ".join)
@pytest.mark.parametrize("hidden", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_the_rnn_whose_blocks_exchange_nothing_is_that_of_float64(monkeypatch, runs, hidden, uses, has_state):
    """Two and four warpgroups, which wait for each other within a block."""
    monkeypatch.setattr(persistent_tiles, "ALONE", ((16, hidden),))
    given = case("rnn", 16, hidden, jnp.float16, has_state, uses)
    assert_gradients_are_exact("rnn", given, BOUNDS[jnp.float16])
    forward, backward = runs
    assert (forward.stored, forward.start is not None) == (("h", "sums"), has_state)
    assert backward.fetched == (("sums", "d_outputs") if "outputs" in uses else ("sums",))


@STARTS
def test_inference_by_the_rnn_whose_blocks_exchange_nothing_is_that_of_float64(monkeypatch, runs, has_state):
    monkeypatch.setattr(persistent_tiles, "ALONE", ((16, 128),))
    given = case("rnn", 16, 128, jnp.bfloat16, has_state)[:3]
    assert_outputs_are_exact("rnn", given, BOUNDS[jnp.bfloat16])
    assert [job.stored for job in runs] == [("h",)]
