"""Stages on devices of their own: every update is the undivided model's, whatever the cut, schedule and split."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from staged_model import CUTS, WIDE, draw_batch, merged, staged_update, start, whole_update, worst

from hotloop.engine import optim
from hotloop.engine.device import device_mesh
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Program
from hotloop.engine.pipeline import SCHEDULES
from hotloop.engine.precision import AutoScale

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
KEY = jax.random.key(7)
PLAIN = optax.sgd(0.05, momentum=0.0)  # its slot is the gradient


def gradients(trained):
    return merged(trained).optimiser[0].trace


@pytest.fixture(scope="module")
def expected():
    """One update of the undivided model, in 6 micro-batches of 8."""
    return jax.jit(whole_update(WIDE, PLAIN, accumulation=6))(start(WIDE, PLAIN), draw_batch(), KEY)


CASES = [("whole", "Sequential"), *((name, each) for name in list(CUTS)[1:] for each in SCHEDULES)]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_gradients_are_those_of_the_undivided_model_and_controls_are_not(name, schedule, expected):
    update, spread = staged_update(CUTS[name], schedule, WIDE, PLAIN, accumulation=6)
    update, batch, old = jax.jit(update), draw_batch(), start(WIDE, PLAIN)
    new, figures = update(spread(old), batch, KEY)
    whole, figures_of_whole = expected
    assert worst(gradients(new), gradients(whole)) < 1e-6
    assert worst(merged(new).params, whole.params) < 1e-6
    assert worst(merged(new).kept, whole.kept) < 1e-6
    assert worst(figures, figures_of_whole) < 1e-6

    relabelled = {**batch, "label": np.where(np.arange(48) == 47, (batch["label"] + 1) % 3, batch["label"])}
    assert worst(gradients(update(spread(old), relabelled, KEY)[0]), gradients(whole)) > 1e-3
    for layer in "ad":  # of the first stage and of the last
        moved = jax.tree.map(np.array, old)
        moved.params[layer]["kernel"][0, 0] += 0.01
        assert worst(gradients(update(spread(moved), batch, KEY)[0]), gradients(whole)) > 1e-5
    assert update._cache_size() == 1


def run_program(update, trained, loop, replicas_mesh=None):
    """Four updates of one call at a low rate, with the state donated; and the losses."""

    def one(state, batch, key):
        new, figures = update(state["trained"], batch, key, rate=0.01)
        return {"trained": new}, figures

    feed = Resident(draw_batch(), 48, seed=3, sharding=replicas_mesh)
    program = Program(one, feed, 4, KEY, loop=loop)
    state = {"trained": trained}
    new, metrics = program(state, first=0, count=4)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    places = [leaf.sharding for leaf in jax.tree.leaves(state["trained"].params)]
    assert [leaf.sharding for leaf in jax.tree.leaves(new["trained"].params)] == places
    return new["trained"], metrics


LARS = optim.make("lars", {"momentum": 0.9, "weight_decay": 1e-4, "eeta": 0.1, "epsilon": 0.0}, l2=1e-4)
MOMENTUM = optim.make("sgd", {"momentum": 0.9}, weight_decay=1e-2)
ADAM = optim.make("adam", {})


@pytest.mark.parametrize(
    ("starts", "schedule", "replicas", "optimiser", "scale", "loop"),
    [
        ("c", "Interleaved", 1, MOMENTUM, 1.0, "scan"),
        ("c", "Grouped", 2, LARS, 128.0, "while"),
        ("b", "Interleaved", 2, ADAM, AutoScale(64.0, patience=2), "while"),
        ("bd", "Sequential", 1, LARS, AutoScale(64.0, patience=2), "while"),
    ],
)
def test_four_updates_of_one_call_end_at_the_weights_of_the_undivided_model(
    starts, schedule, replicas, optimiser, scale, loop
):
    counts = {"accumulation": 6 // replicas, "replicas": replicas}
    update, spread = staged_update(starts, schedule, WIDE, optimiser, scale, **counts)
    old = start(WIDE, optimiser, scale)
    found, figures = run_program(update, spread(old), loop)
    whole = whole_update(WIDE, optimiser, scale, **counts)
    if replicas > 1:
        old = jax.device_put(old, NamedSharding(device_mesh(replicas), PartitionSpec()))
    expected, figures_of_whole = run_program(whole, old, loop)
    assert worst(merged(found).params, expected.params) < 1e-5
    assert worst(merged(found).optimiser, expected.optimiser) < 1e-5
    assert worst(merged(found).kept, expected.kept) < 1e-5
    assert worst(dict(figures), dict(figures_of_whole)) < 1e-5
    assert jax.tree.map(float, merged(found).scale) == jax.tree.map(float, expected.scale)
    assert worst(start(WIDE, optimiser, scale).params, expected.params) > 1e-3
