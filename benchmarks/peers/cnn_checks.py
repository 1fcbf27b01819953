"""Before benchmarks/peers/cnn.py times anything: the same images, the same weights, the same update in torch and ours.

A case is made into our job here, so that what is checked is what is timed. Norm scales, offsets and statistics are
drawn at random: at the values that training starts from, half of a ResNet-50 has no gradient.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import cnn_torch
import jax
import numpy as np
import torch
from common import strictly

from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.families.cnn import images, model
from hotloop.families.cnn.job import Job, resolve
from hotloop.families.cnn.network import BATCH_NORM, inference_logits
from hotloop.families.cnn.options import DATASET_SIZES, DatasetSize, TrainConfig
from hotloop.families.cnn.sources import ImageSource, synthetic_images
from hotloop.options import Params

SMOOTHING, MOMENTUM, L2, RATE = 0.1, 0.9, 5e-5, 1e-5  # RATE: of one sample
STARTS = 3  # weights that are tried
LIMIT, TIMES = (
    1e-4,
    3,
)  # how far ours may be off float64: relative, or so many times as far as torch's float32
STATISTICS = ("mean", "variance")


@dataclass(frozen=True)
class Case:
    """What is compared; `per_call` are the updates, or batches, of one call of ours."""

    name: str
    model: str
    batch: int
    train: bool
    precision: str
    per_call: int
    ratio_floor: float | None = None  # torch's time over ours
    speed_floor: float | None = None  # images a second
    side: int | None = None  # rows and columns of an image; None: as the data set has them

    @property
    def samples(self) -> DatasetSize:
        """As many to validate as one call takes."""
        whole = DATASET_SIZES["cifar10" if self.model.startswith("cifar") else "imagenet"]
        shape = whole.shape if self.side is None else (self.side, self.side, 3)
        return DatasetSize(whole.train, self.per_call * self.batch, shape, whole.classes)

    @property
    def job(self) -> Job:
        """The recipe with everything on."""
        config = TrainConfig(
            model_name=self.model,
            dataset="cifar10" if self.model.startswith("cifar") else "imagenet",
            synthetic_data="device",
            micro_batch_size=self.batch,
            precision=self.precision,
            label_smoothing=SMOOTHING,
            optimizer_params=Params(momentum=MOMENTUM),
            l2_regularization=L2,
            lr_schedule="cosine",
            lr_schedule_params=Params(initial_learning_rate=RATE, epochs_to_total_decay=90),
            num_epochs=100,
            validation=False,
            seed=0,
        )
        return resolve(config, self.samples, 1, repeated=True)

    @property
    def source(self) -> ImageSource:
        """One batch for all."""
        return synthetic_images(self.samples, 0, on_device=True)

    @property
    def exact(self) -> "Case":
        """A few images in float32, to compare."""
        return replace(self, precision="32.32", batch=min(self.batch, 8), per_call=2)


def started(case: Case, number: int = 1) -> model.State:
    """Fresh weights, with norms that let everything through; others for each number."""
    state = model.init(case.job, seed_key(0))
    generator = np.random.default_rng(number)
    for layer in state["params"].values():
        if "scale" in layer:
            layer["scale"] = layer["scale"] + _drawn(generator, 0.2, layer["scale"])
            layer["offset"] = _drawn(generator, 0.0, layer["offset"])
    for layer in state["statistics"].values():
        layer["mean"] = _drawn(generator, 0.0, layer["mean"])
        layer["variance"] = _drawn(generator, 1.0, layer["variance"])
    return state


def _drawn(generator: np.random.Generator, centre: float, like: jax.Array) -> jax.Array:
    return jax.numpy.asarray(generator.uniform(centre - 0.1, centre + 0.1, like.shape), like.dtype)


def peer(case: Case, state: model.State, device: str) -> cnn_torch.Trainer:
    """Torch with the same weights and batch, images made ready beforehand; bfloat16 on a GPU only."""
    built = cnn_torch.build(case.model, case.samples.classes)
    cnn_torch.load(built, _by_layer(case, state["params"], state["statistics"]))
    batch, job = case.source.feed(case.job).data, case.job
    recipe = cnn_torch.Recipe(float(job.rate(0)), MOMENTUM, L2, SMOOTHING)
    pixels = np.asarray(images.preprocess(job.config.dataset, batch["image"]))
    half = device == "cuda" and case.precision != "32.32"
    return cnn_torch.Trainer(built, pixels, np.asarray(batch["label"]), recipe, device, half)


def _by_layer(case: Case, params: Any, statistics: Any) -> list[dict[str, np.ndarray]]:
    """Every layer's leaves in the order of the layers."""
    trees = [
        params[node.name] | (statistics[node.name] if node.kind == BATCH_NORM else {})
        for node in case.job.network.nodes
        if node.name in params
    ]
    return [{n: np.asarray(tree[n], np.float32) for n in cnn_torch.ORDER if n in tree} for tree in trees]


