"""What would run (`--plan`), what a network is made of, and where to cut it into stages (`hotloop cnn describe`)."""

from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from math import prod
from typing import Any

import jax

from hotloop.data.catalogue import known_set
from hotloop.data.dataset import read_images
from hotloop.data.local_files import check_named_folders, find_set
from hotloop.data.own_images import open_own_images
from hotloop.engine import precision
from hotloop.engine.batch_sources import BUFFER_BYTES
from hotloop.engine.measure import describe_device
from hotloop.engine.pipeline_table import make_table
from hotloop.families.cnn import model
from hotloop.families.cnn.command_options import DescribeConfig
from hotloop.families.cnn.freezing import describe_frozen
from hotloop.families.cnn.initial_weights import find_origin, own_checkpoints, why_anew
from hotloop.families.cnn.job import Job, resolve
from hotloop.families.cnn.network import DEPTHS, Network, build
from hotloop.families.cnn.options import DATASET_SIZES, PHOTOGRAPHS, DatasetSize, TrainConfig
from hotloop.families.cnn.own_folder import expected_size, is_own, is_resident, pixel_bytes
from hotloop.families.cnn.sources import folder_of, open_store, resident_images
from hotloop.families.cnn.split_advice import (
    MICRO_BATCHES,
    Advice,
    advise,
    advise_by_parameters,
    busy_shares,
    check_stages,
    measure_layers,
)
from hotloop.families.cnn.stages import crossing_values, cut, layers_by_stage

_HEADINGS = ("layer", "kind", "output", "parameters", "MFLOP", "stage may begin")


def describe_plan(config: TrainConfig, given: Set[str], configured: Set[str]) -> tuple[Job, str]:
    """The job, and what its plan does not say: network, types, rates and memory on the device."""
    # What the files hold, where they are here already: a plan fetches nothing.
    size, folder = expected_size(config), folder_of(config)
    if is_own(config):
        pass
    elif not config.synthetic_data and config.dataset != "imagenet":
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
    lines = [
        f"{config.model_name} on {config.dataset}, {parameters:,} parameters, "
        f"{job.policy.compute}.{job.policy.update}, {config.optimizer}"
        + (f", averages of decay {config.ema:g}" if config.ema else ""),
        *describe_augmentation(config),
        f"memory on the device: about {_bytes_on_device(job, state) / 2**20:,.0f} MiB "
        + ("for the largest stage" if job.splits else "a replica"),
    ]
    lines += _describe_own(config, size) if is_own(config) else []
    lines += _describe_beginning(config, job)
    if job.splits:
        table = make_table(config.pipeline_schedule, job.stages, job.batch.accumulation)
        lines.append(
            f"{job.batch.replicas} x {job.stages} devices, stages from {', '.join(job.splits)}; "
            f"{config.pipeline_schedule}: a device works {table.busy_share:.0%} of the time, were all stages as fast"
        )
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


def describe_augmentation(config: TrainConfig) -> list[str]:
    """A line about what is done to training images besides crops and mirroring, where anything is."""
    words = [
        "TrivialAugment" if config.trivial_augment else "",
        f"random erasing of {config.random_erasing:.0%}" if config.random_erasing else "",
        f"mixup {config.mixup:g}" if config.mixup else "",
        f"cutmix {config.cutmix:g}" if config.cutmix else "",
    ]
    return [f"augmentation: {', '.join(filter(None, words))}"] if any(words) else []


def _describe_own(config: TrainConfig, size: DatasetSize) -> list[str]:
    own = open_own_images(config.dataset_path)
    mib, most = pixel_bytes(size) / 2**20, config.resident_mib
    where = "on the device" if is_resident(config, size) else "more than that: streamed"
    return [f"data: {own.describe()}; {mib:,.1f} MiB of pixels, --resident-mib {most}: {where}"]


def _describe_beginning(config: TrainConfig, job: Job) -> list[str]:
    """What the weights begin as, and which of them are trained."""
    lines = []
    if config.init_from is not None and own_checkpoints(config) is None:
        own = open_own_images(config.dataset_path).classes if is_own(config) else ()
        reason = why_anew(find_origin(config.init_from), job.network, own)
        drawn = f"drawn anew ({reason})" if reason else "taken over"
        lines.append(f"weights from {config.init_from}; the classifier is {drawn}")
    if config.freeze:
        lines.append(describe_frozen(job.network, config.freeze, job.frozen))
    return lines


def _bytes_on_device(job: Job, state: Any) -> int:
    """State, gradients and new state; activations and their gradients, where they are recomputed those of the largest
    part and what crosses into each; what waits between stages: of the largest stage. With stages also a replica's
    images, which every one has."""
    network, splits = job.network, job.splits
    recomputed = job.config.pipeline_splits if job.config.recomputation else ()
    found: list[int] = []
    table = make_table(job.config.pipeline_schedule, job.stages, job.batch.accumulation)
    size = job.batch.micro * job.policy.compute.itemsize
    every = {node.name for node in network.nodes}
    stages = cut(network, splits, recomputed)
    for stage, layers in zip(stages, layers_by_stage(network, splits), strict=True):
        others = every.difference(layers)
        leaves = jax.tree.leaves_with_path(state)
        own = [leaf for path, leaf in leaves if others.isdisjoint(getattr(key, "key", None) for key in path)]
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in own)
        parts = pairwise((stage.start, *stage.inner, stage.stop))
        activations = max(sum(prod(node.shape) for node in network.nodes[slice(*part)]) for part in parts)
        crossing = sum(crossing_values(network, place) for place in stage.inner)
        waiting = crossing_values(network, stage.start) * (table.slots + table.gradient_slots)
        found.append(3 * held + size * (2 * activations + crossing + (waiting if splits else 0)))
    return max(found) + (_image_bytes(job) if splits else 0)


