"""Made-up images are the same for every split of the same global batch: replicas, accumulation, stages."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from cnn_in_processes import TwoNorms
from cnn_words import job_of
from scipy.stats import norm

from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.families.cnn import model
from hotloop.families.cnn.options import DatasetSize
from hotloop.families.cnn.sources import synthetic_images

SIZE, KEY = DatasetSize(200, 8, (4, 4, 3), 5), seed_key(3)
RATE = ("--lr-schedule", "stepped", "--lr-schedule-params", "{boundaries: [], values: [0.05]}")


@cache
def first_state():
    job = job_of("--precision", "32.32", *RATE)
    job = replace(job, network=TwoNorms("two", SIZE.shape, SIZE.classes, job.network.norm))
    return jax.device_get(jax.jit(lambda: model.init(job, KEY))())


def losses(replicas, parts, on_device, splits=(), seed=3):
    """Of two updates."""
    if replicas * (len(splits) + 1) > jax.device_count():
        pytest.skip(f"{replicas * (len(splits) + 1)} devices")
    words = (
        f"--precision 32.32 --micro-batch-size 2 --num-replicas {replicas} --gradient-accumulation {parts}"
    )
    job = job_of(*words.split(), *RATE, devices=replicas)
    network = TwoNorms("two", SIZE.shape, SIZE.classes, job.network.norm)
    job = replace(job, size=SIZE, network=network, repeated=on_device, splits=splits)
    feed = synthetic_images(SIZE, seed=seed, on_device=on_device).feed(job)
    program = Program(model.update(job), feed, 2, KEY)
    return program(model.spread(job, copy_state(first_state())), 0, 2)[1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_replicas_parts_and_stages_train_on_the_same_made_up_micro_batches(on_device):
    whole = losses(1, 4, on_device)
    assert np.isfinite(whole).all() and (whole > 0).all()
    for replicas, parts, splits in ((4, 1, ()), (2, 2, ("conv",))):
        np.testing.assert_allclose(losses(replicas, parts, on_device, splits), whole, rtol=1e-6)


@pytest.mark.parametrize("on_device", [False, True])
def test_pixels_are_normal_numbers_cut_off_at_black_and_white(on_device):
    job = job_of("--micro-batch-size", "250", *RATE)
    size = DatasetSize(1000, 8, (32, 32, 3), 5)
    feed = synthetic_images(size, seed=3, on_device=on_device).feed(job)
    pixels = np.asarray(jax.device_get(feed.batch(feed.arguments(0, 1), jax.numpy.int32(0))["image"]))
    assert pixels.dtype == np.uint8
    above = norm.sf((np.arange(256) - 127) / 60)  # of the share that is as bright or brighter
    expected = np.append(above, 0)[:-1] - np.append(above[1:], 0)
    expected[0] += 1 - above[0]
    found = np.bincount(pixels.ravel(), minlength=256) / pixels.size
    assert np.abs(found - expected).max() < 5 * np.sqrt(expected.max() / pixels.size)


def first_batch(micro, replicas, parts, on_device):
    """The images of a global batch of 8, micro-batch after micro-batch of each replica, as the host has them."""
    words = f"--micro-batch-size {micro} --num-replicas {replicas} --gradient-accumulation {parts}"
    job = replace(job_of(*words.split(), devices=replicas), size=SIZE, repeated=on_device)
    feed = synthetic_images(SIZE, seed=3, on_device=on_device).feed(job)
    given = feed.arguments(0, 1)
    if on_device:
        shares = np.asarray(given["image"]).reshape(replicas, 1, micro, -1)
        return np.tile(shares, (1, parts, 1, 1)).reshape(8, -1)
    feed.close()
    return np.asarray(given["batches"]["image"]).reshape(8, -1)


@pytest.mark.parametrize("on_device", [False, True])
def test_replicas_and_parts_see_the_same_made_up_images_and_with_device_another_micro_batch_others(on_device):
    whole = first_batch(2, 1, 4, on_device)
    for replicas, parts in ((4, 1), (2, 2)):
        if replicas <= jax.device_count():
            np.testing.assert_array_equal(first_batch(2, replicas, parts, on_device), whole)
    assert len(np.unique(whole, axis=0)) == (2 if on_device else 8)
    assert np.array_equal(first_batch(4, 1, 2, on_device), whole) is not on_device


@pytest.mark.slow
def test_other_made_up_images_have_other_losses():
    assert np.abs(losses(1, 4, True, seed=4) - losses(1, 4, True)).max() > 1e-3