def check(case: Case, device: str) -> dict[str, dict[str, float]]:
    """Relative errors of both in float32; where ours are larger than torch's can explain, the program stops.

    A value that rounding moves over a rectifier's zero changes a gradient by a thousandth, on either side. So up to
    `STARTS` different weights are tried; a computation that is another one agrees at none of them.
    """
    for number in range(1, STARTS + 1):
        found = _compare(case, device, number)
        wrong = [
            (kind, each)
            for kind, each in found.items()
            if not each["ours"] <= max(LIMIT, TIMES * each["torch"])
        ]
        if not wrong:
            return found
    kind, errors = wrong[0]
    raise SystemExit(
        f"{case.name}: {kind} of ours is off by {errors['ours']:.2g}, of torch by {errors['torch']:.2g}: "
        "not the same computation, not timed"
    )


def _compare(case: Case, device: str, number: int) -> dict[str, dict[str, float]]:
    """Relative errors from the weights of this number."""
    exact = case.exact
    state = started(exact, number)
    strictly(device, True)
    with jax.default_matmul_precision("highest"):
        mine = _our_update(exact, state) if case.train else _our_logits(exact, state)
    compare = _their_update if case.train else _their_logits
    theirs, wanted = (
        compare(peer(exact, state, device).to(dtype)) for dtype in (torch.float32, torch.float64)
    )
    strictly(device, False)
    return {
        kind: {"ours": apart(mine[kind], wanted[kind]), "torch": apart(theirs[kind], wanted[kind])}
        for kind in wanted
    }


def _our_update(case: Case, state: model.State) -> dict[str, list[np.ndarray]]:
    """One update of the program: descent directions (gradient and L2) and moved statistics; and the logits before."""
    job = case.job
    feed = case.source.feed(job)
    seen = job.policy.to_compute(images.preprocess(job.config.dataset, feed.data["image"]))
    logits, _ = jax.jit(lambda p, x: job.network.apply(p, {}, x, train=True))(state["params"], seen)
    new, _ = Program(model.update(job), feed, case.per_call, seed_key(0))(copy_state(state), 0, 1)
    descent = jax.tree.map(lambda v: -v / job.rate(0), new["optimiser"]["velocity"].trace)
    found = _by_layer(case, descent, new["statistics"])
    return {
        "logits": [np.asarray(logits)],
        **_sorted((n, leaf) for layer in found for n, leaf in layer.items()),
    }


def _their_update(trainer: cnn_torch.Trainer) -> dict[str, list[np.ndarray]]:
    trainer.model.train()
    logits = trainer.gradient()
    trainer.optimiser.step()
    slots, found = trainer.optimiser.state, []
    for layer in cnn_torch.layers(trainer.model):
        for name, tensor in cnn_torch.leaves(layer):
            value = tensor if name in STATISTICS else slots[tensor]["momentum_buffer"]
            found.append((name, cnn_torch.to_ours(value)))
    return {"logits": [cnn_torch.to_numpy(logits)], **_sorted(found)}


def _sorted(leaves: Iterable[tuple[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {"gradient": [], "statistics": []}
    for name, leaf in leaves:
        found["statistics" if name in STATISTICS else "gradient"].append(leaf)
    return found


def _our_logits(case: Case, state: model.State) -> dict[str, list[np.ndarray]]:
    job, pixels = case.job, case.source.feed(case.job).data["image"]

    def logits(state: model.State, pixels: jax.Array) -> jax.Array:
        seen = images.preprocess(job.config.dataset, pixels)
        return inference_logits(job.network, job.policy, state, seen)

    return {"logits": [np.asarray(jax.jit(logits)(state, pixels))]}


def _their_logits(trainer: cnn_torch.Trainer) -> dict[str, list[np.ndarray]]:
    trainer.model.eval()
    with torch.inference_mode():
        return {"logits": [cnn_torch.to_numpy(trainer.model(trainer.images))]}


def apart(some: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest of all arrays' norms of the difference over that of what is wanted."""
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(some, wanted, strict=True))
