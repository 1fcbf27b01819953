"""Which stages and replicas run on which devices: as asked for where there are enough, else merged and accumulated."""

from itertools import product
from typing import get_args, get_type_hints

import jax
import pytest
from cnn_words import job_of

from hotloop.engine.pipeline_table import SCHEDULES
from hotloop.engine.plan import Batch
from hotloop.errors import HotloopError
from hotloop.families.cnn import job as jobs
from hotloop.families.cnn import model
from hotloop.families.cnn.description import _bytes_on_device
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.placement import DEVICES_PER_REPLICA, check_placement, place

SPLITS = ("conv2_block2_out", "conv3_block1_out", "conv4_block2_out")
PRESET = ("--config", "resnet50_16ipus_8k_bn_pipeline")


def error(*words, devices=1):
    with pytest.raises(HotloopError) as caught:
        job_of(*words, devices=devices)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def merging(job):
    return [notice for notice in job.notices if "merge" in notice or "become" in notice]


def test_the_orders_to_choose_from_are_the_engines():
    assert get_args(get_type_hints(TrainConfig)["pipeline_schedule"]) == SCHEDULES


def test_with_enough_devices_stages_have_one_each_and_nothing_is_said():
    made = job_of(*PRESET, devices=16)
    assert (made.splits, made.stages, made.batch) == (SPLITS, 4, made.asked)
    assert merging(made) == []
    assert job_of(*PRESET, "--strict-devices", devices=17).splits == SPLITS


@pytest.mark.parametrize(("devices", "batch"), [(15, (16, 4, 128)), (4, (16, 4, 128)), (3, (16, 2, 256))])
def test_with_too_few_stages_merge_before_replicas_accumulate(devices, batch):
    made = job_of(*PRESET, devices=devices)
    assert (made.splits, made.batch) == ((), Batch(*batch))
    (said,) = merging(made)
    assert said.startswith(
        f"4 replicas x 4 devices for 4 stages on {devices} devices: 4 stages merge into one; "
    )
    assert ("replicas become" in said) == (devices < 4)
    assert said.endswith("the global batch 8192 and the learning rate stay")


@pytest.mark.parametrize(
    ("mapping", "splits"),
    [
        ("0 1 2 3", SPLITS),
        ("3 2 1 0", SPLITS),
        ("0 0 1 1", SPLITS[1:2]),
        ("0 1 1 2", (SPLITS[0], SPLITS[2])),
        ("0 0 0 0", ()),
    ],
)
def test_stages_that_share_a_device_are_one_there(mapping, splits):
    made = job_of(*PRESET, "--device-mapping", *mapping.split(), devices=16)
    assert (made.splits, made.batch.replicas, merging(made)) == (splits, 4, [])


def test_stages_of_a_device_that_do_not_follow_each_other_merge_and_say_so():
    made = job_of(*PRESET, "--device-mapping", "0", "1", "0", "1", devices=16)
    assert made.splits == ()
    (said,) = merging(made)
    assert "4 stages merge into one, as those of one device do not follow each other" in said
    refused = error(*PRESET, "--device-mapping", "0", "1", "0", "1", "--strict-devices", devices=16)
    assert (
        "--strict-devices: --device-mapping 0 1 0 1: the stages of one device do not follow each" in refused
    )


def test_a_split_over_which_several_values_go_is_taken():
    words = ("--model", "cifar_resnet8", "--pipeline-splits", "conv2_block1_layer1_relu")
    made = job_of(*words, devices=2)
    (split,) = made.splits
    place = [node.name for node in made.network.nodes].index(split)
    assert len(made.network.crossing(place)) == 2


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        ("4", PRESET, ""),
        ("1", ("--model", "toy_model"), ""),
        (
            "2",
            PRESET,
            "--ipus-per-replica 2: the 4 stages of a replica take 4 devices (--pipeline-splits, --device-mapping)",
        ),
        ("2", ("--model", "toy_model"), "--ipus-per-replica 2: the 1 stage of a replica takes 1 device "),
    ],
)
def test_a_launchers_devices_of_a_replica_must_be_those_of_its_stages(monkeypatch, given, words, message):
    monkeypatch.setenv(DEVICES_PER_REPLICA, given)
    if message:
        assert message in error(*words, devices=16)
    else:
        assert job_of(*words, devices=16)


