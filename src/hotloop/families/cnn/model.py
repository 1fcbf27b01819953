"""One weight update of a network, and its evaluation: `init`, `update`, `evaluate` as the engine wants them.

An update goes over its micro-batches one after the other (accumulation) on each replica, averages gradients and
merges batch-norm statistics over all of them, and makes one step. Every sample draws from its place in the global
batch, so that how a batch is split changes nothing but batch norm's groups. It knows neither files nor events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from hotloop.engine import optim, precision, schedules
from hotloop.engine.keys import stream
from hotloop.engine.loss_scale import AutoScale, ScaleState, StaticScale, choose, scale_loss, unscale
from hotloop.engine.split import average_replicas, mean_of_parts, on_replicas
from hotloop.families.cnn import folding, images, statistics
from hotloop.families.cnn.network import Network, Statistics, build
from hotloop.families.cnn.resnet import Variant
from hotloop.families.cnn.settings import Settings
from hotloop.layers import losses

State = Any
Batch = Mapping[str, Array]


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
        gradients, merged, figures = on_replicas(partial(_averaged, job), mesh)(
            batch,
            job.policy.to_compute(state["params"]),
            state["statistics"],
            state["scale"],
            stream(key, "augment", 0),
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


def _averaged(
    job: Job, axis: str | None, batch: Batch, params: Any, moving: Statistics, scale: ScaleState, key: Array
) -> tuple[Any, Statistics, dict[str, Array]]:
    """Gradients of the scaled loss, statistics and figures of the whole batch."""

    def part(
        running: statistics.Running, taken: Batch, keys: Array
    ) -> tuple[tuple[Any, dict[str, Array]], statistics.Running]:
        gradients, seen, figures = _gradient(job, params, scale, taken, keys)
        return (gradients, figures), statistics.add(running, seen, _merging(job))

    count, nothing = job.settings.batch.accumulation, statistics.start(moving)
    means, running = mean_of_parts(part, nothing, batch, key, count, axis, repeated=job.repeated)
    gradients, figures = average_replicas(means, axis)
    return gradients, statistics.finish(running, axis), figures


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
    return folding.logits(job.network, job.policy, state, images.evaluated(job.settings.dataset, pixels))


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
