"""What many devices cost, from a small model: bytes moved, busy share, efficiency on many GPUs, stages.

Run `python benchmarks/scaling.py`: it prints the tables that docs/scaling.md shows. Shapes and counts are those of the
networks themselves; speeds are of one H200 as docs/results.md has them; bandwidths and latencies are assumptions, which
stand below. Nothing is computed on a device.
"""

import os
import re
from collections.abc import Sequence
from math import ceil, log2, prod
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes alone are needed

from hotloop.engine.pipeline_table import BACKWARD, IDLE, SCHEDULES, group_size, make_table
from hotloop.families.cnn.network import BATCH_NORM, Network, build
from hotloop.families.cnn.options import DATASET_SIZES
from hotloop.families.cnn.presets import PRESETS
from hotloop.families.cnn.stages import crossing_values, cut

MEASURED = {256: 7337, 512: 7673}
"""Images a batch -> images a second of ResNet-50's training on one H200, bfloat16, both in docs/results.md."""
NODE = 8  # GPUs that NVLink joins
NVLINK, NETWORK = 360e9, 40e9
"""Bytes a second and GPU each way that a collective gets: 80 % of NVLink 4's 450 GB/s and of 400 Gbit/s."""
NVLINK_STEP, NETWORK_STEP = 3e-6, 8e-6  # seconds of one step of a collective, whatever it carries
COMBINED = 30 * 2**20  # bytes that XLA puts into one all-reduce at most
FLOAT32, HALF = 4, 2
GPUS = (1, 8, 16, 64, 256, 1024, 4096)
LARGE_BATCH = 32768
OLD_SPLITS = ("conv2_block2_out", "conv3_block1_out", "conv4_block2_out")
MICRO, MICRO_BATCHES = 16, 128  # of `resnet50_16ipus_8k_bn_pipeline`
RECOMPUTED = (
    3  # a backward tick in forward passes: the stage once more, then two products for each of its own
)
STAGES_MEASURED = {  # over one device's time: what uneven stages, ticks alone and the rest take, and the whole
    ("cifar_resnet8", 2): {
        "Grouped": (-0.02, 0.07, 0.11, 1.07),
        "Interleaved": (0.02, 0.05, 0.17, 0.93),
        "Sequential": (-0.04, 0.05, 0.08, 1.27),
    },
    ("cifar_resnet8", 4): {
        "Grouped": (-0.00, 0.27, 0.34, 1.17),
        "Interleaved": (0.05, 0.20, 0.45, 1.24),
        "Sequential": (-0.26, 0.26, 0.42, 1.67),
    },
    ("cifar_resnet20", 2): {
        "Grouped": (0.31, 0.02, -0.13, 1.12),
        "Interleaved": (0.30, 0.02, -0.06, 0.94),
        "Sequential": (0.30, 0.02, -0.14, 1.35),
    },
    ("cifar_resnet20", 4): {
        "Grouped": (0.25, 0.13, 0.23, 1.17),
        "Interleaved": (0.33, 0.11, 0.21, 1.18),
        "Sequential": (0.18, 0.15, 0.17, 1.75),
    },
}
"""By `benchmarks/stages.py gap`, 16 micro-batches of 32 images, a processor a stage; the page has the command."""
MIB = 2**20
Row = Sequence[object]


def resnet50() -> Network:
    size = DATASET_SIZES["imagenet"]
    return build("resnet50", size.shape, size.classes)


def parameters(network: Network) -> int:
    return sum(node.weights for node in network.nodes)


def statistics(network: Network) -> int:
    """Numbers that batch norm keeps: a mean and a variance for each channel."""
    return sum(2 * node.shape[-1] for node in network.nodes if node.kind == BATCH_NORM)


