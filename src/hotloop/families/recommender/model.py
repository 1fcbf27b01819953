"""One weight update of the autoencoder, and its evaluation: `init`, `update`, `evaluate` as the engine wants them.

joint re-feeding: y = f(x), z = f(y) with another dropout mask, one loss L(y, x) + |z - y|^2, one step, the gradient
through everything. alternate: a step on L(y, x), then steps on |f(y) - y|^2 with y detached, each with the weights of
the step before. It knows dense batches, not where they come from; for joint re-feeding on a CPU sparse ones, too.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine import optim, precision
from hotloop.engine.device import platform
from hotloop.engine.keys import sample_keys, stream
from hotloop.engine.optim import learning_rate
from hotloop.families.recommender import autoencoder
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
    transformation, refeeding = optimiser(job.net), job.net.refeeding
    steps = {"boundaries": [drop - 1 for drop in job.drops], "values": job.rates}
    rate_at = learning_rate("stepped", steps, global_batch_size=1, updates_per_epoch=1)

    def make_update(state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        x, rate = batch["ratings"], rate_at(state["update"])

        def step(state: State, gradients: Any, number: int) -> tuple[State, Array]:
            """The state after one step of the optimiser with gradients of the scaled loss, and their norm."""
            scale = job.net.loss_scaling
            wide = jax.tree.map(
                lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / scale, gradients
            )
            norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(wide)))
            slots, params, rounding = state["optimiser"], state["params"], stream(key, "rounding", number)
            params, slots = precision.optimise(
                job.policy, transformation, wide, slots, params, rounding, rate=rate
            )
            return {**state, "params": params, "optimiser": slots}, norm

        if isinstance(x, SparseBatch):
            gradients, (loss, masked) = _sparse_joint(job, state["params"], x, key)
        elif refeeding == "joint":
            gradients, (loss, masked) = _gradient(job, state, lambda params: _joint(job, params, x, key))
        else:
            gradients, (masked, y) = _gradient(job, state, lambda params: _rated(job, params, x, key))
            loss = masked
        state, norm = step(state, gradients, 0)
        figures = {"loss": loss, "rmse": jnp.sqrt(masked)}
        for n in range(1, job.net.aug_steps + 1) if refeeding == "alternate" else ():
            refeed = partial(_refed, job, target=y, key=stream(key, "dropout", n))
            gradients, (figures["refeed_loss"], y) = _gradient(job, state, refeed)
            state, norm = step(state, gradients, n)
        new = {**state, "update": state["update"] + 1}
        return new, {**figures, "learning_rate": rate, "gradient_norm": norm}

    return make_update


def _gradient(
    job: Job, state: State, loss: Callable[[Any], tuple[Array, Any]]
) -> tuple[Any, tuple[Array, Any]]:
    """The gradient of the scaled loss, and what the loss returns."""

    def scaled(params: Any) -> tuple[Array, Any]:
        value, extra = loss(params)
        return job.net.loss_scaling * value, (value, extra)

    found: tuple[Any, Any] = jax.grad(scaled, has_aux=True)(job.policy.to_compute(state["params"]))
    return found


def _joint(job: Job, params: Any, x: Array, key: Array) -> tuple[Array, Array]:
    masked, y = _rated(job, params, x, key)
    return masked + _refed(job, params, y, stream(key, "dropout", 1))[0], masked


def _sparse_joint(job: Job, params: Any, x: SparseBatch, key: Array) -> tuple[Any, tuple[Array, Array]]:
    """The same with sparse ratings: its gradient, and what `_joint` returns."""
    keeps = [draw_dropout(job, stream(key, "dropout", n), len(x.users)) for n in (0, 1)]
    return autoencoder.joint_gradient(params, x, keeps, job.net.loss_scaling)


def _rated(job: Job, params: Any, x: Array, key: Array) -> tuple[Array, Array]:
    y = apply_network(job, params, x, stream(key, "dropout", 0))
    return autoencoder.masked_error(y, x.astype(y.dtype)), y


def _refed(job: Job, params: Any, target: Array, key: Array) -> tuple[Array, Array]:
    y = apply_network(job, params, target, key)
    return autoencoder.dense_error(y, target), y


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
