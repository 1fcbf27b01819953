"""One weight update of a network, and its evaluation: `init`, `update`, `evaluate`. It knows neither files nor events.

Every part (a micro-batch on a replica) hands in its means and biased variances. By the `spread` rule the differences
between the parts' means count, so that any split of a batch gives the undivided batch's statistics; the `seed` rule
counts them between replicas but not between accumulated micro-batches, as the program before this one did. The variance
that is kept is the unbiased one, as in Keras' fused batch norm.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine import ema, processes, stage_rows
from hotloop.engine.keys import stream
from hotloop.engine.loop import Prepared
from hotloop.engine.pipeline import (
    evaluate_in_stages,
    spread_over_stages,
    start_in_stages,
    update_in_stages,
)
from hotloop.engine.plan import Batch
from hotloop.engine.precision import Trained, init_trained, update_weights
from hotloop.engine.stage_rows import StageRows
from hotloop.families.cnn import augmentation, images, mixing
from hotloop.families.cnn.freezing import stop_gradients
from hotloop.families.cnn.job import Job
from hotloop.families.cnn.network import (
    BATCH_NORM,
    INPUT,
    Network,
    Params,
    Statistics,
    prepare_inference,
    prepared_logits,
)
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.stages import cut, layers_by_stage
from hotloop.layers import losses

State = Any
ImageBatch = Mapping[str, Array]
MergeRule = Literal["spread", "seed"]
TRAINED = ("params", "optimiser", "statistics", "scale")  # the names under which a state has what is Trained
AVERAGED = {"ema_params": "params", "ema_statistics": "statistics"}
"""The names under which a state with --ema has averages, and those of what they are averages of."""


def init(job: Job, key: Array, weights: tuple[Params, Statistics] | None = None) -> State:
    """Fresh weights (or these), an optimiser that has seen nothing, no update yet; undivided, as a checkpoint has
    them."""
    # Copied: memory of the host's own cannot be donated to the first call.
    first = job.network.init(key) if weights is None else jax.tree.map(partial(jnp.array, copy=True), weights)
    trained = init_trained(job.policy, job.optimiser, job.scale, *first)
    state = {**dict(zip(TRAINED, trained, strict=True)), "update": jnp.zeros((), jnp.int32)}
    return state | ({name: ema.start(state[of]) for name, of in AVERAGED.items()} if job.config.ema else {})


def start(job: Job, key: Array, weights: tuple[Params, Statistics] | None = None) -> State:
    """A fresh state (or one with these weights) as `update` takes it: in stages no device ever holds more of it than
    its own."""
    if not job.splits:
        return init(job, key, weights)
    assert job.mesh is not None
    params, statistics = weights or job.network.init_on_host(key)
    layers = layers_by_stage(job.network, job.splits)
    fresh = start_in_stages(params, statistics, layers, job.policy, job.optimiser, job.scale, job.mesh)
    update = stage_rows.place_everywhere(np.int32(0), job.mesh)
    averages: State = {}
    if job.config.ema:  # on the host: the whole need fit on no device
        first = {"params": job.policy.to_update(params), "statistics": statistics}
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), first)
        averages = {name: _divide(job, wide[of]) for name, of in AVERAGED.items()}
    return {**dict(zip(TRAINED, fresh, strict=True)), "update": update, **averages}


def random_weights(job: Job, key: Array) -> State:
    """`params` and `statistics` of a fresh state, undivided, as host arrays."""
    params, statistics = job.network.init_on_host(key)
    return {"params": job.policy.to_update(params), "statistics": statistics}


def spread(job: Job, state: State) -> State:
    """An undivided state as `update` takes it: each stage's part on its device, where the job is in stages."""
    if not job.splits:
        return state
    assert job.mesh is not None
    old, layers = Trained(*(state[name] for name in TRAINED)), layers_by_stage(job.network, job.splits)
    new = spread_over_stages(old, layers, job.policy, job.optimiser, job.mesh)
    return {
        **dict(zip(TRAINED, new, strict=True)),
        "update": stage_rows.place_everywhere(state["update"], job.mesh),
        **{name: _divide(job, state[name]) for name in AVERAGED if name in state},
    }


def spread_weights(job: Job, weights: State) -> State:
    """Undivided `params` and `statistics` as `evaluate_stages` takes them."""
    return {name: _divide(job, weights[name]) for name in ("params", "statistics")}


def _divide(job: Job, tree: Any) -> StageRows:
    """A tree by layers, each on the device of its stage."""
    assert job.mesh is not None
    layers = [set(names) for names in layers_by_stage(job.network, job.splits)]
    parts = [{name: tree[name] for name in tree if name in own} for own in layers]
    return stage_rows.divide(parts, tree, job.mesh)


def gather(state: State) -> State:
    """A state as host arrays, undivided, wherever it lies; every process must ask for it."""
    return {
        name: stage_rows.whole(value) if isinstance(value, StageRows) else processes.fetch(value)
        for name, value in state.items()
    }