def reduced_bytes(network: Network) -> int:
    """What replicas sum for one update, in float32 in every precision: gradients, and of batch norm's numbers the means
    with their spread and the variances. Loss and accuracy, two numbers more, are left out."""
    return FLOAT32 * (parameters(network) + 3 * statistics(network) // 2)


def ring_bytes(replicas: int, payload: float) -> float:
    """What each of them sends, and receives, to sum `payload` bytes over a ring."""
    return 2 * (replicas - 1) / replicas * payload


COLLECTIVE = re.compile(r"= (.*?) (all-reduce|collective-permute)(?:-start)?\(")
SHAPE = re.compile(r"\b[a-z]+(\d+)\[([\d,]*)\]")


def moved_bytes(program: str) -> dict[str, int]:
    """Bytes of each kind of collective in the text of a compiled program; what a loop repeats is counted once."""
    found = {"all-reduce": 0, "collective-permute": 0}
    for shapes, kind in COLLECTIVE.findall(program):
        for bits, sides in SHAPE.findall(re.sub(r"/\*.*?\*/", "", shapes)):
            found[kind] += int(bits) // 8 * prod(int(side) for side in sides.split(",") if side)
    return found


def expected_ticks(schedule: str, stages: int, micro_batches: int) -> int:
    """The formula of the page, which the table of the engine must have."""
    if stages == 1:
        return micro_batches
    if schedule == "Sequential":
        return micro_batches * (2 * stages - 1)
    size = micro_batches if schedule == "Interleaved" else group_size(stages)
    whole, rest = divmod(micro_batches, size)
    return sum(2 * count + 2 * stages - 4 + (count == 1) for count in [size] * whole + [rest] * (rest > 0))


def expected_busy(schedule: str, stages: int, micro_batches: int) -> float:
    steps = micro_batches * (2 * stages - 1)
    return steps / (stages * expected_ticks(schedule, stages, micro_batches))


def pipeline_time(schedule: str, costs: Sequence[float], micro_batches: int) -> float:
    """Seconds of an update's ticks where stage s takes `costs[s]` for a forward pass: the slowest stage ends a tick."""
    total = 0.0
    for row in make_table(schedule, len(costs), micro_batches).rows:
        spent = [
            cost * (RECOMPUTED if kind == BACKWARD else 1)
            for cost, (kind, _) in zip(costs, row, strict=True)
            if kind != IDLE
        ]
        total += max(spent)
    return total


def beside_one_device(schedule: str, costs: Sequence[float], micro_batches: int) -> float:
    """The time of an update in stages over that of one device, which computes no stage twice."""
    return pipeline_time(schedule, costs, micro_batches) / (RECOMPUTED * sum(costs) * micro_batches)


class Update(NamedTuple):
    """Seconds of one update on so many GPUs."""

    compute: float
    inside: float  # the sum's part over NVLink
    between: float  # over the network
    steps: float  # of its steps alone

    @property
    def total(self) -> float:
        return sum(self)


def compute_seconds(images: float) -> float:
    """Forward and backward of one GPU: a line through both measurements."""
    (few, slow), (many, fast) = ((batch, batch / speed) for batch, speed in MEASURED.items())
    an_image = (fast - slow) / (many - few)
    return slow + (images - few) * an_image


def update_seconds(gpus: int, images: float, payload: float) -> Update:
    """Of one update with so many images a GPU; the sum over GPUs waits for the last gradient.

    Inside a node each GPU gets an eighth of the sums, between nodes the eighths are summed, then each node's GPUs have
    them all again. Between nodes it goes by a ring, or by a tree where its fewer steps are worth more.
    """
    inside, nodes = min(gpus, NODE), ceil(gpus / NODE)
    messages = ceil(payload / COMBINED)
    share = payload / inside
    ring = (ring_bytes(nodes, share) / NETWORK, 2 * (nodes - 1) * NETWORK_STEP * messages)
    tree = (2 * share / NETWORK * (nodes > 1), 2 * ceil(log2(nodes)) * NETWORK_STEP * messages)
    between, steps = min(ring, tree, key=sum)
    steps += 2 * (inside - 1) * NVLINK_STEP * messages
    return Update(compute_seconds(images), ring_bytes(inside, payload) / NVLINK, between, steps)


def efficiency(gpus: int, images: float, payload: float) -> float:
    """Images a second and GPU, over those of one GPU alone with a batch of 256."""
    return images / update_seconds(gpus, images, payload).total / MEASURED[256]


def table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in lines)


def bytes_of_replicas() -> str:
    rows: list[Row] = []
    for name in ("cifar_resnet8", "cifar_resnet20", "resnet18", "resnet50", "resnet152"):
        size = DATASET_SIZES["cifar10" if name.startswith("cifar") else "imagenet"]
        network = build(name, size.shape, size.classes)
        payload = reduced_bytes(network)
        sent = [f"{ring_bytes(count, payload) / MIB:,.2f}" for count in (2, 8, 64, 4096)]
        rows.append([name, f"{parameters(network):,}", f"{payload / MIB:,.2f}", *sent])
    return table(["network", "parameters", "summed, MiB", "2 replicas", "8", "64", "4,096"], rows)


def bytes_of_stages() -> str:
    rows: list[Row] = []
    for name in ("resnet50_8k_bn_pipeline", "resnet56_8k_bn_pipeline"):
        config = PRESETS[name]
        model, splits = config.get("model_name", config.get("model")), config["pipeline_splits"]
        size = DATASET_SIZES["imagenet"]
        network = build(str(model), size.shape, size.classes)
        places = [stage.start for stage in cut(network, splits)[1:]]
        numbers = [crossing_values(network, place) for place in places]
        for split, place, count in zip(splits, places, numbers, strict=True):
            values = ", ".join("x".join(map(str, _shape(network, each))) for each in network.crossing(place))
            rows.append(
                [model, split, values, f"{MICRO * HALF * count / MIB:.2f}", f"{max(numbers) / count:.2f}"]
            )
    return table(
        ["network", "stage begins at", "values of an image", f"MiB of {MICRO} images", "padded to"], rows
    )


def _shape(network: Network, name: str) -> tuple[int, ...]:
    return next(node.shape for node in network.nodes if node.name == name)


