"""A network in stages that fits on no device: it is drawn, restored and validated without one that holds all of it."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cnn_words import job_of

from device_room import watch_devices
from hotloop.engine.checkpoint import Checkpoints, RunCheckpoints
from hotloop.engine.keys import seed_key
from hotloop.engine.sinks import Announcer
from hotloop.families.cnn import model, train
from hotloop.families.cnn.presets import FAMILY
from hotloop.families.cnn.saved_network import SavedNetwork
from hotloop.layers import initial
from listener import Listener

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
KEY = seed_key(3)
SPLITS = "conv4_block1_layer1_conv_ds conv4_block2_layer1_conv conv4_block3_layer1_conv"
WORDS = (
    f"--model-name cifar_resnet20 --dataset cifar10 --pipeline-splits {SPLITS} --pipeline-validation-model "
    "--precision 32.32 --synthetic-data host"
)
LARGEST = 0.28  # of all parameters: what the largest of the stages has


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(initial, "PIECE", 2**14)
    return job_of(*WORDS.split(), "--optimizer-params", "{momentum: 0.9}", devices=4)


@pytest.mark.slow
def test_a_network_in_stages_is_drawn_without_a_device_that_holds_more_than_two_copies_of_a_stage(job):
    with watch_devices() as most:
        state = model.start(job, KEY)
    whole = model.init(job, KEY)
    size = bytes_of((whole["params"], whole["optimiser"]))
    assert size > 2e6
    assert all(0.9 * LARGEST * size < held < 2 * LARGEST * size for held in most.values()), (most, size)
    with watch_devices() as undivided:
        model.init(job, KEY)
    assert max(undivided.values()) > size  # the watch sees what it must
    for one, other in zip(jax.tree.leaves(model.gather(state)), jax.tree.leaves(whole), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == np.asarray(other).tobytes()
    assert jax.tree.structure(model.gather(state)) == jax.tree.structure(whole)


@pytest.mark.parametrize("saved", [pytest.param(True, marks=pytest.mark.slow), False])
def test_validation_in_stages_needs_no_device_that_holds_the_network(job, saved, tmp_path):
    """By a checkpoint, and with random weights."""
    whole = model.random_weights(job, KEY)
    if saved:
        SavedNetwork(job.network, "cifar10", "32.32", "bfloat16", 1.0).write(tmp_path)
        with Checkpoints(tmp_path, family=FAMILY) as checkpoints:
            checkpoints.save(5, whole, position={})
    own = RunCheckpoints(tmp_path, None, FAMILY)
    seen = []

    def evaluation(fn, batch, sharding):
        def sums(weights):
            seen.append(model.gather(weights))
            return {"correct": 1, "correct_top": 1, "loss": 1.0, "samples": 2}

        return sums

    with watch_devices() as most, Announcer([]) as record:
        source = SimpleNamespace(evaluation=evaluation)
        train.validate(job, source, Listener(), record, own, own if saved else None, None)
    size = bytes_of(whole)
    assert all(0.9 * LARGEST * size < held < 2 * LARGEST * size for held in most.values()), (most, size)
    (found,) = seen
    if saved:
        assert jax.tree.structure(found) == jax.tree.structure(whole)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
            assert one.tobytes() == other.tobytes()