def update(job: Job) -> Callable[[State, ImageBatch, Array], tuple[State, Any]]:
    """One global batch, one step; each of several replicas works on its share of the batch, each of several stages of a
    replica on its layers."""
    config, network = job.config, job.network
    counts = count_values(network, job.batch, config.statistics_rule)

    def finish(moving: Statistics, centre: RunningStatistics, spread: RunningStatistics) -> Statistics:
        moved = move_statistics(moving, finish_statistics(centre, spread), network.norm.momentum, counts)
        return moved | _frozen_norms(job, moving)

    def begin(moving: Statistics) -> RunningStatistics:
        return RunningStatistics(
            jnp.int32(0), jax.tree.map(jnp.zeros_like, moving) | _frozen_norms(job, moving)
        )

    step: Callable[..., Any] = partial(update_weights, _loss(job), group=job.group)
    if job.splits:
        step = partial(update_in_stages, _training_stages(job), schedule=config.pipeline_schedule)

    def one(state: State, batch: ImageBatch, key: Array) -> tuple[State, dict[str, Array]]:
        assert job.rate is not None
        rate = job.rate(state["update"])
        if mixing.is_mixed(config):
            batch = mixing.add_partners(batch)
        new, figures = step(
            Trained(*(state[name] for name in TRAINED)),
            batch,
            stream(key, "augment", 0),
            stream(key, "rounding", 0),
            policy=job.policy,
            optimiser=job.optimiser,
            scale=job.scale,
            mesh=job.mesh,
            accumulation=job.batch.accumulation,
            repeated=job.repeated,
            begin=begin,
            finish=finish,
            rate=rate,
        )
        if config.auto_loss_scaling:
            figures["loss_scaling_factor"] = new.scale.scale
        figures["learning_rate"] = rate
        found = {**dict(zip(TRAINED, new, strict=True)), "update": state["update"] + 1}
        if config.ema:
            decay = ema.decay_at(config.ema, state["update"])
            found |= {name: ema.move(state[name], found[of], decay) for name, of in AVERAGED.items()}
        return found, figures

    return one


def _loss(job: Job) -> Callable[..., Any]:
    """The loss of some samples by the undivided network."""
    config, network = job.config, job.network
    (whole,) = cut(network, (), config.pipeline_splits if config.recomputation else ())
    apply = partial(network.apply, groups=job.groups) if job.groups else network.apply

    def loss(params: Any, running: RunningStatistics, samples: ImageBatch, keys: Array) -> tuple[Array, Any]:
        seen = _see(job, samples, keys)
        params, kept = stop_gradients(params, job.frozen), _frozen_norms(job, running.merged)
        if whole.inner:
            values, found = whole.train(network, params, {INPUT: seen}, job.groups, kept)
            (logits,) = values.values()
        else:
            by_kept: dict[str, Any] = {"frozen": kept} if kept else {}
            logits, found = apply(params, {}, seen, train=True, **by_kept)
        mean, figures = _judge(job, logits, samples, keys)
        return mean, (add_statistics(running, found, config.statistics_rule), figures)

    return loss


def _training_stages(job: Job) -> tuple[Callable[..., Any], ...]:
    """The same, stage by stage: the first sees the samples, the last compares with their labels."""
    config, network = job.config, job.network
    stages = cut(network, job.splits, config.pipeline_splits if config.recomputation else ())

    def run(
        number: int, params: Any, running: RunningStatistics, values: Any, samples: ImageBatch, keys: Array
    ) -> tuple[Any, Any]:
        entering = values if number else {INPUT: _see(job, samples, keys)}
        params, kept = stop_gradients(params, job.frozen), _frozen_norms(job, running.merged)
        values, found = stages[number].train(network, params, entering, frozen=kept)
        running = add_statistics(running, found, config.statistics_rule)
        if number + 1 < len(stages):
            return values, (running, {})
        (logits,) = values.values()
        mean, figures = _judge(job, logits, samples, keys)
        return mean, (running, figures)

    return tuple(partial(run, number) for number in range(len(stages)))


def _frozen_norms(job: Job, statistics: Statistics) -> Statistics:
    """Of the norms that --freeze leaves as they are."""
    return {name: layer for name, layer in statistics.items() if name in job.frozen}


def _see(job: Job, samples: ImageBatch, keys: Array) -> Array:
    """Images as the network takes them. Synthetic ones that are repeated are not cropped, and photographs were on the
    host, but for those that stay on the device, larger than the network's."""
    config, pixels, side, cropped = job.config, samples["image"], job.size.shape[0], not job.repeated
    if mixing.is_mixed(config):
        others = samples[f"{mixing.OTHER}image"]
        seen = augmentation.see_mixed(config, pixels, others, keys, side=side, cropped=cropped)
    else:
        seen = augmentation.see(config, pixels, keys, side=side, cropped=cropped)
    return job.policy.to_compute(seen)


