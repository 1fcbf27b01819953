"""Where a loop's batches come from: a pool that lies on the device, or the same batches sent from the host.

Batch number t is pool[t mod n] either way, so both give the same results. It knows the kernel's data, not
its layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from hotloop.families.kernels.config import LayerOptions
from hotloop.families.kernels.kernel import Batch, HostBatch, Kernel
from hotloop.families.kernels.model import P0, CompiledCall, pool_specs

POOL_BATCHES, POOL_BYTES = 4, 2**28
"""Different batches, fewer where they are large: no iteration sees the input of the one before."""
PIECE_BYTES = 2**27
"""What is sent from the host at once; two pieces are on the device at a time."""


@dataclass(frozen=True)
class Place:
    """Where parameters and batches live: one device, or a mesh of replicas."""

    device: jax.Device
    mesh: Mesh | None

    def everywhere(self) -> Sharding:
        """The same array on every replica."""
        return SingleDeviceSharding(self.device) if self.mesh is None else NamedSharding(self.mesh, P0)

    def pool(self, kernel: Kernel, pool: Any) -> dict[str, Sharding]:
        """A pool of batches, its rows divided among the replicas."""
        if self.mesh is None:
            return {name: SingleDeviceSharding(self.device) for name in pool}
        return {name: NamedSharding(self.mesh, spec) for name, spec in pool_specs(kernel, pool).items()}


def make_pool(kernel: Kernel, config: LayerOptions, dtype: str) -> HostBatch:
    """A few batches [n, ...] of all replicas' rows. Drawn by numpy: jax would take seconds to compile the draw."""
    rows = config.batch_size * config.replicas
    batches = [kernel.data(np.random.default_rng((config.seed, 0)), rows, jnp.dtype(dtype))]
    fitting = POOL_BYTES // sum(leaf.nbytes for leaf in batches[0].values())
    for number in range(1, max(2, min(POOL_BATCHES, fitting))):
        batches.append(kernel.data(np.random.default_rng((config.seed, number)), rows, jnp.dtype(dtype)))
    pool = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    return {name: np.zeros_like(leaf) for name, leaf in pool.items()} if config.use_zero_values else pool


class PoolOnDevice:
    """The pool lies on the device: a step is one call over it, and nothing is sent."""

    def __init__(self, pool: HostBatch, iterations: int, shardings: dict[str, Sharding]):
        self.pool: Batch = {name: jax.device_put(leaf, shardings[name]) for name, leaf in pool.items()}
        self.batches: int = pool["x"].shape[0]
        self.iterations_a_call = iterations

    def batch(self, number: int) -> dict[str, Any]:
        """The batch of one iteration, counted from 0."""
        return {name: leaf[number % self.batches] for name, leaf in self.pool.items()}

    def step(self, program: CompiledCall, params: Any, count: Array) -> tuple[Any, Array, Sequence[Array]]:
        """One step: parameters, count and the results of its calls."""
        params, count, result = program(params, count, self.pool)
        return params, count, [result]


class PoolFromHost:
    """Every batch is sent from the host: a step is several calls, each on the piece sent during the last."""

    def __init__(self, pool: HostBatch, iterations: int, shardings: dict[str, Sharding]):
        self._host = pool
        self._shardings = shardings
        self._sent = 0
        self.batches: int = len(self._host["x"])
        size = sum(leaf.nbytes for leaf in self._host.values()) / self.batches
        # Pieces of equal length, so that one program serves all and batch t of a piece is where t says.
        lengths = [n for n in range(1, iterations + 1) if iterations % n == 0 and n * size <= PIECE_BYTES]
        self.iterations_a_call = max(lengths, default=1)
        self._calls = iterations // self.iterations_a_call
        self.pool = self._send()

    def _send(self) -> Batch:
        numbers = (self._sent + np.arange(self.iterations_a_call)) % self.batches
        self._sent += self.iterations_a_call
        return {
            name: jax.device_put(leaf[numbers], self._shardings[name]) for name, leaf in self._host.items()
        }

    def batch(self, number: int) -> dict[str, Any]:
        """The batch of one iteration, counted from 0."""
        return {name: leaf[number % self.batches] for name, leaf in self._host.items()}

    def step(self, program: CompiledCall, params: Any, count: Array) -> tuple[Any, Array, Sequence[Array]]:
        """One step; the next step's first piece is already on its way when it ends."""
        results: list[Array] = []
        for _ in range(self._calls):
            params, count, result = program(params, count, self.pool)
            self.pool = self._send()
            if results:
                results[-1].block_until_ready()  # so that no more than two pieces are on the device
            results.append(result)
        return params, count, results
