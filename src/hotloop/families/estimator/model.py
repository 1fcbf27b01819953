"""Any model as a family: `init`, `update` and `evaluate` of a job, by the number formats and replicas of its config.

The gradient is the mean over the whole batch, however it is split. Random keys belong to samples by their place in
that batch, so that a plain model draws the same numbers for every split. It knows no files and no hooks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from hotloop.engine import optim, precision
from hotloop.engine.keys import stream
from hotloop.engine.optim import learning_rate
from hotloop.engine.precision import AutoScale, LossScale, Trained, init_trained, update_weights
from hotloop.families.estimator.build import BuiltModel
from hotloop.families.estimator.config import RunConfig, split_schedule

State = dict[str, Any]
NamedBatch = dict[str, Any]
TRAINED = ("weights", "optimizer", "model", "scale")  # the names under which a state has what is Trained
INFERENCE_PARTS = ("weights", "model")
"""The parts of a state that evaluation and prediction need."""


@dataclass(frozen=True, eq=False)
class Job:
    """All that a program is built from; two are never equal, since what a model's functions compute is not known."""

    model: BuiltModel
    config: RunConfig
    mesh: Mesh | None = None

    @cached_property
    def policy(self) -> precision.Policy:
        config = self.config
        return precision.parse(config.precision, config.half, stochastic_rounding=config.stochastic_rounding)

    @cached_property
    def scale(self) -> LossScale:
        wanted = self.config.loss_scale
        return AutoScale() if isinstance(wanted, str) else wanted

    @cached_property
    def optimizer(self) -> Any:
        """That of the spec, an optax transformation also where it is a name."""
        spec = self.model.spec
        if not isinstance(spec.optimizer, str):
            return spec.optimizer
        rate = spec.learning_rate
        if isinstance(rate, Mapping):
            per_epoch = rate.get("updates_per_epoch", 1)
            rate = learning_rate(**split_schedule(rate), global_batch_size=1, updates_per_epoch=per_epoch)
        return optim.at_rate(optim.make(spec.optimizer, spec.optimizer_params), rate)


def init(job: Job, key: Array) -> State:
    """Fresh weights, an optimiser that has seen nothing."""
    served = init_served(job, key)
    trained = init_trained(job.policy, job.optimizer, job.scale, served["weights"], served["model"])
    return dict(zip(TRAINED, trained, strict=True))


def init_served(job: Job, key: Array) -> State:
    """The INFERENCE_PARTS of a fresh state; the model's own is kept in float32, whatever the weights' type."""
    weights, state = job.model.init(key)
    return {"weights": job.policy.to_update(weights), "model": _widen(state)}


def update(job: Job) -> Callable[[State, NamedBatch, Array], tuple[State, dict[str, Array]]]:
    """One weight update; the model's own state goes from one part of the batch to the next."""

    def loss(weights: Any, state: Any, samples: NamedBatch, keys: Array) -> tuple[Array, Any]:
        features = job.policy.to_compute(samples["features"])
        outputs, kept = job.model.apply(weights, state, features, True, keys)
        each = job.model.measure(outputs, samples.get("labels"))
        figures = {name: value.mean(dtype=jnp.float32) for name, value in each.items()}
        return figures["loss"], (_widen(kept), figures)

    def one(state: State, batch: NamedBatch, key: Array) -> tuple[State, dict[str, Array]]:
        new, figures = update_weights(
            loss,
            Trained(*(state[name] for name in TRAINED)),
            batch,
            stream(key, "model", 0),
            stream(key, "rounding", 0),
            policy=job.policy,
            optimiser=job.optimizer,
            scale=job.scale,
            mesh=job.mesh,
            accumulation=job.config.accumulation,
        )
        return dict(zip(TRAINED, new, strict=True)), figures

    return one


def evaluate(job: Job) -> Callable[[State, NamedBatch], dict[str, Array]]:
    """Loss and metrics of each sample."""

    def values(state: State, batch: NamedBatch) -> dict[str, Array]:
        return job.model.measure(_apply(job, state, batch["features"]), batch.get("labels"))

    return values


def predict(job: Job) -> Callable[[State, Any], Any]:
    """A row for each sample, of features alone."""
    return lambda state, features: job.model.predict(_apply(job, state, features))


def _apply(job: Job, state: State, features: Any) -> Any:
    weights, features = job.policy.to_compute(state["weights"]), job.policy.to_compute(features)
    outputs, _ = job.model.apply(weights, state["model"], features, False, None)
    return outputs


def _widen(state: Any) -> Any:
    return precision.cast(state, jnp.dtype("float32"))
