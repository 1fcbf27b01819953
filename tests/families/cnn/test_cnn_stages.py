"""A training in stages is the training of the undivided network: gradients, weights, statistics, figures, checkpoints.

The network is a small one with a ResNet's pieces; `slow` tests show the same of a named one.
"""

from dataclasses import replace
from functools import cached_property, partial

import jax
import numpy as np
import pytest
from cnn_words import typed
from staged import FLOAT32, KEY, Residual, compiled, drawn, moved, relabelled, samples, staged, trained

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.keys import seed_key
from hotloop.engine.pipeline_table import SCHEDULES
from hotloop.families.cnn import model
from hotloop.families.cnn.network import INPUT, Network, NetworkBuilder, NormChoice, build
from same_numbers import (
    assert_close,
    assert_same_but_for,
    assert_seen,
    share_apart,
    with_moved_weight,
    with_other_label,
)

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
ONE_VALUE, TWO_VALUES = "a_out", "a_1_relu"
THREE, FOUR = ("a_1_conv", ONE_VALUE), ("a_1_conv", TWO_VALUES, ONE_VALUE)
GRADIENTS = (*FLOAT32, "--optimizer", "momentum", "--optimizer-params", "{momentum: 0.9}")
LARS = (
    "--optimizer",
    "lars",
    "--optimizer-params",
    "{momentum: 0.9, weight_decay: 5e-5, eeta: 0.02, epsilon: 0}",
)
GROUPS = ("--norm-layer", "{name: group_norm, num_groups: 2}")
BEHIND = {"a_1_conv", "a_1_bn", "a_2_conv"}  # what a scale of 0 in a_2_bn hides from the loss


def gradients(job, **changes):
    """Those of one update: a first velocity is the gradient itself. And its figures."""
    state, figures = trained(job, **changes)
    assert job.config.optimizer == "momentum"
    return state["optimiser"]["velocity"].trace, figures


def schedule(name):
    return ("--pipeline-schedule", name)


def check_gradients(job, whole, zero=(), behind=frozenset()):
    """Equal to the undivided network's; otherwise with one label changed, and with one weight moved."""
    start = drawn(whole, zero)
    (one, figures), (other, others) = (gradients(each, state=start) for each in (whole, job))
    assert_close(others, figures, 1e-6)
    for name, leaves in one.items():
        for leaf, values in leaves.items():
            hidden = name in behind
            assert np.any(values) != hidden, (name, leaf)
            assert not hidden or not np.any(other[name][leaf]), (name, leaf)
    label, _ = gradients(job, state=start, batches=relabelled)
    weight, _ = gradients(job, state=moved(job, start))
    assert_same_but_for(other, one, 1e-6, label=label, weight=weight)


@pytest.mark.parametrize(
    ("splits", "order", "zero"),
    [((TWO_VALUES,), "Grouped", ()), (THREE, "Interleaved", ("a_2_bn",)), (FOUR, "Sequential", ())],
)
def test_gradients_are_those_of_the_undivided_network(splits, order, zero):
    job = staged(*GRADIENTS, *schedule(order), splits=splits)
    check_gradients(job, staged(*GRADIENTS), zero, BEHIND if zero else frozenset())


def check_weights(words, splits, split=(2, 1, 4), updates=4, bound=1e-5, rate=0.05, **changes):
    """Weights, slots and statistics after some updates are those of one device, and have moved far beyond the bound;
    one label of the first update, and one weight before it, still show in the last weights."""
    micro, replicas, accumulation = split
    job = staged(*words, splits=splits, split=split, rate=rate, **changes)
    # The old rule for statistics tells replicas from micro-batches.
    undivided = split if "seed" in words else (micro, 1, replicas * accumulation)
    whole = staged(*words, split=undivided, rate=rate, **changes)
    check_training(job, whole, updates, bound)


def check_training(job, whole, updates=4, bound=1e-5):
    start = drawn(whole)
    one, figures = trained(whole, updates)
    ways = {"same": {}, "label": {"batches": relabelled}, "weight": {"state": moved(job, start)}}
    found = {way: trained(job, updates, **given) for way, given in ways.items()}
    other, others = found["same"]
    controls = {way: found[way][0]["params"] for way in ("label", "weight")}
    assert_same_but_for(other["params"], one["params"], bound, **controls)
    assert share_apart(start["params"], one["params"]) > 100 * bound
    for name in ("optimiser", "statistics"):
        if jax.tree.leaves(one[name]):
            assert_close(other[name], one[name], bound)
    assert_close(others, figures, bound)
    assert one["update"] == other["update"] == updates


