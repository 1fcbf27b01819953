"""Replicas that share batch-norm statistics: by sums over devices they are what one larger micro-batch is."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from cnn_in_processes import TwoNorms
from cnn_words import job_of

from hotloop.engine.keys import seed_key
from hotloop.engine.plan import Batch
from hotloop.families.cnn import model
from hotloop.families.cnn.options import DatasetSize
from hotloop.families.cnn.sources import synthetic_images
from same_numbers import assert_same_but_for, share_apart, with_moved_weight, with_other_label

KEY, SIZE = seed_key(3), DatasetSize(64, 8, (4, 4, 3), 5)
WORDS = (
    *("--precision", "32.32", "--optimizer-params", "{momentum: 0.9}"),
    *("--lr-schedule", "stepped", "--lr-schedule-params", "{boundaries: [], values: [0.05]}"),
    *("--micro-batch-size", "2", "--num-replicas", "4", "--strict-devices", "False"),
)
PARTS = "--gradient-accumulation 3"


def job_on(devices, words=""):
    if devices > jax.device_count():
        pytest.skip(f"{devices} devices")
    job = job_of(*WORDS, *words.split(), devices=devices)
    return replace(job, size=SIZE, network=TwoNorms("two", SIZE.shape, SIZE.classes, job.network.norm))


def global_batch(job):
    """Images whose brightness differs by a factor of eight: it matters with whom one shares statistics."""
    draws, count = np.random.default_rng(5), job.batch.global_
    pixels = draws.integers(0, 256, (count, *SIZE.shape)) // draws.integers(1, 9, (count, 1, 1, 1))
    labels = draws.integers(0, SIZE.classes, count)
    return {"image": pixels.astype(np.uint8), "label": labels.astype(np.int32)}


QUICK = {"xla_backend_optimization_level": 0}


@cache
def compiled(job):
    return jax.jit(model.update(job), compiler_options=QUICK)


@cache
def first_state():
    job = job_on(1)
    return jax.device_get(jax.jit(lambda: model.init(job, KEY), compiler_options=QUICK)())


def trained(job, batch=None, state=None, updates=2):
    """Parameters, statistics and the last figures after some updates."""
    batch, state = batch or global_batch(job), state or first_state()
    for number in range(updates):
        state, figures = compiled(job)(state, batch, jax.random.fold_in(KEY, number))
    return jax.device_get((state["params"], state["statistics"], figures))


def controls(job):
    """The same with another label, and with a weight that has moved."""
    batch = with_other_label(global_batch(job), SIZE.classes, 0)
    moved = with_moved_weight(first_state(), "params", "conv", "kernel", by=1e-3)
    return {"label": trained(job, batch), "weight": trained(job, state=moved)}


@pytest.mark.parametrize(
    ("words", "devices", "split", "group"),
    [
        pytest.param("--dbn-replica-group-size 2", 4, Batch(2, 4, 1), 2, marks=pytest.mark.slow),
        (f"--dbn-replica-group-size 2 {PARTS}", 4, Batch(2, 4, 3), 2),
        pytest.param(f"--dbn-replica-group-size 4 {PARTS}", 2, Batch(4, 2, 3), 2, marks=pytest.mark.slow),
    ],
)
def test_a_group_on_devices_is_a_larger_micro_batch_on_one(words, devices, split, group):
    merged, spread = job_on(1, words), job_on(devices, words)
    assert (spread.batch, spread.group) == (split, group)
    assert (merged.batch.replicas, merged.group) == (1, 1)
    found, wanted = trained(spread), trained(merged)
    for params, statistics, _ in (found, wanted):
        assert all(np.any(leaf) for leaf in jax.tree.leaves((params, statistics)))
    assert_same_but_for(found, wanted, 1e-6, **controls(spread))


@pytest.mark.slow
def test_replicas_that_do_not_share_statistics_are_trained_otherwise():
    spread = job_on(4, f"--dbn-replica-group-size 2 {PARTS}")
    assert share_apart(trained(replace(spread, group=1)), trained(spread)) > 1e-4


@pytest.mark.slow
def test_recomputation_in_parts_shares_statistics_too():
    words = f"--dbn-replica-group-size 2 {PARTS}"
    plain, again = (job_on(4, words) for _ in range(2))
    again = replace(
        again,
        config=replace(again.config, pipeline_splits=("conv",), device_mapping=(0, 0), recomputation=True),
    )
    assert_same_but_for(trained(again), trained(plain), 1e-6, **controls(again))


def test_groups_take_every_device_that_there_is_and_merge_on_fewer():
    words = ("--config", "resnet50_mlperf_bs16")
    on_all = job_of(*words, devices=16)
    assert (on_all.batch, on_all.group, on_all.batch) == (Batch(16, 16, 9), 2, on_all.asked)
    assert not any("share statistics" in notice for notice in on_all.notices)
    assert on_all.groups.places == tuple((first, first + 1) for first in range(0, 16, 2))
    for devices, split in ((15, Batch(32, 8, 9)), (8, Batch(32, 8, 9)), (1, Batch(32, 1, 72))):
        merged = job_of(*words, devices=devices)
        assert (merged.batch, merged.group, merged.groups) == (split, 1, None)
        assert "2 replicas that share statistics become a micro-batch of 32" in merged.notices[0]
    some = job_of(
        "--num-replicas", "16", "--dbn-replica-group-size", "8", "--strict-devices", "False", devices=8
    )
    assert (some.batch, some.group) == (Batch(2, 8, 1), 4)
    assert "2 replicas that share statistics become a micro-batch of 2" in some.notices[0]


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_made_up_images_are_the_same_for_groups_on_devices_and_for_the_merged(on_device):
    """Seen by the network: the losses of two updates."""
    losses = []
    for devices in (4, 1):
        job = replace(job_on(devices, f"--dbn-replica-group-size 2 {PARTS}"), repeated=on_device)
        feed = synthetic_images(SIZE, seed=3, on_device=on_device).feed(job)
        batch = jax.tree.map(np.asarray, feed.batch(feed.arguments(0, 1), np.uint32(0)))
        losses.append(float(trained(job, batch)[2]["loss"]))
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-6) and np.isfinite(losses[0]) and losses[0] > 0
