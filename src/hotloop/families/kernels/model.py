"""A layer as the engine runs it: `init`, `update` and `evaluate` as in every family, and one forward pass as a step.

Batches of `update` and `evaluate` are rows first. A layer may want its rows on another axis (in recurrent ones time
comes first); that a benchmark turns its batches once each way costs nothing, since the compiler drops both.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from hotloop.engine import optim, precision, processes
from hotloop.engine.device import REPLICA
from hotloop.engine.keys import stream
from hotloop.engine.optim_keys import USUAL_PARAMS
from hotloop.engine.precision import EVERYWHERE, average_replicas, on_replicas
from hotloop.families.kernels.catalogue import Batch, HostBatch, Kernel, build
from hotloop.families.kernels.config import LayerOptions

UNREACHABLE = 60000.0  # no sound output is as large in any type; the compiler cannot know that
POOL_BATCHES, POOL_BYTES = 4, 2**28
"""Different batches, fewer where they are large: no iteration sees the input of the one before."""
PIECE_BYTES = 2**27  # what is sent from the host at once; two pieces are on the device at a time
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
    kernel, one = job.kernel, update(job)
    rounding = stream(jax.random.key(job.config.seed), "rounding", 0)

    def step(state: State, pool: Batch, _: Array) -> tuple[State, dict[str, Array]]:
        count = state["count"]
        batch = kernel.rows_first(pick(pool, count))
        state, metrics = one(state, batch, jax.random.fold_in(rounding, count))
        return {**state, "count": count + 1}, metrics

    return step


def infer_on_pool(job: Job) -> Step:
    """(state, pool of batches, key) -> the state after one forward pass, on the batch of its count; `y` is the output.

    The count depends on the output, so no pass can begin, let alone be moved out of the loop, before the one before
    it is done; the last output leaves the call, so that none can be left out.
    """
    apply = _apply(job)

    def step(state: State, pool: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        # Written out whole in every pass: of those that are followed by others in one turn of the loop the compiler
        # would else work out the one number that is looked at.
        y = lax.optimization_barrier(apply(state["params"], pick(pool, state["count"])["x"]))  # type: ignore[no-untyped-call]
        surprise = (y.reshape(-1)[0] > UNREACHABLE).astype(jnp.uint32)
        return {"params": state["params"], "count": state["count"] + 1 + surprise, "y": y}, {}

    return step


def pick(pool: Batch, number: Array) -> Batch:
    place = number % pool["x"].shape[0]
    return {name: lax.dynamic_index_in_dim(leaf, place, keepdims=False) for name, leaf in pool.items()}


def _apply(job: Job) -> Callable[[Any, Array], Array]:
    apply = job.kernel.apply
    if job.mesh is None:
        return apply
    x, y = (rows_on(job.kernel.row_axes[name]) for name in "xy")
    return jax.shard_map(apply, mesh=job.mesh, in_specs=(EVERYWHERE, x), out_specs=y, check_vma=False)


class PoolOnDevice:
    """A few batches [n, ...] of all replicas' rows, on the device: a step is one call over them, and nothing is sent.

    Batch number t is pool[t mod n]. The feed hands over the whole pool: the steps pick their batch.
    """

    any_count = True
    batch_size = 1
    longest_call = 2**31 - 1

    def __init__(self, job: Job):
        config, kernel = job.config, job.kernel
        rows = config.batch_size * config.replicas

        def draw(number: int) -> HostBatch:  # by numpy: jax would take seconds to compile it
            return kernel.data(np.random.default_rng((config.seed, number)), rows, jnp.dtype(job.dtype))

        batches = [draw(0)]
        fitting = POOL_BYTES // sum(leaf.nbytes for leaf in batches[0].values())
        batches += [draw(number) for number in range(1, max(2, min(POOL_BATCHES, fitting)))]
        stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
        zeros = {name: np.zeros_like(leaf) for name, leaf in stacked.items()}
        self._host: HostBatch = zeros if config.use_zero_values else stacked
        self._shardings = {name: job.sharding(1 + kernel.row_axes[name]) for name in self._host}
        self.batches = len(batches)
        self.pool = self._send(np.arange(self.batches))

    def at(self, number: int) -> HostBatch:
        """The batch of one iteration, counted from 0, on the host."""
        return {name: leaf[number % self.batches] for name, leaf in self._host.items()}

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        return self.pool

    def like(self, count: int) -> Any:
        return self.pool

    def batch(self, arguments: Any, step: Array) -> Any:
        return arguments

    def prepare(self, first: int) -> None:
        """Called when the call before iteration `first` is on its way."""

    def position(self, update: int) -> dict[str, Any]:
        return {"update": update}

    def check_position(self, saved: Mapping[str, Any]) -> None:
        """A benchmark is never resumed."""

    def _send(self, numbers: Any) -> Batch:
        places = numbers % self.batches
        return {
            name: processes.place(leaf[places], self._shardings[name]) for name, leaf in self._host.items()
        }


class PoolFromHost(PoolOnDevice):
    """The same batches, sent from the host in pieces of which each is sent while the device works on the last."""

    def __init__(self, job: Job):
        super().__init__(job)
        iterations = job.config.batches_per_step
        size = sum(leaf.nbytes for leaf in self._host.values()) / self.batches
        # Pieces of equal length, so that one program serves all and batch t of a piece is where t says.
        lengths = [n for n in range(1, iterations + 1) if iterations % n == 0 and n * size <= PIECE_BYTES]
        self.longest_call = max(lengths, default=1)
        self.prepare(0)

    def prepare(self, first: int) -> None:
        self.pool = self._send(first + np.arange(self.longest_call))
