"""The compiled loop: many iterations of one kernel in one call, none of which a compiler may hoist or drop.

An iteration's batch is chosen by a counter that the last iteration's output has a say in, so no iteration
can begin, let alone be moved out of the loop, before the one before it is done; the last output (or every
loss) leaves the call, so none can be left out. Several replicas run the same loop on their share of the rows
and average their gradients. Timing is elsewhere.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hotloop.engine.device import REPLICA
from hotloop.engine.progress import compiling
from hotloop.engine.rounding import stochastic_round
from hotloop.errors import OptionError
from hotloop.families.kernels.kernel import Batch, Kernel

UNREACHABLE = 60000.0
"""No sound output is as large in any type; the compiler cannot know that."""
LARGEST_SCALE = 8192
P0 = P()  # type: ignore[no-untyped-call]  # the same on every replica

Call = Callable[[Any, Array, Batch], tuple[Any, Array, Array]]
"""(parameters, count, pool [n, ...]) -> (parameters, count, last output or every loss)."""


def inference(kernel: Kernel, iterations: int) -> Call:
    """Forward passes, each over the next batch of the pool; the last output is the result."""

    def call(params: Any, count: Array, pool: Batch) -> tuple[Any, Array, Array]:
        def body(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            count, _last = carry
            y = kernel.apply(params, pick(pool, count)["x"])
            surprise = (y.reshape(-1)[0] > UNREACHABLE).astype(count.dtype)
            return (count + 1 + surprise, y), None

        y = jax.eval_shape(kernel.apply, params, pick(pool, count)["x"])
        (count, last), _ = lax.scan(body, (count, jnp.zeros(y.shape, y.dtype)), None, length=iterations)
        return params, count, last

    return call


def training(kernel: Kernel, iterations: int, learning_rate: float, key: Array, axis: str | None) -> Call:
    """Weight updates, each on the next batch of the pool; every loss is the result."""
    update = updater(kernel, learning_rate, key, axis)

    def call(params: Any, count: Array, pool: Batch) -> tuple[Any, Array, Array]:
        def body(carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], Array]:
            params, count = carry
            loss, _, params = update(params, count, pick(pool, count))
            return (params, count + 1), loss

        (params, count), losses = lax.scan(body, (params, count), None, length=iterations)
        return params, count, losses

    return call


def pick(pool: Batch, count: Array) -> Batch:
    """The pool's batch for this count."""
    place = count % jax.tree.leaves(pool)[0].shape[0]
    return {name: lax.dynamic_index_in_dim(leaf, place, keepdims=False) for name, leaf in pool.items()}


Update = Callable[[Any, Array, Batch], tuple[Array, Any, Any]]


def updater(kernel: Kernel, learning_rate: float, key: Array, axis: str | None) -> Update:
    """One SGD update: (parameters, count, batch) -> (loss, gradients, new parameters).

    16-bit weights are rounded stochastically: rounding to nearest would swallow every step that is smaller
    than half the gap between neighbours, and the loss would stand still. float16 gradients are computed from
    a loss scaled by a power of two, or they would fall below its smallest number.
    """

    def update(params: Any, count: Array, batch: Batch) -> tuple[Array, Any, Any]:
        scale = loss_scale(kernel.loss_terms, jax.tree.leaves(params)[0].dtype)
        loss, scaled = jax.value_and_grad(lambda p: kernel.loss(p, batch) * scale)(params)
        if axis is not None:
            loss, scaled = lax.pmean((loss, scaled), axis)  # type: ignore[no-untyped-call]
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, scaled)
        leaves, tree = jax.tree.flatten(params)
        rounding = jax.random.fold_in(key, count)
        new = [
            stochastic_round(leaf.astype(jnp.float32) - learning_rate * g, leaf.dtype, rounding, number)
            for number, (leaf, g) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True))
        ]
        return loss / scale, gradients, jax.tree.unflatten(tree, new)

    return update


def loss_scale(terms: int, dtype: Any) -> float:
    """1, or for float16 the largest power of two up to the number of terms in the loss's mean, and 8192."""
    return float(2 ** (min(terms, LARGEST_SCALE).bit_length() - 1)) if dtype == jnp.float16 else 1.0


def matmul_precision(dtype: str, half_partials: bool, platform: str) -> AbstractContextManager[None]:
    """How products are summed while a program is traced: 16 bits if asked for, and float32 never as TF32."""
    precision: Any = None
    if half_partials:
        precision = {"float16": "F16_F16_F16", "bfloat16": "BF16_BF16_BF16"}[dtype]
    elif dtype == "float32" and platform != "cpu":
        precision = "highest"
    context: AbstractContextManager[None] = jax.default_matmul_precision(precision)
    return context


@dataclass
class CompiledCall:
    """A call compiled ahead of time."""

    compiled: Any
    lowered_text: Callable[[], str]
    compile_seconds: float

    def __call__(self, params: Any, count: Array, pool: Batch) -> tuple[Any, Array, Array]:
        """Run it; the parameters and the count handed in are consumed."""
        result: tuple[Any, Array, Array] = self.compiled(params, count, pool)
        return result


def compile_call(
    call: Call, arguments: tuple[Any, Array, Batch], kernel: Kernel, mesh: Mesh | None, result: P
) -> CompiledCall:
    """Compile a call for these arguments, over the mesh's replicas if there is one."""
    start = time.perf_counter()
    if mesh is not None:
        call = over_replicas(call, mesh, (P0, P0, pool_specs(kernel, arguments[2])), (P0, P0, result))
    try:
        with compiling(recorded=True):
            lowered = jax.jit(call, donate_argnums=(0, 1)).lower(*arguments)
            compiled = lowered.compile()
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        # What jax and XLA say of a way of summing (F16_F16_F16) that the device has not.
        if "not supported by dot_general" in str(error) or "ALG_DOT_" in str(error):
            reason = "this device cannot sum in 16 bits; leave it out"
            raise OptionError(f"--enable-half-partials: {reason}") from error
        raise
    return CompiledCall(compiled, lowered.as_text, time.perf_counter() - start)


def over_replicas(function: Callable[..., Any], mesh: Mesh, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """The function on every replica's share. Replication is ours to keep: pmean is where it is restored."""
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def rows_on(axis: int) -> P:
    """An array whose rows, on this axis, are divided among the replicas."""
    return P(*[None] * axis, REPLICA)  # type: ignore[no-untyped-call]


def pool_specs(kernel: Kernel, pool: Batch) -> dict[str, P]:
    """A pool [n, ...] divided among replicas by its rows."""
    return {name: rows_on(1 + kernel.row_axes[name]) for name in pool}