def _judge(job: Job, logits: Array, samples: ImageBatch, keys: Array) -> tuple[Array, dict[str, Array]]:
    """The mean loss, and the figures of a training; of mixed images both labels count, in their shares."""
    config = job.config

    def judge(labels: Array) -> tuple[Array, Array]:
        return losses.cross_entropy(logits, labels, config.label_smoothing), losses.correct(logits, labels, 1)

    loss, right = judge(samples["label"])
    if mixing.is_mixed(config):
        # Drawn again: in stages the last one has not seen the images.
        share = mixing.draw_mixing(config, keys, *job.size.shape[:2]).share
        both = zip((loss, right), judge(samples[f"{mixing.OTHER}label"]), strict=True)
        loss, right = (mixing.mean_of_both(own, other, share) for own, other in both)
    mean = loss.mean()
    return mean, {"loss": mean, "training_accuracy": right.mean(dtype=jnp.float32)}


def evaluate(job: Job) -> Callable[[State, ImageBatch], Mapping[str, Array]]:
    """For each sample: whether it is right, whether its label is among the --top-k likeliest, and its loss."""

    def values(weights: Any, batch: ImageBatch) -> dict[str, Array]:
        seen, labels = images.preprocess(job.config.dataset, batch["image"]), batch["label"]
        return _compare(job.config, prepared_logits(job.network, job.policy, weights, seen), labels)

    return Prepared(partial(prepare_inference, job.network, job.policy), values)


def evaluate_stages(job: Job) -> Callable[[State, ImageBatch], dict[str, Array]]:
    """The same in the training's stages, by the rows of a state that `spread` made."""
    network, policy = job.network, job.policy
    stages = cut(network, job.splits)

    def run(number: int, params: Any, moving: Statistics, values: Any, samples: ImageBatch) -> Any:
        if not number:
            pixels = images.preprocess(job.config.dataset, samples["image"])
            values = {INPUT: policy.to_compute(pixels)}
        values = stages[number].infer(network, policy, params, moving, values)
        if number + 1 < len(stages):
            return values
        (logits,) = values.values()
        return _compare(job.config, logits, samples["label"])

    parts = tuple(partial(run, number) for number in range(len(stages)))

    count = 2 * job.config.stages  # micro-batches, as the old program had

    def values(state: State, batch: ImageBatch) -> dict[str, Array]:
        assert job.mesh is not None
        samples = len(batch["label"])
        if missing := -samples % (job.batch.replicas * count):
            places = jnp.arange(samples + missing)
            batch = jax.tree.map(lambda leaf: leaf[jnp.minimum(places, samples - 1)], batch)
        weights = state["params"], state["statistics"]
        found = evaluate_in_stages(parts, *weights, batch, mesh=job.mesh, micro_batches=count)
        return {name: value[:samples] for name, value in found.items()}

    return values


def _compare(config: TrainConfig, logits: Array, labels: Array) -> dict[str, Array]:
    return {
        "correct": losses.correct(logits, labels, 1),
        "correct_top": losses.correct(logits, labels, config.top_k),
        "loss": losses.cross_entropy(logits, labels),
    }


class RunningStatistics(NamedTuple):
    """The parts seen so far, and their statistics merged: none, and zeros, to start from."""

    parts: Array
    merged: Statistics


def add_statistics(
    running: RunningStatistics, part: Statistics, rule: MergeRule = "spread"
) -> RunningStatistics:
    """One more micro-batch (Chan, Golub and LeVeque, 1979): no squares of means, so nothing cancels. A layer that it
    has no statistics of is frozen, and stays."""
    parts = running.parts + 1

    def layer(old: dict[str, Array], new: dict[str, Array]) -> dict[str, Array]:
        share = 1 / parts.astype(old["mean"].dtype)
        apart = new["mean"] - old["mean"]
        spread = (1 - share) * jnp.square(apart) if rule == "spread" else 0
        return {
            "mean": old["mean"] + share * apart,
            "variance": old["variance"] + share * (new["variance"] - old["variance"] + spread),
        }

    merged = {name: layer(old, part[name]) if name in part else old for name, old in running.merged.items()}
    return RunningStatistics(parts, merged)


def finish_statistics(centre: RunningStatistics, spread: RunningStatistics) -> Statistics:
    """Means and biased variances of all parts of all replicas, from those of each by `centre_and_spread`."""
    return {
        name: {"mean": layer["mean"], "variance": layer["variance"] + spread.merged[name]["mean"]}
        for name, layer in centre.merged.items()
    }


def count_values(network: Network, batch: Batch, rule: MergeRule = "spread") -> dict[str, int]:
    """How many values of a channel each batch norm merges in one weight update: samples times positions."""
    samples = batch.global_ if rule == "spread" else batch.micro * batch.replicas
    return {node.name: samples * prod(node.shape[:-1]) for node in network.nodes if node.kind == BATCH_NORM}


def move_statistics(
    statistics: Statistics, merged: Statistics, momentum: float, counts: Mapping[str, int]
) -> Statistics:
    """m moving + (1 - m) merged, the variance unbiased first; once a weight update."""

    def layer(old: dict[str, Array], new: dict[str, Array], values: int) -> dict[str, Array]:
        unbiased = values / max(values - 1, 1)
        return {
            "mean": momentum * old["mean"] + (1 - momentum) * new["mean"],
            "variance": momentum * old["variance"] + (1 - momentum) * unbiased * new["variance"],
        }

    return {name: layer(old, merged[name], counts[name]) for name, old in statistics.items()}
