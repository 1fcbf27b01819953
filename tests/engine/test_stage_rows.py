"""Trees in rows a stage: every bit comes back, and a checkpoint is the same with stages and without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from staged_model import (
    LAYERS,
    WIDE,
    draw_batch,
    draw_params,
    empty_statistics,
    staged_update,
    start,
    whole_update,
)

from hotloop.engine import optim, processes, stage_rows
from hotloop.engine.checkpoint import Checkpoints, named_leaves, snapshot
from hotloop.engine.device import device_mesh
from hotloop.engine.pipeline import spread_over_stages, start_in_stages
from hotloop.engine.precision import init_trained, parse
from hotloop.engine.stage_rows import BY_STAGE, Layout
from hotloop.errors import CheckpointError, HotloopError
from same_numbers import assert_close, assert_seen, with_moved_weight, with_other_label

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
KEY = jax.random.key(5)
ADAM, MOMENTUM = optim.make("adam", {}), optim.make("sgd", {"momentum": 0.9})


def equal_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("mode", ["16.16", "16.32"])
@pytest.mark.parametrize("half", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_state_of_several_types_comes_back_from_its_rows_with_every_bit(mode, half):
    policy = parse(mode, half)
    _, spread = staged_update("bd", "Grouped", policy, ADAM, accumulation=2)
    old = start(policy, ADAM)
    filled = jax.tree.map(lambda leaf: (leaf + 3 * np.ones(leaf.shape)).astype(leaf.dtype), old)
    rows = spread(filled)
    equal_bits(stage_rows.undivided(rows), jax.tree.map(np.asarray, filled))
    kept = half if mode == "16.16" else "float32"
    assert set(rows.params.rows) == {kept}
    # Averages of squares do not fit float16.
    assert set(rows.optimiser.rows) == {"int32", "float32" if half == "float16" else kept}


def test_a_device_holds_its_own_stage_and_no_more_than_the_largest_has():
    _, spread = staged_update("bcd", "Grouped", WIDE, ADAM, accumulation=2)
    rows = spread(start(WIDE, ADAM))
    for part in (rows.params, rows.optimiser):
        largest = max(sum(np.prod(shape) * 4 for shape in tree.shapes) for tree in part.layout.trees)
        for row in part.rows.values():
            assert len(row.addressable_shards) == 4
        held = sum(row.addressable_shards[0].data.nbytes for row in part.rows.values())
        assert largest <= held <= 1.02 * largest
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(start(WIDE, ADAM).params))
    assert rows.params.rows["float32"].addressable_shards[0].data.nbytes < 0.5 * whole


@pytest.mark.parametrize("mode", ["16.16", pytest.param("32.32", marks=pytest.mark.slow)])
def test_a_state_that_begins_in_stages_is_the_one_that_is_spread_over_them(mode):
    policy, mesh = parse(mode), device_mesh(1, 4)
    optimiser = optim.make("adam", {})
    params, kept = draw_params(), empty_statistics()
    expected = init_trained(policy, optimiser, 8.0, *jax.tree.map(jnp.asarray, (params, kept)))
    found = start_in_stages(params, kept, LAYERS, policy, optimiser, 8.0, mesh)
    equal_bits(stage_rows.undivided(found), jax.tree.map(np.asarray, expected))
    equal_bits(found, spread_over_stages(expected, LAYERS, policy, optimiser, mesh))
    with pytest.raises(HotloopError, match=r"stages: adam/mu/d/bias belongs to none"):
        start_in_stages(params, kept, "abc", policy, optimiser, 8.0, mesh)


@pytest.mark.parametrize("shape", [(4, 1001), (8, 3, 7), (4,)])
def test_rows_of_several_devices_are_brought_together_in_pieces_of_a_devices_own_size(shape, monkeypatch):
    """As they are where the devices belong to several processes."""
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    values[0, ...] = -0.0
    rows = processes.place(values, NamedSharding(device_mesh(1, 4), BY_STAGE))
    sizes = []

    def note(program, *arguments):
        compiled = program.jitted.lower(*arguments).compile()
        sizes.append(compiled.memory_analysis().output_size_in_bytes)
        return compiled(*arguments)

    monkeypatch.setattr(processes.JitTogether, "__call__", note)
    monkeypatch.setattr(processes, "GATHERED", 0)
    assert processes.gather(rows).tobytes() == values.tobytes()
    width = values[0].size
    columns = -(-width // 4)
    assert sizes == [4 * shape[0] * columns] * -(-width // columns)  # a device's share each, in whole columns
    sizes.clear()
    monkeypatch.setattr(processes, "GATHERED", 2**20)
    assert processes.gather(rows).tobytes() == values.tobytes()
    assert sizes == [values.nbytes]


def test_leaves_that_have_no_stage_or_two_are_refused():
    old = start(WIDE, MOMENTUM)
    mesh = device_mesh(1, 2)
    parts = [{"a": old.params["a"]}, {"b": old.params["b"]}]
    with pytest.raises(HotloopError, match="stages: c/bias belongs to none"):
        stage_rows.divide(parts, old.params, mesh)
    with pytest.raises(HotloopError, match=r"stages: leaf b/bias .* is not so in the undivided"):
        stage_rows.divide(parts, {"a": old.params["a"]}, mesh)


def test_a_tree_that_changed_its_form_is_refused():
    layout = Layout.of([{"a": np.zeros(3, np.float32)}])
    with pytest.raises(ValueError, match="types"):
        layout.ravel(0, {"a": jnp.zeros(3, jnp.int32)})
    with pytest.raises(ValueError, match="not those"):
        layout.ravel(0, {"a": jnp.zeros(4)})


def test_names_in_a_checkpoint_are_those_of_the_undivided_state():
    _, spread = staged_update("bd", "Grouped", WIDE, ADAM, accumulation=2)
    old = start(WIDE, ADAM)
    divided = {"trained": spread(old)._asdict(), "update": jnp.int32(3)}
    state = {"trained": old._asdict(), "update": jnp.int32(3)}
    assert list(named_leaves(divided)) == list(named_leaves(state))
    (arrays, forms), (ours, our_forms) = snapshot(state), snapshot(divided)
    assert our_forms == forms
    assert all(ours[name].tobytes() == arrays[name].tobytes() for name in arrays)


def stepped(update, trained, batch=None):
    return update(trained, batch or draw_batch(), KEY, rate=0.01)[0]


@pytest.mark.parametrize("mode", ["32.32", pytest.param("16.16", marks=pytest.mark.slow)])
def test_a_step_is_restored_by_any_other_cut_and_the_next_update_is_the_same(tmp_path, mode):
    policy = parse(mode, "bfloat16")
    whole = jax.jit(whole_update(policy, ADAM, accumulation=4))
    cuts = {
        starts: staged_update(starts, "Interleaved", policy, ADAM, accumulation=4) for starts in ("c", "bd")
    }
    fresh = start(policy, ADAM)
    states = {"": fresh, **{starts: spread(fresh) for starts, (_, spread) in cuts.items()}}
    updates = {"": whole, **{starts: jax.jit(update) for starts, (update, _) in cuts.items()}}
    saved = {starts: stepped(updates[starts], state) for starts, state in states.items()}
    after, within = stepped(whole, saved[""]), 1e-6 if mode == "32.32" else 1e-3
    for source in states:
        with Checkpoints(tmp_path / f"of_{source}") as checkpoints:
            checkpoints.save(1, saved[source], position={})
            for target, like in states.items():
                found = checkpoints.restore(like).state
                equal_bits(stage_rows.undivided(found), stage_rows.undivided(saved[source]))
                for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
                    assert ours.sharding == theirs.sharding
                new = stage_rows.undivided(stepped(updates[target], found))
                assert_close(new.params, after.params, within)
    relabelled = stepped(whole, saved[""], with_other_label(draw_batch(), 3))
    moved = stepped(whole, with_moved_weight(saved[""], "params", "a", "kernel", by=0.5))
    assert_seen(lambda other: assert_close(other.params, after.params, within), relabelled, moved)


def test_a_step_that_does_not_fit_names_the_leaf_of_the_undivided_state(tmp_path):
    _, spread = staged_update("c", "Grouped", WIDE, MOMENTUM, accumulation=2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, start(WIDE, ADAM), position={})
        with pytest.raises(CheckpointError, match="leaf optimiser/velocity/trace/a/bias"):
            checkpoints.restore(spread(start(WIDE, MOMENTUM)))
