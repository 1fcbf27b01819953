"""What would run, and what a network is made of, without running it."""

from collections.abc import Set
from pathlib import Path
from typing import Any

import jax

from hotloop.data.catalogue import known_set
from hotloop.data.dataset import read_images
from hotloop.data.local_files import check_named_folders, find_set, is_loadable
from hotloop.families.cnn import model
from hotloop.families.cnn.config import Train
from hotloop.families.cnn.describe import describe, flops_per_image
from hotloop.families.cnn.model import Job
from hotloop.families.cnn.network import build
from hotloop.families.cnn.resnet import DEPTHS
from hotloop.families.cnn.settings import SAMPLES, Samples, Settings
from hotloop.families.cnn.small_config import Describe
from hotloop.families.cnn.sources import Small, folder_of
from hotloop.families.cnn.streaming import open_store
from hotloop.families.cnn.work import settled


def described(config: Train, given: Set[str], configured: Set[str]) -> tuple[Settings, str]:
    """The settings, and what the plan does not say: network, types, rates and memory on the device."""
    settings = settled(config, _samples(config), given, configured)
    job = Job(settings, config.synthetic_data == "device")
    state = jax.eval_shape(lambda: model.init(job, jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    sizes = sum(_values(layer.shape) for layer in job.network.layers)
    activations = settings.batch.micro * sizes * job.policy.compute.itemsize
    lines = [
        f"{settings.model} on {settings.dataset}, {parameters:,} parameters, "
        f"{job.policy.compute}.{job.policy.update}, {settings.optimizer}",
        f"memory on the device: about {(3 * held + 2 * activations) / 2**20:,.0f} MiB a replica",
    ]
    if settings.plan is not None:
        total = settings.plan.total_updates
        at = sorted({0, total // 4, total // 2, total - 1})
        rates = ", ".join(f"{float(job.rate(n)):.6g} at {n}" for n in at)
        lines.append(f"learning rate ({settings.schedule}): {rates}")
    if settings.validation is not None:
        count = settings.validation
        lines.append(
            f"validation: {count.samples:,} images in {count.batches} batches of {count.batch} ({count.padding} padded)"
        )
    return settings, "\n".join(lines)


def _samples(config: Train) -> Samples:
    """What the files hold, where they are here already: a plan fetches nothing."""
    whole = SAMPLES[config.dataset]
    if config.synthetic_data:
        return whole
    if config.dataset != "imagenet":
        known, folder = known_set(config.dataset), folder_of(config)
        check_named_folders(folder)
        found = find_set(known, folder)
        return Small(read_images(known, found)).samples if found and is_loadable(known, found) else whole
    if config.dataset_path == Path():
        return whole
    sizes = [len(open_store(config.dataset_path, part)) for part in ("train", "validation")]
    return Samples(sizes[0], sizes[1], whole.shape, whole.classes)


def _values(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def description(config: Describe) -> tuple[str, dict[str, Any]]:
    """A table for people, and its facts."""
    samples = SAMPLES[config.dataset or ("imagenet" if config.model in DEPTHS else "cifar10")]
    network = build(config.model, samples.shape, samples.classes)
    layers = [
        {
            "name": layer.name,
            "kind": layer.kind,
            "shape": list(layer.shape),
            "parameters": layer.parameters,
            "flops": layer.flops,
            "may_split": layer.may_split,
        }
        for layer in network.layers
    ]
    facts = {
        "model": config.model,
        "parameters": sum(layer.parameters for layer in network.layers),
        "flops": flops_per_image(network),
        "layers": layers,
    }
    return describe(network), facts
