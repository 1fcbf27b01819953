"""One weight update of a network, and its evaluation: `init`, `update`, `evaluate` as the engine wants them.

An update goes over its micro-batches one after the other (accumulation) on each replica, averages gradients and
merges batch-norm statistics over all of them, and makes one step. Every sample draws from its place in the global
batch, so that how a batch is split changes nothing but batch norm's groups. It knows neither files nor events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from hotloop.engine import optim, precision, schedules
from hotloop.engine.keys import sample_keys, stream
from hotloop.engine.loss_scale import AutoScale, ScaleState, StaticScale, choose, scale_loss, unscale
from hotloop.engine.mesh import REPLICA
from hotloop.families.cnn import images, statistics
from hotloop.families.cnn.network import Network, Statistics, build
from hotloop.families.cnn.resnet import Variant
from hotloop.families.cnn.settings import Settings
from hotloop.layers import losses

State = Any
Batch = Mapping[str, Array]
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec(REPLICA)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Job:
    """Settings made into functions; `repeated` says that every micro-batch of an update is the same one."""

    settings: Settings
    repeated: bool = False
    variant: Variant = "keras"

    @cached_property
    def network(self) -> Network:
        """The model."""
        chosen = self.settings
        return build(chosen.model, chosen.samples.shape, chosen.samples.classes, chosen.norm, self.variant)

    @cached_property
    def policy(self) -> precision.Policy:
        """The types to compute and to keep weights in."""
        chosen = self.settings
        return precision.parse(
            chosen.precision,
            chosen.half,
            stochastic_rounding=chosen.stochastic_rounding,
            half_partials=chosen.half_partials,
        )

    @cached_property
    def rule(self) -> optim.Rule:
        """The optimiser."""
        chosen = self.settings
        return optim.rule(
            chosen.optimizer,
            chosen.optimizer_params,
            weight_decay=chosen.weight_decay,
            l2=chosen.l2,
            global_batch_size=chosen.asked.global_,
            exclude=optim.norms_and_biases if chosen.exclude_norms_and_biases else optim.nothing,
        )

    @cached_property
    def rate(self) -> Callable[[Array | int], Array]:
        """The learning rate of an update."""
        chosen = self.settings
        assert chosen.plan is not None
        return schedules.learning_rate(
            chosen.schedule,
            chosen.schedule_params,
            global_batch_size=chosen.asked.global_,
            updates_per_epoch=int(chosen.plan.updates_per_epoch),
            warmup=chosen.warmup,
            staircase=chosen.staircase,
        )

    @property
    def scale(self) -> StaticScale | AutoScale:
        """The loss scaling."""
        return AutoScale() if self.settings.auto_loss_scale else StaticScale(self.settings.loss_scale)


class Part(NamedTuple):
    """What some micro-batches come to: gradients of the scaled loss, statistics, and figures, all means."""

    gradients: Any
    statistics: statistics.Running
    figures: dict[str, Array]


def init(job: Job, key: Array) -> State:
    """Fresh weights, an optimiser that has seen nothing, no update yet."""
    params, moving = job.network.init(key)
    params = job.policy.to_update(params)
    return {
        "params": params,
        "statistics": moving,
        "optimiser": job.rule.init(params),
        "scale": job.scale.init(),
        "update": jnp.zeros((), jnp.int32),
    }


def update(job: Job, mesh: Mesh | None = None) -> Callable[[State, Batch, Array], tuple[State, Any]]:
    """One global batch, one step; with a mesh each device works on its share of the batch."""

    def one(state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        gradients, merged, figures = _over_replicas(job, mesh)(
            job.policy.to_compute(state["params"]), state["scale"], batch, stream(key, "augment", 0)
        )
        gradients = unscale(state["scale"], gradients)
        rate = job.rate(state["update"])
        params, slots = precision.optimise(
            job.policy, job.rule.at(rate), gradients, state["optimiser"], state["params"],
            stream(key, "rounding", 0),
        )  # fmt: skip
        new = {"params": params, "optimiser": slots, "statistics": _moved(job, state["statistics"], merged)}
        usable, scale = job.scale.judge(state["scale"], gradients)
        if job.settings.auto_loss_scale:
            new = choose(usable, new, {name: state[name] for name in new})
            figures["loss_scaling_factor"] = scale.scale
        figures["learning_rate"] = rate
        return {**new, "scale": scale, "update": state["update"] + 1}, figures

    return one


def _moved(job: Job, moving: Statistics, merged: Statistics) -> Statistics:
    chosen = job.settings
    counts = statistics.counts(job.network, chosen.batch, _merging(job))
    return statistics.moved(moving, merged, chosen.norm.momentum, counts)


def _merging(job: Job) -> statistics.Rule:
    return "seed" if job.settings.statistics_rule == "seed" else "spread"


def _over_replicas(job: Job, mesh: Mesh | None) -> Callable[..., tuple[Any, Statistics, dict[str, Array]]]:
    """(params, scale, batch, key) -> gradients, statistics and figures of the whole batch."""
    if mesh is None:
        return partial(_averaged, job, None)
    return jax.shard_map(
        partial(_averaged, job, REPLICA),
        mesh=mesh,
        in_specs=(EVERYWHERE, EVERYWHERE, SPLIT, EVERYWHERE),
        out_specs=EVERYWHERE,
        check_vma=False,
    )


def _averaged(
    job: Job, axis: str | None, params: Any, scale: ScaleState, batch: Batch, key: Array
) -> tuple[Any, Statistics, dict[str, Array]]:
    gradients, running, figures = _accumulated(job, axis, params, scale, batch, key)
    merged = statistics.finish(running, axis)
    if axis is not None:
        wide = precision.cast(gradients, precision.FLOAT32)  # a sum of 16-bit gradients may leave their range
        gradients, figures = lax.pmean((wide, figures), axis)  # type: ignore[no-untyped-call]
    return gradients, merged, figures


def _accumulated(
    job: Job, axis: str | None, params: Any, scale: ScaleState, batch: Batch, key: Array
) -> Part:
    """The mean over this replica's micro-batches."""
    count, size = job.settings.batch.accumulation, job.settings.batch.micro
    first = 0 if axis is None else lax.axis_index(axis) * (count * size)

    def part(number: Array | int) -> tuple[Any, Statistics, dict[str, Array]]:
        start = 0 if job.repeated else number * size
        taken = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), batch)
        keys = sample_keys(key, first + number * size, size)
        return _gradient(job, params, scale, taken, keys)

    def add(total: Part, number: Array) -> tuple[Part, None]:
        gradients, seen, figures = part(number)
        share = 1 / count
        return Part(
            jax.tree.map(lambda a, b: a + share * b.astype(jnp.float32), total.gradients, gradients),
            statistics.add(total.statistics, seen, _merging(job)),
            jax.tree.map(lambda a, b: a + share * b, total.figures, figures),
        ), None

    if count == 1:
        gradients, seen, figures = part(0)
        return Part(gradients, statistics.add(statistics.start(seen), seen), figures)
    forms = jax.eval_shape(part, 0)
    zeros = jax.tree.map(lambda form: jnp.zeros(form.shape, jnp.float32), forms)
    total, _ = lax.scan(add, Part(zeros[0], statistics.start(zeros[1]), zeros[2]), jnp.arange(count))
    return total