@pytest.mark.parametrize(
    ("words", "splits", "split"),
    [
        ((*LARS, "--label-smoothing", "0.1", "--loss-scaling", "128"), (TWO_VALUES,), (2, 1, 4)),
        pytest.param((*GROUPS, "--auto-loss-scaling"), (ONE_VALUE,), (2, 2, 2), marks=pytest.mark.slow),
        pytest.param(
            ("--optimizer", "muon", "--weight-decay", "0.01"),
            (TWO_VALUES,),
            (2, 2, 2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_after_updates_are_those_of_the_undivided_network(words, splits, split):
    check_weights((*FLOAT32, *words), splits, split)


class TwoConvolutions(Network):
    """As few layers as a stage with a recomputed part and a norm, and one without, can have."""

    epsilon = 1e-5

    @cached_property
    def nodes(self):
        builder = NetworkBuilder(self.shape, self.norm, self.epsilon)
        x = builder.norm_relu("one", builder.conv("one_conv", INPUT, 2, 1))
        x = builder.conv("two_conv", x, 2, 1)
        builder.logits("fc", builder.mean_pool("pool", x), self.classes)
        return tuple(builder.nodes)


def recomputed(job, inner):
    """The job with its first stage in two parts, on one device, that are computed again one by one."""
    mapping = {"pipeline_splits": (inner, *job.splits), "device_mapping": (0, 0, 1)}
    return replace(job, config=replace(job.config, **mapping, recomputation=True))


def test_group_norm_and_recomputation_in_stages_change_no_number():
    """At an automatic loss scale."""
    words = (*FLOAT32, *GROUPS, "--auto-loss-scaling")
    network = TwoConvolutions("small", (4, 4, 3), 5, NormChoice.of(typed(*words).config.norm_layer))
    whole = staged(*words, split=(2, 1, 2), network=network)
    job = staged(*words, *schedule("Interleaved"), splits=("fc",), split=(2, 1, 2), network=network)
    check_training(recomputed(job, "two_conv"), whole)


@pytest.mark.slow
def test_recomputation_inside_a_stage_changes_no_number():
    """Three stages on two devices: the first two are one there, and are recomputed one by one."""
    once = staged(*GRADIENTS, *schedule("Grouped"), splits=(TWO_VALUES,))
    again = recomputed(once, "a_1_conv")
    start = drawn(once)
    controls = {"label": {"batches": relabelled}, "weight": {"state": moved(once, start)}}
    controls = {way: trained(again, **given)[0]["params"] for way, given in controls.items()}
    (one, figures), (other, others) = (trained(job) for job in (once, again))
    assert_same_but_for(other["params"], one["params"], 1e-6, **controls)
    assert_close(others, figures, 1e-6)
    assert ["optimization_barrier" in program_text(job) for job in (once, again)] == [False, True]


def program_text(job):
    return compiled(job).lower(model.spread(job, drawn(job)), samples(job), KEY).as_text()


@pytest.mark.slow
def test_16_bit_weights_round_alike_in_stages():
    """Leaves are numbered as in the undivided tree, so that each draws the same bits; another key draws others."""
    job, whole = (
        staged("--optimizer-params", "{momentum: 0.9}", splits=splits) for splits in ((TWO_VALUES,), ())
    )
    (one, _), (other, _) = trained(whole), trained(job)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(other["params"])} == {"bfloat16"}
    again, _ = trained(job, key=seed_key(8))
    same, differ = (
        np.mean([np.mean(left == right) for left, right in pairs(one["params"], each["params"])])
        for each in (other, again)
    )
    assert same > 0.99 and differ < 0.95


def pairs(one, other):
    return zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)


@pytest.mark.slow
def test_an_overflow_in_one_stage_leaves_the_update_out_in_all():
    words = ("--precision", "16.32", "--half", "float16", "--auto-loss-scaling")
    job = staged(*words, splits=(ONE_VALUE,))
    start = drawn(job)
    start["scale"] = start["scale"]._replace(scale=np.float32(2.0**24))
    state, figures = trained(job, state=start)
    assert state["scale"].skipped == 1 and figures["loss_scaling_factor"] == 2.0**23
    for left, right in pairs(start["params"], state["params"]):
        assert np.array_equal(left, right)
    assert np.isfinite(figures["loss"])


@pytest.mark.parametrize(
    "splits", [pytest.param((ONE_VALUE,), marks=pytest.mark.slow), ("a_1_bn", TWO_VALUES)]
)
def test_validation_in_stages_is_that_of_the_whole(splits):
    """Also where a norm and its convolution lie in two stages, so that it cannot be folded into it."""
    job = staged(*FLOAT32, splits=splits, split=(16, 1, 1))
    job = replace(job, config=replace(job.config, pipeline_splits=splits))
    start, batch = drawn(job), samples(job)
    weights = {name: start[name] for name in ("params", "statistics")}
    rows = model.spread_weights(job, weights)
    batch = {name: values[:11] for name, values in batch.items()}  # which its micro-batches do not divide
    one, evaluate = jax.jit(model.evaluate(job))(weights, batch), jax.jit(model.evaluate_stages(job))
    other = evaluate(rows, batch)
    label = evaluate(rows, with_other_label(batch, job.size.classes, 0))
    weight = evaluate(model.spread_weights(job, moved(job, weights)), batch)
    assert_same_but_for(other["loss"], one["loss"], 1e-6, label=label["loss"], weight=weight["loss"])
    assert all(np.array_equal(one[name], other[name]) for name in ("correct", "correct_top"))


@pytest.mark.slow
def test_weights_and_slots_of_a_device_are_its_stages_and_interleaved_keeps_less():
    wide = partial(
        staged, *GRADIENTS, splits=THREE, split=(8, 1, 8), network=Residual("wide", (16, 16, 3), 5)
    )
    temporary = {}
    for order in ("Grouped", "Interleaved"):
        job = wide(*schedule(order))
        state = model.spread(job, drawn(job))
        found = compiled(job).lower(state, samples(job), jax.random.key(0)).compile().memory_analysis()
        temporary[order] = found.temp_size_in_bytes
    assert 0 < temporary["Interleaved"] < temporary["Grouped"]
    for name in ("params", "optimiser"):
        rows = state[name].rows
        largest = max(sum(node.weights for node in job.network.nodes if node.name in layers)
                      for layers in model.layers_by_stage(job.network, job.splits))  # fmt: skip
        for kind, row in rows.items():
            (shard,) = {shard.data.nbytes for shard in row.addressable_shards}
            assert kind == "float32" and shard <= 1.02 * 4 * largest


def same_weights(expected, found):
    assert_close(found["params"], expected["params"], 1e-6)


@pytest.mark.slow
def test_a_checkpoint_is_the_same_on_every_topology_and_each_goes_on_from_it(tmp_path):
    """1 x 1, 4 or 8 replicas, 2 replicas x 2 stages: what one has written the others restore bit for bit, optimiser
    too, and their next update is the same."""
    count = 8 if jax.device_count() >= 8 else 4
    micro, halves = 32 // count, count // 2
    splits = {(micro, 1, count): (), (micro, count, 1): (), (micro, 2, halves): (TWO_VALUES,)}
    words = (*FLOAT32, "--optimizer-params", "{momentum: 0.9}")
    jobs = [staged(*words, splits=layers, split=split) for split, layers in splits.items()]
    assert jobs[1].mesh.size == count
    for number, writer in enumerate(jobs):
        state = model.spread(writer, drawn(writer))
        state, _ = compiled(writer)(state, samples(writer), jax.random.key(0))
        with Checkpoints(tmp_path / str(number)) as checkpoints:
            checkpoints.save(1, state, position={})
            checkpoints.wait()
            found = [checkpoints.restore(model.spread(job, drawn(job))).state for job in jobs]
        written = model.gather(state)
        for job, restored in zip(jobs, found, strict=True):
            here = model.gather(restored)
            assert all(np.array_equal(left, right) for left, right in pairs(written, here))
            batch, key = samples(job, 1), jax.random.key(1)
            expected = model.gather(compiled(writer)(state, batch, key)[0])
            shifted = with_moved_weight(here, "params", job.network.nodes[0].name, "kernel")
            other, label, weight = (
                model.gather(compiled(job)(*given, key)[0])
                for given in (
                    (restored, batch),
                    (restored, with_other_label(batch, job.size.classes)),
                    (model.spread(job, shifted), batch),
                )
            )
            for name in ("params", "optimiser", "statistics"):
                assert_close(other[name], expected[name], 1e-6)
            assert_seen(partial(same_weights, expected), label, weight)
            assert share_apart(written["params"], expected["params"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "count", "crossing"),
    [
        ("Sequential", 1, 1),
        *zip(SCHEDULES, (2, 3, 4), (1, 1, 1), strict=True),
        *zip(SCHEDULES, (4, 2, 3), (2, 2, 2), strict=True),
        *zip(SCHEDULES, (3, 4, 2), (1, 2, 2), strict=True),
    ],
)
def test_gradients_of_a_named_network_in_stages(order, count, crossing):
    network = build("cifar_resnet8", (16, 16, 3), 10)
    layers = ("conv2_block1_layer1_relu", "conv3_block1_layer1_relu", "conv4_block1_layer1_relu")
    if crossing == 1:
        layers = ("conv3_block1_shortcut", "conv4_block1_shortcut", "avg_pool")
    splits = layers[: count - 1]
    places = {node.name: place for place, node in enumerate(network.nodes)}
    assert all(len(network.crossing(places[name])) == crossing for name in splits)
    whole = staged(*GRADIENTS, network=network)
    job = staged(*GRADIENTS, *schedule(order), splits=splits, network=network)
    check_gradients(job, whole)


ONE, TWO = (2, 1, 4), (2, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "split"),
    [
        ((), ONE),
        ((), TWO),
        (("--label-smoothing", "0.1"), ONE),
        (("--loss-scaling", "128"), TWO),
        (("--auto-loss-scaling",), ONE),
        (LARS, TWO),
        (GROUPS, ONE),
        (("--statistics-rule", "seed"), TWO),
        (("--optimizer", "adamw", "--optimizer-params", "{b1: 0.9}"), ONE),
    ],
)
def test_weights_of_a_named_network_in_stages_after_four_updates(words, split):
    network = build("cifar_resnet8", (16, 16, 3), 10, NormChoice.of(typed(*words).config.norm_layer))
    splits = ("conv2_block1_layer1_relu",)
    # A first step of Adam's is the rate itself wherever a gradient is, however small it is.
    rate = 1e-3 if "adamw" in words else 0.01
    check_weights((*FLOAT32, *words), splits, split, network=network, rate=rate)