@pytest.mark.parametrize(
    ("words", "devices", "processes", "found"),
    [
        (PRESET, 16, 16, (4, 4)),  # a stage each
        (PRESET, 16, 2, (4, 4)),
        (PRESET, 8, 2, (4, 1)),
        (PRESET, 2, 2, (2, 1)),
        (
            PRESET,
            17,
            17,
            "--num-instances 17: more than replicas (4) x devices a replica (4); ask for at most 16",
        ),
        (PRESET, 15, 3, "--num-replicas 4: 3 instances do not divide them; ask for a multiple of 3"),
        ((*PRESET, "--gradient-accumulation", "3"), 3, 3, "--num-replicas 4: 3 instances do not divide them"),
        (PRESET, 12, 12, "--num-replicas 4: 12 instances do not divide them"),
        (("--model", "toy_model"), 2, 2, "--num-instances 2: more than replicas (1) x devices a replica (1)"),
        (
            (*PRESET, "--num-replicas", "1"),
            2,
            2,
            "--num-instances 2: 1 replicas with their stages merged do not spread evenly over 2 processes",
        ),
        (
            ("--num-replicas", "6", "--dbn-replica-group-size", "2", "--strict-devices", "False"),
            4,
            2,
            "--num-instances 2: 3 groups of 2 replicas do not spread evenly over 2 processes; start a number of them "
            "that divides the groups",
        ),
        (("--num-replicas", "16", "--strict-devices", "False"), 2, 2, (2, 1)),
        (
            ("--num-replicas", "16", "--strict-devices"),
            2,
            2,
            "--strict-devices: 16 replicas need 16 devices and there",
        ),
    ],
)
def test_processes_take_equally_many_devices_or_are_refused(monkeypatch, words, devices, processes, found):
    monkeypatch.setattr(jobs.processes, "count", lambda: processes)
    if isinstance(found, str):
        assert found in error(*words, devices=devices)
    else:
        made = job_of(*words, devices=devices)
        assert (made.batch.replicas, made.stages) == found
        assert made.batch.global_ == made.asked.global_


@pytest.mark.parametrize(("instances", "words", "said"), [
    (16, (), True), (8, (), True), (4, (), False), (1, (), False), (16, ("--pipeline-validation-model",), False),
])  # fmt: skip
def test_stages_in_several_processes_validate_merged_and_say_so(monkeypatch, instances, words, said):
    monkeypatch.setattr(jobs.processes, "count", lambda: instances)
    made = job_of(*PRESET, *words, devices=16)
    assert (
        any("stages lie in several processes: validation runs merged" in line for line in made.notices)
        == said
    )
    assert made.validates_in_stages == bool(words)


@pytest.mark.parametrize(("words", "devices", "numbers"), [
    ("", 1, 2 * (3600 + 144 + 288 + 8 + 8 + 10)),
    ("--pipeline-splits conv2d_1", 1, 2 * (3600 + 144 + 288 + 8 + 8 + 10)),
    ("--pipeline-splits conv2d_1 --recomputation", 1, 2 * (3600 + 144) + 144),
])  # fmt: skip
def test_the_memory_of_a_plan_is_that_of_activations_and_gradients_by_hand(words, devices, numbers):
    precise = ("--micro-batch-size", "2", "--precision", "32.32")
    job = job_of(*precise, *words.split(), devices=devices)
    state = jax.eval_shape(lambda: model.init(job, jax.random.key(0)))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert held >= 4 * 242
    assert _bytes_on_device(job, state) == 3 * held + 2 * 4 * numbers


def test_wherever_a_run_is_placed_its_batch_stays_and_strict_devices_change_nothing():
    layers, placed_as_asked, placed_otherwise = ["conv2d_0", "conv2d_1", "dense"], 0, 0
    choices = product((1, 2, 3, 4, 6), (1, 3), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 3), (False, True))
    for replicas, parts, group, stages, each, instances, strict in choices:
        if replicas % group or (group > 1 and stages > 1):
            continue
        config = TrainConfig(
            num_replicas=replicas,
            gradient_accumulation_count=parts,
            dbn_replica_group_size=group,
            pipeline_splits=tuple(layers[1:stages]),
            strict_devices=strict,
        )
        devices, needed = each * instances, replicas * stages
        try:
            asked = check_placement(config, layers, frozenset(), instances)
        except HotloopError:
            assert instances > 1
            continue
        try:
            placed = place(config, asked, devices, frozenset(), instances)
        except HotloopError:
            assert needed > devices and (strict or instances > 1)
            continue
        assert placed.batch.global_ == asked.batch.global_
        assert placed.devices <= devices and placed.devices % instances == 0
        as_asked = (placed.batch, placed.splits) == (asked.batch, config.pipeline_splits)
        assert as_asked == (needed <= devices) == (not placed.notices)
        placed_as_asked += as_asked
        placed_otherwise += not as_asked
    assert placed_as_asked > 100 and placed_otherwise > 100