def _gradient(
    job: Job, params: Any, scale: ScaleState, batch: Batch, keys: Array
) -> tuple[Any, Statistics, dict[str, Array]]:
    """Gradient of one micro-batch's scaled mean loss, its batch-norm statistics and its figures."""
    seen = augmented(job, batch["image"], keys)

    def loss(params: Any) -> tuple[Array, Any]:
        logits, batch_statistics = _applied(job, params, seen)
        each = losses.cross_entropy(logits, batch["label"], job.settings.smoothing).mean()
        right = losses.correct(logits, batch["label"], 1).mean(dtype=jnp.float32)
        return scale_loss(scale, each), (batch_statistics, {"loss": each, "training_accuracy": right})

    gradients, (batch_statistics, figures) = jax.grad(loss, has_aux=True)(params)
    return gradients, batch_statistics, figures


def augmented(job: Job, pixels: Array, keys: Array) -> Array:
    """Training images in the type of the computation; made-up images and photographs are cropped elsewhere."""
    dataset = job.settings.dataset
    seen: Array = (
        images.evaluated(dataset, pixels) if job.repeated else images.augmented(dataset, pixels, keys)
    )
    return job.policy.to_compute(seen)


def _applied(job: Job, params: Any, seen: Array) -> tuple[Array, Statistics]:
    """Logits and statistics in training; with recomputation, stage by stage."""
    network = job.network
    if not job.settings.recomputation:
        return network.apply(params, {}, seen, train=True)
    ends = [0, *(network.position(name) for name in job.settings.splits), len(network.placed)]
    values, found = {network.crossing(0)[0]: seen}, Statistics()
    for start, stop in pairwise(ends):
        stage = jax.checkpoint(partial(network.run, start=start, stop=stop, train=True))
        values, more = stage(params, {}, values)
        found |= more
    (logits,) = values.values()
    return logits, found


def logits_of(job: Job, state: State, pixels: Array) -> Array:
    """Logits without augmentation, by the moving statistics."""
    seen = job.policy.to_compute(images.evaluated(job.settings.dataset, pixels))
    logits, _ = job.network.apply(
        job.policy.to_compute(state["params"]), state["statistics"], seen, train=False
    )
    return logits


def evaluate(job: Job, top: int = 5) -> Callable[[State, Batch], dict[str, Array]]:
    """For each sample: whether it is right, whether its label is among the likeliest, and its loss."""

    def values(state: State, batch: Batch) -> dict[str, Array]:
        logits, labels = logits_of(job, state, batch["image"]), batch["label"]
        return {
            "correct": losses.correct(logits, labels, 1),
            "correct_top": losses.correct(logits, labels, top),
            "loss": losses.cross_entropy(logits, labels),
        }

    return values
