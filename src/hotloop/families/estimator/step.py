"""One weight update of any model: the batch over replicas and parts, the optimiser by the run's number formats.

The gradient is the mean over the whole batch, however it is split. Random keys belong to samples by their place in
that batch, so that a plain model draws the same numbers for every split. It knows no files and no hooks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from hotloop.engine import precision
from hotloop.engine.keys import stream
from hotloop.engine.loss_scale import AutoScale, StaticScale, choose, scale_loss, unscale
from hotloop.engine.split import average_replicas, mean_of_parts, on_replicas
from hotloop.errors import DataError
from hotloop.families.estimator.config import RunConfig
from hotloop.families.estimator.model import BuiltModel, widen_state

State = dict[str, Any]
Batch = Any
INFERENCE_PARTS = ("weights", "model")
"""The parts of a state that evaluation and prediction need."""


@dataclass(frozen=True, eq=False)
class Job:
    """A model and how it is trained."""

    model: BuiltModel
    config: RunConfig
    mesh: Mesh | None = None

    @property
    def policy(self) -> precision.Policy:
        """The number formats."""
        return parse_policy(self.config)

    @property
    def scale(self) -> StaticScale | AutoScale:
        """The loss scaling."""
        asked = self.config.loss_scale
        return AutoScale() if isinstance(asked, str) else StaticScale(asked)

    def init(self, key: Array) -> State:
        """Fresh weights, an optimiser that has seen nothing."""
        weights, state = self.model.init(key)
        weights = self.policy.to_update(weights)
        return {
            "weights": weights,
            "model": widen_state(state),
            "optimizer": precision.start_state(self.policy, self.model.spec.optimizer, weights),
            "scale": self.scale.init(),
        }

    @cached_property
    def start(self) -> Callable[[Array], State]:
        """`init`, compiled once."""
        compiled: Callable[[Array], State] = jax.jit(self.init)
        return compiled

    def update(self, state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        """One weight update."""
        gradients, kept, figures = on_replicas(self._averaged, self.mesh)(
            batch,
            self.policy.to_compute(state["weights"]),
            state["model"],
            state["scale"],
            stream(key, "model", 0),
        )
        gradients = unscale(state["scale"], gradients)
        weights, slots = precision.optimise(
            self.policy, self.model.spec.optimizer, gradients, state["optimizer"], state["weights"],
            stream(key, "rounding", 0),
        )  # fmt: skip
        new = {"weights": weights, "model": kept, "optimizer": slots}
        usable, scale = self.scale.judge(state["scale"], gradients)
        if isinstance(self.scale, AutoScale):
            new = choose(usable, new, {name: state[name] for name in new})
        return {**new, "scale": scale}, figures

    def _averaged(
        self, axis: str | None, batch: Batch, weights: Any, state: Any, scale: Any, key: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        """Gradients, model state and figures of the whole batch; the state goes from one part to the next."""

        def part(state: Any, taken: Batch, keys: Array) -> tuple[tuple[Any, dict[str, Array]], Any]:
            gradients, kept, figures = self._gradient(weights, state, scale, taken, keys)
            return (gradients, figures), kept

        means, kept = mean_of_parts(part, state, batch, key, self.config.accumulation, axis)
        (gradients, figures), kept = average_replicas((means, kept), axis)
        return gradients, kept, figures

    def _gradient(
        self, weights: Any, state: Any, scale: Any, batch: Batch, keys: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        model, features = self.model, self.policy.to_compute(batch["features"])

        def loss(weights: Any) -> tuple[Array, Any]:
            outputs, kept = model.outputs(weights, state, features, True, keys)
            each = model.measured(outputs, batch.get("labels"))
            figures = {name: value.mean(dtype=jnp.float32) for name, value in each.items()}
            return scale_loss(scale, figures["loss"]), (widen_state(kept), figures)

        gradients, (kept, figures) = jax.grad(loss, has_aux=True)(weights)
        return gradients, kept, figures


def parse_policy(config: RunConfig) -> precision.Policy:
    """The number formats of a run."""
    return precision.parse(config.precision, config.half, stochastic_rounding=config.stochastic_rounding)


def check_split(batch_size: int, config: RunConfig) -> None:
    """Refuse a batch that does not fall into equal parts."""
    parts = config.replicas * config.accumulation
    if batch_size % parts:
        raise DataError(
            f"a batch of {batch_size} does not fall into {config.replicas} replicas x {config.accumulation} parts: "
            f"take a multiple of {parts}"
        )


def values(model: BuiltModel, policy: precision.Policy) -> Callable[[Any, Batch], dict[str, Array]]:
    """For evaluation: loss and metrics of each sample."""

    def fn(state: Any, batch: Batch) -> dict[str, Array]:
        outputs = _served(model, policy, state, batch["features"])
        return model.measured(outputs, batch.get("labels"))

    return fn


def rows(model: BuiltModel, policy: precision.Policy) -> Callable[[Any, Any], Any]:
    """For prediction: a row a sample."""
    return jax.jit(lambda state, features: model.predicted(_served(model, policy, state, features)))


def _served(model: BuiltModel, policy: precision.Policy, state: Any, features: Any) -> Any:
    weights, features = policy.to_compute(state["weights"]), policy.to_compute(features)
    outputs, _ = model.outputs(weights, state["model"], features, False, None)
    return outputs
