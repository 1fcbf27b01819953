"""What a network is made of, as a table: shapes, parameters, cost, and where a pipeline stage may begin.

What would run, and what a network is made of, without running it.
"""

from collections.abc import Set
from pathlib import Path
from typing import Any

import jax

from hotloop.data.catalogue import known_set
from hotloop.data.dataset import read_images
from hotloop.data.local_files import check_named_folders, find_set
from hotloop.families.cnn import model
from hotloop.families.cnn.command_options import DescribeConfig
from hotloop.families.cnn.job import SAMPLES, DatasetSize, Settings
from hotloop.families.cnn.model import Job
from hotloop.families.cnn.models import DEPTHS
from hotloop.families.cnn.network import LayerInfo, Network, build, flops_per_image
from hotloop.families.cnn.options import Train
from hotloop.families.cnn.sources import ResidentImages, folder_of, open_store
from hotloop.families.cnn.work import resolve_here

_HEADINGS = ("layer", "kind", "output", "parameters", "MFLOP", "stage may begin")


def layer_table(network: Network) -> str:
    """The layers in order, one a line, under a line that sums them up."""
    rows = [_HEADINGS, *(_row(layer) for layer in network.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return "\n".join([_summary(network), "", *(_line(row, widths) for row in rows)])


def _summary(network: Network) -> str:
    parameters = sum(layer.parameters for layer in network.layers)
    return (
        f"{network.model} ({network.variant}), images {_size(network.shape)}, {network.classes:,} classes: "
        f"{parameters:,} parameters, {flops_per_image(network) / 1e9:.3f} GFLOP an image forward"
    )


def _row(layer: LayerInfo) -> tuple[str, ...]:
    return (
        layer.name,
        layer.kind,
        _size(layer.shape),
        f"{layer.parameters:,}" if layer.parameters else "",
        f"{layer.flops / 1e6:,.3f}" if layer.flops else "",
        "yes" if layer.may_split else "",
    )


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.rjust(width) if heading in ("parameters", "MFLOP") else cell.ljust(width)
        for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
    ]
    return "  ".join(cells).rstrip()


def describe_plan(config: Train, given: Set[str], configured: Set[str]) -> tuple[Settings, str]:
    """The settings, and what the plan does not say: network, types, rates and memory on the device."""
    settings = resolve_here(config, _dataset_size(config), given, configured)
    job = Job(settings, config.synthetic_data == "device")
    state = jax.eval_shape(lambda: model.init(job, jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    sizes = sum(_count_values(layer.shape) for layer in job.network.layers)
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


def _dataset_size(config: Train) -> DatasetSize:
    """What the files hold, where they are here already: a plan fetches nothing."""
    whole = SAMPLES[config.dataset]
    if config.synthetic_data:
        return whole
    if config.dataset != "imagenet":
        known, folder = known_set(config.dataset), folder_of(config)
        check_named_folders(folder)
        found = find_set(known, folder)
        return ResidentImages(read_images(found)).samples if found and found.loadable else whole
    if config.dataset_path == Path():
        return whole
    sizes = [len(open_store(config.dataset_path, part)) for part in ("train", "validation")]
    return DatasetSize(sizes[0], sizes[1], whole.shape, whole.classes)


def _count_values(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def describe_model(config: DescribeConfig) -> tuple[str, dict[str, Any]]:
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
    return layer_table(network), facts
