"""What would run (`--plan`), and what a network is made of (`hotloop cnn describe`), without running it."""

from collections.abc import Set
from math import prod
from typing import Any

import jax

from hotloop.data.catalogue import known_set
from hotloop.data.dataset import read_images
from hotloop.data.local_files import check_named_folders, find_set
from hotloop.families.cnn import model
from hotloop.families.cnn.command_options import DescribeConfig
from hotloop.families.cnn.job import Job, resolve
from hotloop.families.cnn.network import DEPTHS, Network, build
from hotloop.families.cnn.options import DATASET_SIZES, TrainConfig
from hotloop.families.cnn.sources import folder_of, open_store, resident_images

_HEADINGS = ("layer", "kind", "output", "parameters", "MFLOP", "stage may begin")


def describe_plan(config: TrainConfig, given: Set[str], configured: Set[str]) -> tuple[Job, str]:
    """The job, and what its plan does not say: network, types, rates and memory on the device."""
    # What the files hold, where they are here already: a plan fetches nothing.
    size, folder = DATASET_SIZES[config.dataset], folder_of(config)
    if not config.synthetic_data and config.dataset != "imagenet":
        check_named_folders(folder)
        found = find_set(known_set(config.dataset), folder)
        size = resident_images(read_images(found)).size if found and found.loadable else size
    elif not config.synthetic_data and folder is not None:
        train, validation = (len(open_store(folder, part)) for part in ("train", "validation"))
        size = size._replace(train=train, validation=validation)
    repeated = config.synthetic_data == "device"
    job = resolve(config, size, None, given, configured, repeated=repeated)
    state = jax.eval_shape(lambda: model.init(job, jax.random.key(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    sizes = sum(prod(node.shape) for node in job.network.nodes)
    activations = job.batch.micro * sizes * job.policy.compute.itemsize
    lines = [
        f"{config.model_name} on {config.dataset}, {parameters:,} parameters, "
        f"{job.policy.compute}.{job.policy.update}, {config.optimizer}",
        # State, gradients and new state; every activation and its gradient.
        f"memory on the device: about {(3 * held + 2 * activations) / 2**20:,.0f} MiB a replica",
    ]
    if job.plan is not None and job.rate is not None:
        total = job.plan.total_updates
        at = sorted({0, total // 4, total // 2, total - 1})
        rates = ", ".join(f"{float(job.rate(n)):.6g} at {n}" for n in at)
        lines.append(f"learning rate ({config.lr_schedule}): {rates}")
    if job.validation is not None:
        count = job.validation
        lines.append(
            f"validation: {count.samples:,} images in {count.batches} batches of {count.batch} ({count.padding} padded)"
        )
    return job, "\n".join(lines)


def describe_model(config: DescribeConfig) -> tuple[str, dict[str, Any]]:
    """A table for people, and its facts."""
    size = DATASET_SIZES[config.dataset or ("imagenet" if config.model in DEPTHS else "cifar10")]
    return describe_network(build(config.model, size.shape, size.classes))


def describe_network(network: Network) -> tuple[str, dict[str, Any]]:
    """The layers in order, one a line, under a line that sums them up; and the same as facts."""
    rows, layers = [_HEADINGS], []
    for i, node in enumerate(network.nodes):
        weights, flops, may_split = node.weights, node.flops, network.may_split(i)
        figures = (f"{weights:,}" if weights else "", f"{flops / 1e6:,.3f}" if flops else "")
        rows.append((node.name, node.kind, _size(node.shape), *figures, "yes" if may_split else ""))
        about = {"name": node.name, "kind": node.kind, "shape": list(node.shape)}
        layers.append(about | {"parameters": weights, "flops": flops, "may_split": may_split})
    parameters = sum(node.weights for node in network.nodes)
    facts = {"model": network.model, "parameters": parameters, "flops": network.flops, "layers": layers}
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    lines = [
        f"{network.model} ({network.variant}), images {_size(network.shape)}, {network.classes:,} classes: "
        f"{parameters:,} parameters, {network.flops / 1e9:.3f} GFLOP an image forward",
        "",
    ]
    for row in rows:
        cells = [
            cell.rjust(width) if heading in ("parameters", "MFLOP") else cell.ljust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines), facts


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
