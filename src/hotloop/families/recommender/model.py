"""One weight update of the autoencoder, and its evaluation: `init`, `update`, `evaluate` as the engine wants them.

joint re-feeding: y = f(x), z = f(y) with another dropout mask, one loss L(y, x) + |z - y|^2, one step, the gradient
through everything. alternate: a step on L(y, x), then steps on |f(y) - y|^2 with y detached, each with the weights of
the step before. It knows dense batches, not where they come from; for joint re-feeding on a CPU sparse ones, too.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine import optim, precision
from hotloop.engine.device import platform
from hotloop.engine.keys import sample_keys, stream
from hotloop.families.recommender import autoencoder, sparse_joint
from hotloop.families.recommender.batches import SparseBatch
from hotloop.families.recommender.config import LAYERS, TrainOptions, UpdateOptions, pick_options
from hotloop.families.recommender.measures import sum_errors

State = Any
Batch = Mapping[str, Any]
OPTIMISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Momentum": ("momentum", {"momentum": 0.9}),
    "SGD": ("sgd", {"momentum": 0}),
    "Adam": ("adam", {}),
    "AdamW": ("adam", {}),
    "Muon": ("muon", {}),
}
DECAY_BESIDE = ("AdamW", "Muon")
"""Their decay shrinks the weights themselves; that of the others is added to the gradient."""


def resolve_precision(mode: str) -> str:
    """What `auto` stands for on this device."""
    return mode if mode != "auto" else "32.32" if platform() == "cpu" else "16.16"


@dataclass(frozen=True)
class Job:
    """All that an update and an evaluation are built from."""

    net: UpdateOptions
    items: int
    drops: tuple[int, ...] = ()
    """Updates from which each next factor of the rate holds."""
    low: float = -math.inf
    high: float = math.inf
    """Predictions are clipped to this range when they are evaluated."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Units of the encoder."""
        assert self.net.size is not None
        return LAYERS[self.net.size]

    @property
    def policy(self) -> precision.Policy:
        """The types to compute and to keep weights in."""
        mode = resolve_precision(self.net.precision)
        return precision.parse(mode, self.net.half, stochastic_rounding=not self.net.no_prng)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate before the first drop, after it, and so on."""
        assert self.net.batch_size is not None
        base = 2.0**self.net.base_learning_rate * self.net.batch_size
        return tuple(base * factor for factor in self.net.learning_rate_decay[: len(self.drops) + 1])


def make_job(config: TrainOptions, items: int, drops: tuple[int, ...], low: float, high: float) -> Job:
    """The job of a run on so many items with ratings from `low` to `high`."""
    bounds = (low, high) if config.clip else (-math.inf, math.inf)
    return Job(pick_options(UpdateOptions, config), items, drops, *bounds)


def optimiser(net: UpdateOptions) -> optim.Transformation:
    """Decay, then clipping, then momentum, then the rate."""
    name, params = OPTIMISERS[net.optimizer]
    beside, inside = (net.weight_decay, 0.0) if net.optimizer in DECAY_BESIDE else (0.0, net.weight_decay)
    clip = 1.0 if net.gradient_clipping else None
    return optim.make(name, params, weight_decay=beside, l2=inside, clip=clip)


def init(job: Job, key: Array) -> State:
    """Random weights, an optimiser that has seen nothing, no update yet."""
    params = job.policy.to_update(autoencoder.init(key, job.items, job.layers, job.net.is_tied))
    return {
        "params": params,
        "optimiser": precision.start_state(job.policy, optimiser(job.net), params),
        "update": jnp.zeros((), jnp.int32),
    }


def update(job: Job) -> Callable[[State, Batch, Array], tuple[State, dict[str, Array]]]:
    """One batch: one step, or 1 + aug_steps of them under alternate re-feeding."""
    chosen, net = optimiser(job.net), job.net

    def one(state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        x = batch["ratings"]
        rate = learning_rate(job, state["update"])
        step = _Step(job, chosen, rate, key)
        if net.refeeding == "joint":
            if isinstance(x, SparseBatch):
                state, (loss, mask) = step.made(state, _sparse_joint(job, state["params"], x, key), 0)
            else:
                state, (loss, mask) = step(state, lambda params: _joint(job, params, x, key), 0)
            figures = {"loss": loss, "rmse": jnp.sqrt(mask)}
        else:
            state, figures = _alternating(job, step, state, x, key)
        new = {**state, "update": state["update"] + 1}
        return new, {**figures, "learning_rate": rate, "gradient_norm": step.norm}

    return one


def _joint(job: Job, params: Any, x: Array, key: Array) -> tuple[Array, Array]:
    y = apply_network(job, params, x, stream(key, "dropout", 0))
    mask = autoencoder.masked_error(y, x.astype(y.dtype))
    again = apply_network(job, params, y, stream(key, "dropout", 1))
    return mask + autoencoder.dense_error(again, y), mask


def _sparse_joint(job: Job, params: Any, x: SparseBatch, key: Array) -> tuple[Any, tuple[Array, Array]]:
    """The same with sparse ratings: its gradient, and what `_joint` returns."""
    keeps = [draw_dropout(job, stream(key, "dropout", n), len(x.users)) for n in (0, 1)]
    result = sparse_joint.joint_gradient(params, x, keeps, job.net.loss_scaling)
    return result.gradients, (result.loss, result.masked)


def _alternating(
    job: Job, step: "_Step", state: State, x: Array, key: Array
) -> tuple[State, dict[str, Array]]:
    def rated(params: Any) -> tuple[Array, Array]:
        y = apply_network(job, params, x, stream(key, "dropout", 0))
        return autoencoder.masked_error(y, x.astype(y.dtype)), y

    state, (mask, y) = step(state, rated, 0)
    figures = {"loss": mask, "rmse": jnp.sqrt(mask)}
    steps = job.net.aug_steps if job.net.refeeding == "alternate" else 0
    for n in range(1, steps + 1):
        target = y

        def refed(params: Any, n: int = n, target: Array = target) -> tuple[Array, Array]:
            y = apply_network(job, params, target, stream(key, "dropout", n))
            return autoencoder.dense_error(y, target), y

        state, (figures["refeed_loss"], y) = step(state, refed, n)
    return state, figures


class _Step:
    """Gradient of a scaled loss, unscaled, then one step of the optimiser, rounded as the policy says."""

    def __init__(self, job: Job, chosen: Any, rate: Array, key: Array):
        self.job, self.chosen, self.rate, self.key = job, chosen, rate, key
        self.norm: Array = jnp.zeros(())

    def __call__(
        self, state: State, loss: Callable[[Any], tuple[Array, Any]], number: int
    ) -> tuple[State, Any]:
        job, scale = self.job, self.job.net.loss_scaling

        def scaled(params: Any) -> tuple[Array, Any]:
            value, extra = loss(params)
            return scale * value, (value, extra)

        compute = job.policy.to_compute(state["params"])
        return self.made(state, jax.grad(scaled, has_aux=True)(compute), number)

    def made(self, state: State, gradient: tuple[Any, Any], number: int) -> tuple[State, Any]:
        """The step with a gradient of the scaled loss that is there already, and what came with it."""
        job, scale = self.job, self.job.net.loss_scaling
        gradients, result = gradient
        wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / scale, gradients)
        self.norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(wide)))
        params, slots = precision.optimise(
            job.policy, self.chosen, wide, state["optimiser"], state["params"],
            stream(self.key, "rounding", number), rate=self.rate,
        )  # fmt: skip
        return {**state, "params": params, "optimiser": slots}, result


def learning_rate(job: Job, update: Array) -> Array:
    """The rate of this update: constant between drops."""
    rates = jnp.asarray(job.rates, jnp.float32)
    return rates[sum((update >= drop).astype(jnp.int32) for drop in job.drops)] if job.drops else rates[0]


def apply_network(job: Job, params: Any, x: Array, key: Array | None = None) -> Array:
    """Predictions for dense ratings; with a key, the code is dropped out, each row by its own place."""
    return autoencoder.forward(params, x, draw_dropout(job, key, len(x)), linear=job.net.no_selu)


def draw_dropout(job: Job, key: Array | None, rows: int) -> Array | float:
    """What the code is multiplied with."""
    if key is None or not job.net.code_dropout:
        return 1.0
    share = 1 - job.net.code_dropout
    keys = sample_keys(key, 0, rows)
    chosen = jax.vmap(lambda k: jax.random.bernoulli(k, share, (job.layers[-1],)))(keys)
    return chosen / np.float32(share)


def predict(job: Job, state: State, x: Array) -> Array:
    """Predictions without dropout, float32."""
    return apply_network(job, job.policy.to_compute(state["params"]), x)


def evaluate(job: Job) -> Callable[[State, Batch], dict[str, Array]]:
    """For each user: squared and absolute error of clipped predictions, summed over its ratings, and their number."""

    def values(state: State, batch: Batch) -> dict[str, Array]:
        predictions = jnp.clip(predict(job, state, batch["ratings"]), job.low, job.high)
        return sum_errors(predictions, batch["truth"])

    return values