def _image_bytes(job: Job) -> int:
    """Of what lies on every stage's device: a replica's share of two calls as they stream, or one micro-batch that is
    repeated. A small set lies on every device whether there are stages or not."""
    config, batch, image = job.config, job.batch, prod(job.size.shape)
    if job.repeated:
        return batch.micro * image
    if config.dataset not in PHOTOGRAPHS and not config.synthetic_data:
        return 0
    if is_own(config) and is_resident(config, job.size) and not config.synthetic_data:
        return 0
    is_bytes = config.eight_bit_transfer or config.synthetic_data or is_own(config)
    size = batch.global_ * image * (1 if is_bytes else 4)
    most = job.plan.updates_per_call if job.plan else 1
    return 2 * max(1, min(most, BUFFER_BYTES // size)) * size // batch.replicas


def describe_model(
    config: DescribeConfig, open_device: Callable[[], jax.Device]
) -> tuple[str, dict[str, Any]]:
    """A table for people, and its facts; the device is opened if layers are timed."""
    size = DATASET_SIZES[config.dataset or ("imagenet" if config.model in DEPTHS else "cifar10")]
    network = build(config.model, size.shape, size.classes)
    if config.stages is None:
        return describe_network(network)
    check_stages(network, config.stages)
    device = open_device() if config.measure else None
    text, facts = describe_network(network)
    more, advice = describe_stages(network, config, device)
    return f"{text}\n\n{more}", facts | advice


def describe_stages(
    network: Network, config: DescribeConfig, device: jax.Device | None
) -> tuple[str, dict[str, Any]]:
    """Splits by time, or by FLOPs without a device, and by the old rule; what each stage has; busy shares."""
    stages, policy = config.stages or 1, precision.parse(config.precision)
    if device is None:
        costs, rule = [float(node.flops) for node in network.nodes], "FLOPs"
    else:
        costs, rule = measure_layers(network, policy, config.micro_batch_size), "time"
    best = advise(network, stages, costs, rule)
    old = advise_by_parameters(network, stages, costs)
    how = f"FLOPs, as nothing was measured ({policy.compute})"
    if device is not None:
        images = f"{config.micro_batch_size} image{'s' if config.micro_batch_size > 1 else ''}"
        how = f"time measured on {describe_device(device)} ({policy.compute}, {images})"
    counted = f"{stages} stage{'s' if stages > 1 else ''}"
    lines = [f"{counted} by {how}:", *_stage_rows(network, best, rule, policy.compute.itemsize), ""]
    if old is None:
        lines += [
            "by parameters, as the old program: that rule names the first layer, or one layer twice",
            "",
        ]
    else:
        own = _stage_rows(network, old, rule, policy.compute.itemsize)
        lines += ["by parameters, as the old program recommended:", *own, ""]
    busy = busy_shares(stages)
    rows = [("schedule", *(f"{count} micro-batches" for count in MICRO_BATCHES))]
    rows += [(name, *(f"{share:.0%}" for share in shares.values())) for name, shares in busy.items()]
    lines += ["share of the time that a device works, were all stages as fast:", *_align(rows, 1)]
    # A small set lies on every device anyway.
    if stages > 1 and network.shape == DATASET_SIZES["imagenet"].shape:
        lines += ["", _describe_photographs(prod(network.shape), config.micro_batch_size)]
    facts = {
        "image_bytes": prod(network.shape),
        "recommended": best.as_dict(policy.compute.itemsize),
        "by_parameters": old and old.as_dict(policy.compute.itemsize),
        "busy": busy,
    }
    return "\n".join(lines), facts


def _describe_photographs(image: int, micro: int) -> str:
    """What photographs of so many bytes take of every stage's device, though the first stage alone looks at them."""
    held = [f"{count * micro * image / 2**20:,.1f} MiB for {count}" for count in MICRO_BATCHES]
    return (
        f"a replica's photographs lie on every stage's device, {image:,} bytes each (four times that without "
        f"--eight-bit-transfer): of an update {', '.join(held)} micro-batches of {micro}; and as much again, as those "
        "of the next call are sent meanwhile"
    )


def _stage_rows(network: Network, advice: Advice, rule: str, size: int) -> list[str]:
    """One stage a line, and the option that asks for them."""
    begins = (network.nodes[0].name, *advice.splits)
    rows = [("stage", "begins at", f"share of {rule}", "parameters", "bytes that cross into it, an image")]
    figures = zip(begins, advice.shares, advice.parameters, advice.crossing, strict=True)
    for number, (name, share, parameters, values) in enumerate(figures):
        crossing = f"{size * values:,}" if number else "(the images)"
        rows.append((str(number), name, f"{share:.1%}", f"{parameters:,}", crossing))
    words = [f"--pipeline-splits {' '.join(advice.splits)}"] if advice.splits else []
    return [*_align(rows, 2), *words]


def _align(rows: Sequence[Sequence[str]], texts: int) -> list[str]:
    """Rows as lines: the first `texts` columns to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
