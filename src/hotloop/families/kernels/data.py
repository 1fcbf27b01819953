"""Where a loop's batches come from: a pool that lies on the device, or the same batches sent from the host.

Batch number t is pool[t mod n] either way. Both feeds hand over the whole pool: the steps of `model` pick their batch.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.families.kernels.catalogue import Batch, HostBatch
from hotloop.families.kernels.model import Job

POOL_BATCHES, POOL_BYTES = 4, 2**28
"""Different batches, fewer where they are large: no iteration sees the input of the one before."""
PIECE_BYTES = 2**27  # what is sent from the host at once; two pieces are on the device at a time


def make_pool(job: Job) -> HostBatch:
    """A few batches [n, ...] of all replicas' rows. Drawn by numpy: jax would take seconds to compile the draw."""
    config, rows = job.config, job.config.batch_size * job.config.replicas

    def draw(number: int) -> HostBatch:
        return job.kernel.data(np.random.default_rng((config.seed, number)), rows, jnp.dtype(job.dtype))

    batches = [draw(0)]
    fitting = POOL_BYTES // sum(leaf.nbytes for leaf in batches[0].values())
    batches += [draw(number) for number in range(1, max(2, min(POOL_BATCHES, fitting)))]
    pool = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    return {name: np.zeros_like(leaf) for name, leaf in pool.items()} if config.use_zero_values else pool


class PoolOnDevice:
    """The pool lies on the device: a step is one call over it, and nothing is sent."""

    any_count = True
    batch_size = 1
    longest_call = 2**31 - 1

    def __init__(self, job: Job):
        self._host, axes = make_pool(job), job.kernel.row_axes
        self._shardings = {name: job.sharding(1 + axes[name]) for name in self._host}
        self.batches: int = len(self._host["x"])
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
            name: jax.device_put(leaf[places], self._shardings[name]) for name, leaf in self._host.items()
        }


class PoolFromHost(PoolOnDevice):
    """Every batch is sent from the host, in pieces of which each is sent while the device works on the last."""

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
