"""A layer as the engine runs it: `init`, `update` and `evaluate` as in every family, and one forward pass as a step.

Batches of `update` and `evaluate` are rows first. A layer may want its rows on another axis (in recurrent ones time
comes first); that a benchmark turns its batches once each way costs nothing, since the compiler drops both.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from hotloop.engine import optim, precision, processes
from hotloop.engine.device import REPLICA
from hotloop.engine.keys import stream
from hotloop.engine.optim_keys import USUAL_PARAMS
from hotloop.engine.precision import EVERYWHERE, average_replicas, on_replicas
from hotloop.families.kernels.catalogue import Batch, Kernel, build
from hotloop.families.kernels.config import LayerOptions

UNREACHABLE = 60000.0  # no sound output is as large in any type; the compiler cannot know that
State = dict[str, Any]
Step = Callable[[State, Any, Array], tuple[State, dict[str, Array]]]


@dataclass(frozen=True)
class Job:
    config: LayerOptions
    dtype: str
    device: jax.Device = field(default_factory=lambda: jax.devices()[0])  # with a mesh, its first
    mesh: Mesh | None = None  # the replicas that share a batch; None: one device

    @property
    def kernel(self) -> Kernel:
        return build(self.config)

    @property
    def policy(self) -> precision.Policy:
        # Rounding to nearest would swallow every step smaller than half the gap between neighbouring 16-bit weights.
        dtype = jnp.dtype(self.dtype)
        return precision.Policy(dtype, dtype, stochastic_rounding=dtype != jnp.float32)

    @property
    def optimiser(self) -> optim.Transformation:
        return optim.make(self.config.optimizer, USUAL_PARAMS.get(self.config.optimizer, {}))

    def matmul_precision(self) -> AbstractContextManager[None]:
        """How products are summed while a program is traced: 16 bits if asked for, and float32 never as TF32."""
        if self.config.enable_half_partials:
            algorithm = {"float16": "F16_F16_F16", "bfloat16": "BF16_BF16_BF16"}[self.dtype]
            return jax.default_matmul_precision(algorithm)  # type: ignore[no-any-return]
        return exact_products(self.device.platform if self.dtype == "float32" else "cpu")

    def sharding(self, rows: int | None = None) -> Sharding:
        """Of an array whose rows, on this axis, are divided among the replicas; None: each has the whole array."""
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, EVERYWHERE if rows is None else rows_on(rows))


def exact_products(platform: str) -> AbstractContextManager[None]:
    """While a program is traced: float32 products are never TF32, which a CPU has not."""
    return jax.default_matmul_precision(None if platform == "cpu" else "highest")  # type: ignore[no-any-return]


def rows_on(axis: int) -> P:
    return P(*[None] * axis, REPLICA)  # type: ignore[no-untyped-call]


def init(job: Job, key: Array) -> State:
    params = job.kernel.init(key, job.dtype)
    return {"params": params, "slots": precision.start_state(job.policy, job.optimiser, params)}


def update(job: Job) -> Step:
    """One update on a batch of all replicas' rows."""
    policy, optimiser, differentiate = job.policy, job.optimiser, gradients(job)

    def one(state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        loss, slopes = differentiate(state["params"], batch)
        params, slots = precision.optimise(
            policy, optimiser, slopes, state["slots"], state["params"], key, rate=job.config.learning_rate
        )
        return {**state, "params": params, "slots": slots}, {"loss": loss}

    return one


def gradients(job: Job) -> Callable[[Any, Batch], tuple[Array, Any]]:
    """(parameters, batch) -> mean loss over all rows and its gradients, both float32."""
    kernel = job.kernel

    def of_share(axis: str | None, batch: Batch, params: Any) -> tuple[Array, Any]:
        def scaled(params: Any) -> Array:
            return kernel.loss(params, inputs).astype(jnp.float32) * factor

        inputs = kernel.lay_out(batch)
        factor = loss_scale(kernel.target(inputs).size, job.dtype)
        means = average_replicas(jax.value_and_grad(scaled)(params), axis)
        loss, slopes = jax.tree.map(lambda mean: mean.astype(jnp.float32) * (1 / factor), means)
        return loss, slopes

    averaged = on_replicas(of_share, job.mesh)
    return lambda params, batch: averaged(batch, params)


def loss_scale(terms: int, dtype: Any) -> float:
    """1, or for float16 the largest power of two up to the number of terms in the loss's mean, and 8192.

    Without it float16 gradients would fall below the smallest number of that type.
    """
    if jnp.dtype(dtype) != jnp.float16:
        return 1.0
    return float(2 ** (min(terms, 8192).bit_length() - 1))


def evaluate(job: Job) -> Callable[[State, Batch], dict[str, Array]]:
    kernel = job.kernel

    def values(state: State, batch: Batch) -> dict[str, Array]:
        alone = {name: leaf[:, None] for name, leaf in batch.items()}
        return {"loss": jax.vmap(lambda row: kernel.loss(state["params"], kernel.lay_out(row)))(alone)}

    return values


def begin(job: Job, key: Array, x: Any) -> State:
    """What `train_on_pool` or `infer_on_pool` goes on from, in its place; `x` is any batch's."""
    state: State = processes.place({**init(job, key), "count": jnp.uint32(0)}, job.sharding())
    if job.config.train:
        return state
    y = jax.eval_shape(_apply(job), state["params"], x)
    start = jnp.zeros(y.shape, y.dtype, device=job.sharding(job.kernel.row_axes["y"]))
    return {"params": state["params"], "count": state["count"], "y": start}


def train_on_pool(job: Job) -> Step:
    """(state, pool of batches, key) -> the state after one update, on the batch of its count.

    Batch and rounding follow a count in the state, not the loop's own number and key. XLA:CPU works an index out again
    for every element of a loop that the batch is fused into: a count is one load, the loop's `first + step` made
    training a dense layer of one row 1.2 times as slow. And a key from the count is one kernel less on a GPU.
    """
    one = _train(job)
    return lambda state, pool, _: one(state, pick(pool, state["count"]))


def train_on_round(job: Job) -> Step:
    """(state, batches, key) -> the state after an update on each of them, and the metrics of all.

    As between two turns of a loop, parameters are written out between two updates, and nothing of a batch is worked out
    before: what depends on it alone could else be once for all turns.
    """
    one = _train(job)

    def step(state: State, batches: Sequence[Batch], _: Array) -> tuple[State, dict[str, Array]]:
        metrics = []
        for batch in batches:
            # Without the count, which would be a kernel of its own.
            begun, batch = lax.optimization_barrier(({**state, "count": None}, batch))  # type: ignore[no-untyped-call]
            state, metric = one({**begun, "count": state["count"]}, batch)
            metrics.append(metric)
        return state, jax.tree.map(lambda *values: jnp.stack(values), *metrics)

    return step


def _train(job: Job) -> Callable[[State, Batch], tuple[State, dict[str, Array]]]:
    kernel, one = job.kernel, update(job)
    rounding = stream(jax.random.key(job.config.seed), "rounding", 0)

    def train(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        count = state["count"]
        state, metrics = one(state, kernel.rows_first(batch), jax.random.fold_in(rounding, count))
        return {**state, "count": count + 1}, metrics

    return train


def infer_on_pool(job: Job) -> Step:
    """(state, pool of batches, key) -> the state after one forward pass, on the batch of its count; `y` is the output.

    The count depends on the output, so no pass can begin, let alone be moved out of the loop, before the one before
    it is done; the last output leaves the call, so that none can be left out.
    """
    apply = _apply(job)

    def step(state: State, pool: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        # Whole in every pass, of which one number is looked at: a compiler that writes out several in a turn of the
        # loop could else leave out the rest of all but the last.
        y = lax.optimization_barrier(apply(state["params"], pick(pool, state["count"])["x"]))  # type: ignore[no-untyped-call]
        surprise = _surprise(y)
        return {"params": state["params"], "count": state["count"] + 1 + surprise, "y": y}, {}

    return step


def infer_on_round(job: Job) -> Step:
    """(state, batches, key) -> the state after a forward pass on each of them.

    No pass has its input before the whole output of the one before is there, and the count depends on all of them:
    what `infer_on_pool` promises, without the copy of a batch that is picked by the count.
    """
    apply = _apply(job)

    def step(state: State, batches: Sequence[Batch], _: Array) -> tuple[State, dict[str, Array]]:
        inputs = [batch["x"] for batch in batches]
        count, x = lax.optimization_barrier((state["count"], inputs[0]))  # type: ignore[no-untyped-call]
        for following in (*inputs[1:], None):
            y, x = lax.optimization_barrier((apply(state["params"], x), following))  # type: ignore[no-untyped-call]
            count = count + 1 + _surprise(y)
        return {"params": state["params"], "count": count, "y": y}, {}

    return step


def _surprise(y: Array) -> Array:
    return (y.reshape(-1)[0] > UNREACHABLE).astype(jnp.uint32)


def pick(pool: Batch, number: Array) -> Batch:
    place = number % pool["x"].shape[0]
    return {name: lax.dynamic_index_in_dim(leaf, place, keepdims=False) for name, leaf in pool.items()}


def _apply(job: Job) -> Callable[[Any, Array], Array]:
    apply = job.kernel.apply
    if job.mesh is None:
        return apply
    x, y = (rows_on(job.kernel.row_axes[name]) for name in "xy")
    return jax.shard_map(apply, mesh=job.mesh, in_specs=(EVERYWHERE, x), out_specs=y, check_vma=False)
