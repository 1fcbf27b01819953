"""Stages on devices of their own: every update is the undivided model's, whatever the cut, schedule and split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from staged_model import (
    CUTS,
    WIDE,
    cut,
    draw_batch,
    draw_params,
    empty_statistics,
    merged,
    run_layers,
    staged_update,
    start,
    whole_update,
)

from hotloop.engine import optim
from hotloop.engine.device import device_mesh
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Program
from hotloop.engine.optim_keys import OPTIMISERS, USUAL_PARAMS
from hotloop.engine.pipeline import SCHEDULES, evaluate_in_stages, spread_over_stages, update_in_stages
from hotloop.engine.precision import AutoScale, init_trained, parse
from hotloop.errors import HotloopError, OptionError
from same_numbers import (
    assert_close,
    assert_same_but_for,
    assert_seen,
    share_apart,
    with_moved_weight,
    with_other_label,
)

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
    assert_close(merged(new)[:3], merged(whole)[:3], 1e-6)
    assert_close(figures, figures_of_whole, 1e-6)
    relabelled = gradients(update(spread(old), with_other_label(batch, 3), KEY)[0])
    for layer in "ad":  # of the first stage and of the last
        start_moved = with_moved_weight(old, "params", layer, "kernel")
        moved = gradients(update(spread(start_moved), batch, KEY)[0])
        assert_same_but_for(gradients(new), gradients(whole), 1e-6, label=relabelled, weight=moved)
    assert update._cache_size() == 1


def four_updates(update, loop):
    """A program of four updates in one call at a low rate."""

    def one(state, batch, key):
        new, figures = update(state["trained"], batch, key, rate=0.01)
        return {"trained": new}, figures

    return Program(one, Resident(draw_batch(), 48, seed=3), 4, KEY, loop=loop)


def run_program(program, trained, batch=None):
    """The state after its call, which uses up the one that it is given; and the figures."""
    program.feed = Resident(batch or draw_batch(), 48, seed=3)
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
    program = four_updates(update, loop)
    found, figures = run_program(program, spread(old))
    relabelled, _ = run_program(program, spread(old), with_other_label(draw_batch(), 3))
    moved, _ = run_program(program, spread(with_moved_weight(old, "params", "b", "kernel")))
    assert len(program.executables) == 1
    whole = whole_update(WIDE, optimiser, scale, **counts)
    if replicas > 1:
        old = jax.device_put(old, NamedSharding(device_mesh(replicas), PartitionSpec()))
    expected, figures_of_whole = run_program(four_updates(whole, loop), old)
    for part in ("params", "optimiser", "kept"):
        controls = {
            name: getattr(merged(each), part) for name, each in (("label", relabelled), ("weight", moved))
        }
        assert_same_but_for(getattr(merged(found), part), getattr(merged(expected), part), 1e-5, **controls)
    assert_close(dict(figures), dict(figures_of_whole), 1e-5)
    assert jax.tree.map(float, merged(found).scale) == jax.tree.map(float, expected.scale)
    assert share_apart(start(WIDE, optimiser, scale).params, expected.params) > 1e-3


@pytest.mark.parametrize("half", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_sixteen_bit_weights_and_slots_round_as_those_of_the_undivided_model(half):
    """Rounding is by chance and by leaf: other numbers of the leaves would show in half of all weights."""
    policy = parse("16.16", half)
    update, spread = staged_update("bd", "Interleaved", policy, MOMENTUM, 64.0, accumulation=4)
    old, batch = start(policy, MOMENTUM, 64.0), draw_batch()
    found = merged(jax.jit(update)(spread(old), batch, KEY, rate=0.01)[0])
    whole = jax.jit(whole_update(policy, MOMENTUM, 64.0, accumulation=4))
    expected = merged(whole(old, batch, KEY, rate=0.01)[0])
    for ours, theirs in zip(*(jax.tree.leaves(each[:2]) for each in (found, expected)), strict=True):
        assert ours.dtype == theirs.dtype == jnp.dtype(half)
        assert np.mean(ours == theirs) > 0.95
    other = merged(whole(old, batch, jax.random.key(8), rate=0.01)[0])
    flat = [
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(each.params)]) for each in (expected, other)
    ]
    assert np.mean(flat[0] == flat[1]) < 0.8


def test_a_batch_that_stands_for_all_micro_batches_is_seen_by_each_with_other_keys():
    few = draw_batch(16)
    settings = {"accumulation": 3, "repeated": True, "replicas": 2}
    update, spread = staged_update("c", "Grouped", WIDE, PLAIN, **settings)
    update, old = jax.jit(update), start(WIDE, PLAIN)
    moved = with_moved_weight(old, "params", "a", "kernel")
    found, label, weight = (
        gradients(update(spread(state), batch, KEY)[0])
        for state, batch in ((old, few), (old, with_other_label(few, 3)), (moved, few))
    )
    expected = jax.jit(whole_update(WIDE, PLAIN, **settings))(old, few, KEY)[0]
    assert_same_but_for(found, gradients(expected), 1e-6, label=label, weight=weight)
    once = whole_update(WIDE, PLAIN, accumulation=1, replicas=2)
    assert share_apart(gradients(jax.jit(once)(start(WIDE, PLAIN), few, KEY)[0]), gradients(expected)) > 1e-3


def chain(stages, params, *, scale, schedule="Grouped", policy=WIDE, optimiser=PLAIN):
    """A jitted update of any stages whose params are named by their numbers, and a state for it."""
    mesh = device_mesh(1, len(stages))
    whole = init_trained(policy, optimiser, scale, {str(n): each for n, each in enumerate(params)})
    keys = [[str(number)] for number in range(len(stages))]
    old = spread_over_stages(whole, keys, policy, optimiser, mesh)
    settings = {"policy": policy, "optimiser": optimiser, "scale": scale, "mesh": mesh, "schedule": schedule}

    @jax.jit
    def update(old, batch):
        return update_in_stages(stages, old, batch, KEY, KEY, accumulation=2, **settings)

    return update, old


def test_values_of_several_types_cross_and_those_without_gradients_go_forward_alone():
    def first(params, carry, values, samples, keys):
        x = samples["x"] * params["0"]["w"]
        crossing = {
            "ids": samples["id"] + 1,
            "half": x.astype(jnp.bfloat16),
            "x": x,
            "odd": samples["id"] > 2,
        }
        return crossing, (carry, {})

    def second(params, carry, values, samples, keys):
        assert {name: value.dtype.name for name, value in values.items()} == {
            "ids": "int32",
            "half": "bfloat16",
            "x": "float32",
            "odd": "bool",
        }
        x = values["x"] + values["half"].astype(jnp.float32)
        return (x * params["1"]["w"], values["ids"], values["odd"]), (carry, {})

    def third(params, carry, values, samples, keys):
        x, ids, odd = values
        loss = (params["2"]["w"][ids] * x[:, None] * jnp.where(odd, 2.0, 1.0)[:, None]).mean()
        return loss, (carry, {"loss": loss})

    def whole(params, batch):
        values = None
        for stage in (first, second, third):
            values, _ = stage(params, (), values, batch, None)
        return values

    rng = np.random.default_rng(3)
    batch = {"x": rng.integers(1, 9, 8).astype(np.float32), "id": np.arange(8, dtype=np.int32) % 5}
    params = [
        {"w": jnp.float32(2)},
        {"w": jnp.float32(3)},
        {"w": jnp.asarray(rng.normal(size=(6, 2)), jnp.float32)},
    ]
    update, old = chain([first, second, third], params, scale=1.0, schedule="Interleaved")
    new, figures = update(old, batch)
    named = {str(number): each for number, each in enumerate(params)}
    loss, expected = jax.jit(jax.value_and_grad(whole))(named, batch)
    assert_close(figures["loss"], loss, 1e-6)
    other, _ = update(old, with_other_label(batch, 5, name="id"))
    moved = chain([first, second, third], with_moved_weight(params, 0, "w"), scale=1.0)[1]
    controls = {"label": gradients(other), "weight": gradients(update(moved, batch)[0])}
    assert_same_but_for(gradients(new), expected, 1e-6, **controls)


def multiply(number, last):
    def stage(params, carry, values, samples, keys):
        x = samples["x"].astype(jnp.float16) if values is None else values
        y = x * params[str(number)]["w"]
        return (y.mean(), (carry, {})) if last else (y, (carry, {}))

    return stage


@pytest.mark.parametrize("weights", [(1.0, 1.0, 300.0), (300.0, 1.0, 1.0)])
def test_an_overflow_that_one_stage_does_not_see_leaves_all_as_they_were(weights):
    """At scale 256 two weights have a gradient of 256 * 300, which float16 has not; that of the 300 is finite."""
    stages = [multiply(number, number == 2) for number in range(3)]
    policy = parse("16.16", "float16", stochastic_rounding=False)
    params = [{"w": jnp.float32(weight)} for weight in weights]
    batch = {"x": np.ones(4, np.float32)}
    settings = {"scale": AutoScale(256.0), "policy": policy}
    update, old = chain(stages, params, **settings)
    before = merged(old)
    new, _ = update(old, batch)
    after = merged(new)
    jax.tree.map(np.testing.assert_array_equal, after[:3], before[:3])
    assert jax.tree.map(float, after.scale) == (128.0, 0.0, 1.0)
    spoilt, _ = chain(stages, params, scale=256.0, policy=policy)[0](old, batch)
    finite = {name: np.isfinite(each["w"]) for name, each in merged(spoilt).params.items()}
    assert sorted(finite.values()) == [False, False, True]
    good, _ = update(new, {"x": np.ones(4, np.float32) / 4})
    assert jax.tree.map(float, merged(good).scale) == (128.0, 1.0, 1.0)
    assert share_apart(merged(good).params, before.params) > 0


def test_an_optimiser_that_mixes_stages_is_refused_in_one_line():
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    update, spread = staged_update("c", "Grouped", WIDE, clip, accumulation=2)
    with pytest.raises(
        OptionError, match=r"^optimizer: its step for one stage .* take one that goes leaf by leaf"
    ):
        update(spread(start(WIDE, clip)), draw_batch(), KEY)


@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_a_norm_over_all_gradients_is_that_of_the_undivided_model(limit):
    clip = optax.chain(optim.clip_by_global_norm(limit), optax.sgd(1.0))
    plain = optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0))
    update, spread = staged_update("bd", "Interleaved", WIDE, clip, 128.0, accumulation=2, replicas=1)
    batch, update, old = draw_batch(), jax.jit(update), start(WIDE, clip, 128.0)
    moved = with_moved_weight(old, "params", "a", "kernel")
    found, label, weight = (
        merged(update(spread(state), given, KEY)[0]).params
        for state, given in ((old, batch), (old, with_other_label(batch, 3)), (moved, batch))
    )
    whole = jax.jit(whole_update(WIDE, plain, 128.0, accumulation=2))
    before = start(WIDE, plain, 128.0)
    expected = merged(whole(before, batch, KEY)[0]).params
    assert_same_but_for(found, expected, 1e-6, label=label, weight=weight)
    steps = jax.tree.leaves(jax.tree.map(lambda a, b: np.ravel(a - b), expected, before.params))
    moved = np.linalg.norm(np.concatenate(steps))
    assert moved == pytest.approx(limit, rel=1e-5) if limit < 1 else 0.1 < moved < limit


@pytest.mark.parametrize(
    "chain",
    [
        lambda clip: optax.chain(optax.add_decayed_weights(0.5), clip, optax.sgd(1.0)),
        lambda clip: optax.chain(
            optax.masked(clip, lambda tree: {name: name == "a" for name in tree}), optax.sgd(1.0)
        ),
    ],
)
def test_a_norm_of_anything_but_all_gradients_is_refused_in_stages(chain):
    clip = chain(optim.clip_by_global_norm(0.05))
    update, spread = staged_update("c", "Grouped", WIDE, clip, accumulation=2)
    with pytest.raises(OptionError, match=r"^optimizer: in stages clip_by_global_norm must be the first"):
        update(spread(start(WIDE, clip)), draw_batch(), KEY)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_by_name_works_stage_by_stage(name):
    """Traced alone, which finds what mixes stages and slots that do not divide."""
    optimiser = optim.make(name, {**USUAL_PARAMS.get(name, {})}, weight_decay=1e-3, l2=1e-3, clip=1.0)
    update, spread = staged_update("c", "Grouped", WIDE, optimiser, accumulation=2)
    old = spread(start(WIDE, optimiser))
    new, _ = jax.eval_shape(lambda old: update(old, draw_batch(), KEY, rate=0.1), old)
    assert jax.tree.structure(new) == jax.tree.structure(old)


def test_keys_in_two_stages_and_a_last_stage_without_a_loss_are_refused():
    whole, mesh = start(WIDE, PLAIN), device_mesh(1, 2)
    with pytest.raises(HotloopError, match="stages: b belongs to several"):
        spread_over_stages(whole, ["ab", "bcd"], WIDE, PLAIN, mesh)
    with pytest.raises(HotloopError, match="stages: d/bias belongs to none"):
        spread_over_stages(whole, ["ab", "c"], WIDE, PLAIN, mesh)
    stages, weights = [multiply(0, last=False), multiply(1, last=False)], [{"w": jnp.float32(1)}] * 2
    update, old = chain(stages, weights, scale=1.0)
    with pytest.raises(HotloopError, match="last one must return the mean loss"):
        update(old, {"x": np.ones(4, np.float32)})


def test_an_evaluation_in_stages_gives_each_sample_its_own_values_in_order():
    def values_of(layers):
        def stage(params, kept, values, samples):
            keys = jax.random.split(KEY, len(samples["x"]))
            values, _ = run_layers(layers, params, {}, values, samples, keys)
            if "d" not in layers:
                return (
                    {**values, "bias": values["h"][:, :1] + kept["a"]["mean"][0]} if "a" in layers else values
                )
            return {"right": values["h"].argmax(1) == samples["label"], "out": values["h"]}

        return stage

    batch = draw_batch()
    for starts, replicas, count in (("bd", 1, 6), ("c", 2, 4)):
        layers = cut(starts)
        mesh = device_mesh(replicas, len(layers))
        rows, moved = (
            spread_over_stages(state, layers, WIDE, PLAIN, mesh)
            for state in (
                start(WIDE, PLAIN),
                with_moved_weight(start(WIDE, PLAIN), "params", "a", "kernel"),
            )
        )
        stages = [values_of(each) for each in layers]
        evaluate = jax.jit(partial(evaluate_in_stages, stages, mesh=mesh, micro_batches=count))
        found = evaluate(rows.params, rows.kept, batch)
        expected = []
        for part in np.split(np.arange(48), count * replicas):
            values, own = None, {name: leaf[part] for name, leaf in batch.items()}
            for each, stage in zip(layers, stages, strict=True):
                params = {name: draw_params()[name] for name in each}
                values = stage(params, empty_statistics(), values, own)
            expected.append(values)
        out = np.concatenate([each["out"] for each in expected])
        assert_close(found["out"], out, 1e-6)
        shifted = evaluate(moved.params, moved.kept, batch)["out"]
        assert_seen(lambda control, out=out: assert_close(control, out, 1e-6), shifted)
        right = np.concatenate([each["right"] for each in expected])
        np.testing.assert_array_equal(found["right"], right)
        relabelled = evaluate(rows.params, rows.kept, {**batch, "label": found["out"].argmax(1)})
        assert np.asarray(relabelled["right"]).all()  # and so the labels count, each with its own sample
        assert found["right"].dtype == bool and 0 < right.mean() < 1