def busy_shares() -> str:
    counts = (4, 16, 64, 128)
    rows = []
    for schedule in SCHEDULES:
        for stages in (2, 4, 8):
            tables = [make_table(schedule, stages, count) for count in counts]
            shares = [f"{each.busy_share:.0%}" for each in tables]
            rows.append([schedule, stages, *shares, tables[2].ticks, tables[2].slots])
    heads = [f"{count} micro-batches" for count in counts]
    return table(["schedule", "stages", *heads, "ticks of 64", "slots of 64"], rows)


def image_bytes(network: Network, micro_batches: int) -> int:
    """Of an update's images of one replica, in bytes of a pixel: they lie on the device of every stage."""
    return micro_batches * MICRO * prod(network.shape)


def stage_costs() -> str:
    network = resnet50()
    images = f"{image_bytes(network, MICRO_BATCHES) / MIB:.0f}"
    stages = cut(network, OLD_SPLITS)
    flops, whole = network.flops, parameters(network)
    tables = {name: make_table(name, len(stages), MICRO_BATCHES).in_flight for name in SCHEDULES[:2]}
    rows = []
    for number, stage in enumerate(stages):
        nodes = network.nodes[stage.start : stage.stop]
        weights = sum(node.weights for node in nodes)
        inside = MICRO * HALF * sum(prod(node.shape) for node in nodes) / MIB
        came = MICRO * HALF * crossing_values(network, stage.start) / MIB if number else 0.0
        waiting = [f"{came * tables[name][number]:.1f}" for name in tables]
        rows.append([
            f"{number + 1}: from {nodes[0].name}", f"{weights:,}", f"{weights / whole:.1%}",
            f"{2 * FLOAT32 * weights / MIB:.1f}", f"{sum(node.flops for node in nodes) / flops:.1%}",
            f"{inside:.0f}", *waiting, images,
        ])  # fmt: skip
    heads = ["stage", "parameters", "share", "weights and momentum, MiB", "FLOPs", "made inside, MiB"]
    return table([*heads, "waits, Grouped, MiB", "waits, Interleaved, MiB", "images, MiB"], rows)


def stage_times() -> str:
    network = resnet50()
    rows = []
    for name, splits in {"the old splits": OLD_SPLITS, "equal stages": ()}.items():
        stages = cut(network, splits)
        costs = [float(sum(node.flops for node in network.nodes[a.start : a.stop])) for a in stages]
        costs = costs if splits else [1.0] * 4
        for schedule in SCHEDULES:
            found = [f"{beside_one_device(schedule, costs, count):.2f}" for count in (4, 16, 128)]
            rows.append([name, schedule, *found])
    return table(["resnet50 in 4 stages", "schedule", "4 micro-batches", "16", "128"], rows)


def stages_beside_the_model() -> str:
    rows = []
    for (name, stages), times in STAGES_MEASURED.items():
        for schedule, (*parts, measured) in times.items():
            expected = beside_one_device(schedule, [1 / stages] * stages, 16)
            row = make_table(schedule, stages, 16)
            figures = [f"{part:.2f}" for part in (expected, *parts, measured)]
            rows.append([name, stages, schedule, row.ticks, f"{row.busy_share:.0%}", *figures])
    heads = ["network", "stages", "schedule", "ticks", "busy share"]
    return table([*heads, "equal stages", "uneven stages", "ticks alone", "rest", "measured"], rows)


def many_gpus(images_of: str) -> str:
    payload = reduced_bytes(resnet50())
    rows = []
    for gpus in GPUS:
        images = 256 if images_of == "a GPU" else LARGE_BATCH / gpus
        if images > 512:
            continue  # more than was measured
        update = update_seconds(gpus, images, payload)
        parts = [
            f"{1e3 * part:.2f}" for part in (update.compute, update.inside + update.between, update.steps)
        ]
        speed = gpus * images / update.total
        rows.append(
            [f"{gpus:,}", f"{images:g}", f"{gpus * images:,.0f}", *parts, f"{speed:,.0f}",
             f"{efficiency(gpus, images, payload):.1%}"]
        )  # fmt: skip
    heads = [
        "GPUs",
        "images a GPU",
        "global batch",
        "compute, ms",
        "moving, ms",
        "steps, ms",
        "images/s",
        "efficiency",
    ]
    return table(heads, rows)


TABLES = {
    "bytes summed over replicas, and sent by each": bytes_of_replicas,
    "what crosses into a stage for one micro-batch, each way": bytes_of_stages,
    "busy share": busy_shares,
    "what a stage of ResNet-50 costs": stage_costs,
    "time of an update in stages over one device's": stage_times,
    "the model of stages beside a measurement": stages_beside_the_model,
    "256 images a GPU": lambda: many_gpus("a GPU"),
    f"a global batch of {LARGE_BATCH:,}": lambda: many_gpus("all"),
}

if __name__ == "__main__":
    for title, make in TABLES.items():
        print(f"{title}\n\n{make()}\n")
