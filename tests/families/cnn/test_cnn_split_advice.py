"""Where to cut a network: the slowest stage is as fast as it can be, few values cross, and the figures add up."""

from dataclasses import replace
from itertools import combinations

import pytest
from cnn_words import job_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.engine.precision import parse
from hotloop.errors import OptionError
from hotloop.families.cnn import split_advice
from hotloop.families.cnn.description import _image_bytes
from hotloop.families.cnn.network import build
from hotloop.families.cnn.split_advice import advise, advise_by_parameters, check_stages, measure_layers
from hotloop.families.cnn.stages import crossing_values, cut

RESNET8 = build("cifar_resnet8", (32, 32, 3), 10)
TOY = build("toy_model_bn", (32, 32, 3), 10)


def slowest(network, splits, costs):
    return max(sum(costs[stage.start : stage.stop]) for stage in cut(network, splits))


@settings(max_examples=40)
@given(
    st.integers(1, 5), st.lists(st.floats(0.01, 1), min_size=len(RESNET8.nodes), max_size=len(RESNET8.nodes))
)
def test_no_other_cut_where_one_value_crosses_has_a_faster_slowest_stage(stages, costs):
    found = advise(RESNET8, stages, costs, "time")
    places = [i for i in range(1, len(RESNET8.nodes)) if RESNET8.may_split(i)]
    names = [node.name for node in RESNET8.nodes]
    best = min(
        slowest(RESNET8, [names[i] for i in chosen], costs) for chosen in combinations(places, stages - 1)
    )
    assert slowest(RESNET8, found.splits, costs) <= 1.01 * best * (1 + 1e-9)
    assert len(found.splits) == stages - 1 and set(found.splits) <= {names[i] for i in places}
    assert sum(found.shares) == pytest.approx(1)
    assert max(found.shares) == pytest.approx(slowest(RESNET8, found.splits, costs) / sum(costs))


def test_stages_have_their_layers_parameters_and_the_values_that_cross_into_them():
    found = advise(RESNET8, 3, [float(node.flops) for node in RESNET8.nodes], "FLOPs")
    assert found.splits == ("conv2_block1_post_addition_relu", "conv3_block1_post_addition_relu")
    assert sum(found.parameters) == 75_290
    assert found.crossing == (0, 32 * 32 * 16, 16 * 16 * 32)
    assert found.as_dict(2)["stages"][1]["bytes_crossing"] == 2 * 32 * 32 * 16


def test_of_equally_fast_cuts_the_one_with_fewer_values_is_taken():
    costs = [0.0] * len(TOY.nodes)
    costs[0] = costs[-1] = 1.0  # anything between may open the second stage
    assert advise(TOY, 2, costs, "time").crossing == (0, min(crossing_values(TOY, i) for i in range(1, 8)))


def test_more_stages_than_places_where_one_value_crosses_cut_inside_blocks():
    count = len(RESNET8.nodes)
    found = advise(RESNET8, count, [1.0] * count, "time")
    assert len(found.splits) == count - 1 and max(found.shares) == pytest.approx(1 / count)


def test_the_old_rule_cuts_where_weights_and_moving_averages_first_reach_their_share():
    found = advise_by_parameters(RESNET8, 2, [float(node.flops) for node in RESNET8.nodes])
    held = {
        node.name: node.weights + 2 * node.shape[-1] * (node.kind == "batch norm") for node in RESNET8.nodes
    }
    names, (split,) = list(held), found.splits
    place, half = names.index(split), sum(held.values()) / 2
    assert sum(held[name] for name in names[:place]) < half <= sum(held[name] for name in names[: place + 1])
    assert (
        advise_by_parameters(TOY, 5, [1.0] * len(TOY.nodes)) is None
    )  # its last layer has most: named twice


@pytest.mark.parametrize("stages", [0, 99])
def test_more_stages_than_layers_are_one_line(stages):
    with pytest.raises(OptionError, match=f"^--stages {stages}: toy_model_bn has 8 layers; give 1 to 8$"):
        check_stages(TOY, stages)


def test_time_is_measured_for_every_layer_and_alike_runs_once(monkeypatch):
    timed = []

    def seconds(network, policy, params, samples, start, stop):
        timed.append((start, stop))
        return float(stop - start)

    monkeypatch.setattr(split_advice, "_time", seconds)
    network = build("cifar_resnet20", (32, 32, 3), 10)
    found = measure_layers(network, parse("32.32"), 4)
    assert len(found) == len(network.nodes) and sum(found) == pytest.approx(len(network.nodes))
    assert len(timed) == len(set(timed)) < sum(map(network.may_split, range(len(network.nodes))))


def test_a_plan_in_stages_counts_the_images_that_lie_on_every_stages_device():
    """A replica's of an update, and of the next; in bytes, as that configuration sends them."""
    preset = ("--config", "resnet50_8k_bn_pipeline")
    job = job_of(*preset, devices=16)
    assert (job.batch.replicas, job.stages) == (4, 4)
    assert _image_bytes(job) == 2 * 2048 * 224 * 224 * 3 == 2 * 294 * 2**20
    small = job_of(*preset, "--dataset", "cifar10", "--synthetic-data", "host", devices=16)
    updates = min(small.plan.updates_per_call, 2**28 // (8192 * 32 * 32 * 3))  # what fits a call's buffer
    assert updates > 1 and _image_bytes(small) == 2 * updates * 2048 * 32 * 32 * 3
    assert _image_bytes(replace(job, repeated=True)) == 16 * 224 * 224 * 3
    assert _image_bytes(job_of(*preset, "--dataset", "cifar10", devices=16)) == 0


@pytest.mark.slow
def test_a_short_measurement_finds_positive_times():
    found = measure_layers(TOY, parse("32.32"), 2)
    assert len(found) == len(TOY.nodes) and min(found) > 0
