"""One weight update of any model: the batch over replicas and parts, the optimiser by the run's number formats.

The gradient is the mean over the whole batch, however it is split. Random keys belong to samples by their place in
that batch, so that a plain model draws the same numbers for every split. It knows no files and no hooks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from hotloop.engine import precision
from hotloop.engine.keys import sample_keys, stream
from hotloop.engine.loss_scale import AutoScale, StaticScale, choose, scale_loss, unscale
from hotloop.engine.mesh import REPLICA
from hotloop.errors import DataError
from hotloop.families.estimator.model import Model, widened
from hotloop.families.estimator.run_config import RunConfig

State = dict[str, Any]
Batch = Any
SERVED = ("weights", "model")
"""The parts of a state that evaluation and prediction need."""


@dataclass(frozen=True, eq=False)
class Training:
    """A model and how it is trained."""

    model: Model
    config: RunConfig
    mesh: Mesh | None = None

    @property
    def policy(self) -> precision.Policy:
        """The number formats."""
        return policy_of(self.config)

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
            "model": widened(state),
            "optimizer": self.model.spec.optimizer.init(weights),
            "scale": self.scale.init(),
        }

    def update(self, state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        """One weight update."""
        gradients, kept, figures = self._shared(
            self.policy.to_compute(state["weights"]),
            state["model"],
            state["scale"],
            batch,
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

    def _shared(self, *arguments: Any) -> tuple[Any, Any, dict[str, Array]]:
        """Gradients, model state and figures of the whole batch, each replica working on its share."""
        if self.mesh is None:
            return self._averaged(None, *arguments)
        everywhere, split = PartitionSpec(), PartitionSpec(REPLICA)  # type: ignore[no-untyped-call]
        found: tuple[Any, Any, dict[str, Array]] = jax.shard_map(
            partial(self._averaged, REPLICA),
            mesh=self.mesh,
            in_specs=(everywhere, everywhere, everywhere, split, everywhere),
            out_specs=everywhere,
            check_vma=False,
        )(*arguments)
        return found

    def _averaged(
        self, axis: str | None, weights: Any, state: Any, scale: Any, batch: Batch, key: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        count = self.config.accumulation
        size = jax.tree.leaves(batch)[0].shape[0] // count
        first = 0 if axis is None else lax.axis_index(axis) * (count * size)

        def part(state: Any, number: Array | int) -> tuple[Any, Any, dict[str, Array]]:
            taken = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, number * size, size), batch)
            keys = sample_keys(key, first + number * size, size)
            return self._gradient(weights, state, scale, taken, keys)

        if count == 1:
            found = self._gradient(weights, state, scale, batch, sample_keys(key, first, size))
        else:
            found = _mean_of_parts(part, state, count)
        if axis is None:
            return found
        gradients, kept, figures = found
        shared: tuple[Any, Any, dict[str, Array]] = lax.pmean(  # type: ignore[no-untyped-call]
            (precision.cast(gradients, precision.FLOAT32), kept, figures), axis
        )
        return shared

    def _gradient(
        self, weights: Any, state: Any, scale: Any, batch: Batch, keys: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        model, features = self.model, self.policy.to_compute(batch["features"])

        def loss(weights: Any) -> tuple[Array, Any]:
            outputs, kept = model.outputs(weights, state, features, True, keys)
            each = model.measured(outputs, batch.get("labels"))
            figures = {name: value.mean(dtype=jnp.float32) for name, value in each.items()}
            return scale_loss(scale, figures["loss"]), (widened(kept), figures)

        gradients, (kept, figures) = jax.grad(loss, has_aux=True)(weights)
        return gradients, kept, figures


def _mean_of_parts(part: Callable[..., Any], state: Any, count: int) -> tuple[Any, Any, dict[str, Array]]:
    """Part after part; the model's state goes from one to the next, the rest is averaged in float32."""
    share = 1 / count

    def add(carry: Any, number: Array) -> tuple[Any, None]:
        state, gradients, figures = carry
        more, state, seen = part(state, number)
        gradients = jax.tree.map(lambda a, b: a + share * b.astype(jnp.float32), gradients, more)
        return (state, gradients, jax.tree.map(lambda a, b: a + share * b, figures, seen)), None

    forms = jax.eval_shape(part, state, 0)
    zeros = jax.tree.map(lambda form: jnp.zeros(form.shape, jnp.float32), (forms[0], forms[2]))
    (state, gradients, figures), _ = lax.scan(add, (state, *zeros), jnp.arange(count))
    return gradients, state, figures


def policy_of(config: RunConfig) -> precision.Policy:
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


def values(model: Model, policy: precision.Policy) -> Callable[[Any, Batch], dict[str, Array]]:
    """For evaluation: loss and metrics of each sample."""

    def fn(state: Any, batch: Batch) -> dict[str, Array]:
        outputs = _served(model, policy, state, batch["features"])
        return model.measured(outputs, batch.get("labels"))

    return fn


def rows(model: Model, policy: precision.Policy) -> Callable[[Any, Any], Any]:
    """For prediction: a row a sample."""
    return jax.jit(lambda state, features: model.predicted(_served(model, policy, state, features)))


def _served(model: Model, policy: precision.Policy, state: Any, features: Any) -> Any:
    weights, features = policy.to_compute(state["weights"]), policy.to_compute(features)
    outputs, _ = model.outputs(weights, state["model"], features, False, None)
    return outputs
