"""What several processes compute together, for tests: started by `test_cnn_processes`, which computes the same alone.

Not a test: `python cnn_in_processes.py FOLDER-OF-PHOTOGRAPHS` prints what process 0 has, as JSON.
"""

import json
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from changed_runs import WAYS, changed
from cnn_words import job_of, typed
from jax.sharding import NamedSharding

from hotloop.engine import processes
from hotloop.engine.device import device_mesh, setup
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.engine.plan import Batch
from hotloop.engine.precision import EVERYWHERE, SPLIT
from hotloop.families.cnn import model, speed
from hotloop.families.cnn.network import INPUT, Network, NetworkBuilder
from hotloop.families.cnn.options import DatasetSize
from hotloop.families.cnn.photographs import UNSEEN, PhotoReader
from hotloop.families.cnn.sources import open_source, synthetic_images
from listener import Listener
from metrics_toy import SPLITS, losses_and_metrics

BATCHES = (256, 1728, 1840)
UPDATES = 2


class TwoNorms(Network):
    """A convolution between two norms, so that what the second one hands back is seen by the first."""

    epsilon = 1e-5

    @cached_property
    def nodes(self):
        builder = NetworkBuilder(self.shape, self.norm, self.epsilon)
        x = builder.relu("relu", builder.norm("bn_0", INPUT))
        x = builder.norm("bn_1", builder.conv("conv", x, 4, 3))
        builder.logits("dense", builder.flatten("flatten", x), self.classes)
        return tuple(builder.nodes)


def over(devices):
    return NamedSharding(device_mesh(devices), SPLIT) if devices > 1 else None


def validation_counts(devices):
    """Of 50,000 made-up images in the old batches, and of three."""

    def fn(state, batch):
        return {"right": batch["image"][:, 0, 0, 0] % 10 == batch["label"], "label": batch["label"]}

    def sums(images, batch):
        source = synthetic_images(DatasetSize(60, images, (1, 1, 1), 10), seed=1, on_device=True)
        return source.evaluation(fn, batch, over(devices))(None)

    return [*(sums(50_000, batch) for batch in BATCHES), sums(3, 2)]


def photograph_figures(folder, devices):
    """Sums over validation photographs in batches of two, the labels of a training batch of four, and which images
    each process decoded for both."""
    words = f"--dataset imagenet --dataset-path {folder} --micro-batch-size 1 --num-replicas 4 --norm-layer"
    words = (
        *words.split(),
        "{name: batch_norm}",
        "--weight-updates-per-epoch",
        "1",
        "--strict-devices",
        "False",
        "--pipeline-num-parallel",
        "1",  # in this process, where decoding is watched
    )

    def fn(state, batch):
        return {"second": batch["label"] == 1, "bright": state * batch["image"].mean((1, 2, 3))}

    with watch_decoding() as decoded, open_source(typed(*words).config, Listener(), seed=3) as source:
        sums = source.evaluation(fn, 2, over(devices))(1.0)
        feed = source.feed(job_of(*words, devices=devices))
        batches = feed.arguments(0, 1)["batches"]
        labels = processes.fetch(batches["label"])[0].tolist()
        bright = processes.fetch(batches["image"]).mean(dtype=float)
    return {**sums, "labels": labels, "pixels": bright, "decoded": processes.gathered(decoded)}


@contextmanager
def watch_decoding():
    """Which images this process decodes, and for what; those of which it reads the label alone are not among them."""
    decoded, plain = [], PhotoReader.image

    def watched(reader, number, epoch=0):
        if epoch != UNSEEN:
            decoded.append(("train" if reader.training else "validation", number))
        return plain(reader, number, epoch)

    PhotoReader.image = watched
    try:
        yield decoded
    finally:
        PhotoReader.image = plain


def photographs_in_stages(folder, devices):
    """The losses of two updates and the sums of a validation, in four stages where there are devices for them, and
    which images each process decoded."""
    words = f"--dataset imagenet --dataset-path {folder} --micro-batch-size 1 --num-replicas 4 "
    words += "--precision 32.32 --strict-devices False --pipeline-num-parallel 1 --weight-updates-per-epoch 1"
    rate = ("--lr-schedule", "stepped", "--lr-schedule-params", "{boundaries: [], values: [0.05]}")
    splits = ("relu", "conv", "dense") if devices == 4 else ()
    job = job_of(*words.split(), *rate, devices=devices)
    config = replace(job.config, pipeline_splits=splits)
    network = TwoNorms("two", (224, 224, 3), 2, job.network.norm)
    job = replace(job, config=config, network=network, splits=splits, batch=Batch(2, 1, 2))
    weights = model.random_weights(job, seed_key(3))
    with watch_decoding() as decoded, open_source(config, Listener(), seed=3) as source:
        compute = model.evaluate_stages(job) if splits else model.evaluate(job)
        placed = model.spread_weights(job, weights) if splits else weights
        sums = source.evaluation(compute, 8, job.sharding)(placed)
        feed = source.feed(job)
        program = Program(model.update(job), feed, 1, seed_key(3))
        state, losses = copy_state(model.start(job, seed_key(3))), []
        for number in range(2):
            state, metrics = program(state, number, 1, following=0)
            losses += metrics["loss"].tolist()
    return {**sums, "losses": losses, "decoded": processes.gathered(decoded)}


def trained_in_groups(devices, way=None):
    """Parameters, statistics and losses after some updates of four replicas that share statistics all together; in a
    `way` of `changed_runs`."""
    with changed(way, update=0) if way else nullcontext():
        return _trained_in_groups(devices)


def _trained_in_groups(devices):
    size = DatasetSize(64, 8, (4, 4, 3), 5)
    rate = ("--lr-schedule", "stepped", "--lr-schedule-params", "{boundaries: [], values: [0.05]}")
    words = "--precision 32.32 --micro-batch-size 2 --num-replicas 4 --dbn-replica-group-size 4 "
    words += "--gradient-accumulation 2 --strict-devices False"
    job = job_of(*words.split(), *rate, devices=devices)
    job = replace(job, size=size, network=TwoNorms("two", size.shape, size.classes, job.network.norm))
    state = jax.device_get(model.init(job, seed_key(3)))
    if job.mesh is not None:
        state = processes.place(state, NamedSharding(job.mesh, EVERYWHERE))
    with synthetic_images(size, seed=3, on_device=False).feed(job) as feed:
        program = Program(model.update(job), feed, UPDATES, seed_key(3))
        state, metrics = program(copy_state(state), 0, UPDATES)
        losses = metrics["loss"].tolist()
    numbers = processes.fetch((state["params"], state["statistics"]))
    leaves = [np.ravel(leaf).tolist() for leaf in jax.tree.leaves(numbers)]
    return {"group": job.group, "losses": losses, "numbers": leaves}


def everything(folder, devices):
    counts = validation_counts(devices)
    found = {"counts": counts, "photographs": photograph_figures(folder, devices)}
    found["staged"] = photographs_in_stages(folder, devices)
    found["groups"] = trained_in_groups(devices)
    if processes.count() == 1:
        found["changed groups"] = [trained_in_groups(devices, way) for way in WAYS]
    split = next(split for split in SPLITS if split[1] == devices)
    found["toy"] = losses_and_metrics(split)
    return {**found, "memory": speed.peak_memory(), "processes": processes.count()}


if __name__ == "__main__":
    setup("cpu")
    found = everything(Path(sys.argv[1]), len(jax.devices()))
    if processes.is_writer():
        print(json.dumps(found))
    processes.end()
