"""The batches that a layer benchmark goes round, so that no iteration sees the input of the one before.

They are fed to the program in one of three forms: stacked on the device, each apart, or sent from the host. Batch
number t is that of t modulo their number in all of them.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine import processes
from hotloop.families.kernels.catalogue import HostBatch
from hotloop.families.kernels.config import LayerOptions
from hotloop.families.kernels.model import Job

POOL_BATCHES, POOL_BYTES = 4, 2**28
"""Different batches, fewer where they are large."""
PIECE_BYTES = 2**27  # what is sent from the host at once; two pieces are on the device at a time


def rows_of(config: LayerOptions) -> int:
    """Of a batch, all replicas together."""
    return config.batch_size * config.replicas


def count_fitting(job: Job) -> int:
    """How many batches a pool has room for."""
    row = job.kernel.data(np.random.default_rng(0), 1, jnp.dtype(job.dtype))
    a_batch = rows_of(job.config) * sum(leaf.nbytes for leaf in row.values())
    return max(2, min(POOL_BATCHES, POOL_BYTES // a_batch))


def make_feed(job: Job, count: int) -> "PoolOnDevice":
    """The batches of a program of `count` iterations: apart on an accelerator, where so many can go round them."""
    if job.config.use_generated_data:
        return PoolFromHost(job)
    lengths = [] if job.device.platform == "cpu" else range(count_fitting(job), 1, -1)
    batches = next((length for length in lengths if count % length == 0), None)
    return PoolOnDevice(job) if batches is None else BatchesApart(job, batches)


class PoolOnDevice:
    """A few batches [n, ...] of all replicas' rows, on the device: a step is one call over them, and nothing is sent.

    Batch number t is pool[t mod n]. The feed hands over the whole pool: the steps pick their batch.
    """

    any_count = True
    batch_size = 1
    longest_call = 2**31 - 1
    iterations_a_step = 1

    def __init__(self, job: Job, batches: int | None = None):
        """Of `batches` batches, or as many as there is room for."""
        config, kernel = job.config, job.kernel
        self.batches = count_fitting(job) if batches is None else batches

        def draw(number: int) -> HostBatch:  # by numpy: jax would take seconds to compile it
            return kernel.data(
                np.random.default_rng((config.seed, number)), rows_of(config), jnp.dtype(job.dtype)
            )

        drawn = [draw(number) for number in range(self.batches)]
        stacked = {name: np.stack([batch[name] for batch in drawn]) for name in drawn[0]}
        zeros = {name: np.zeros_like(leaf) for name, leaf in stacked.items()}
        self._host: HostBatch = zeros if config.use_zero_values else stacked
        self._job = job
        self.pool: Any = self._send(np.arange(self.batches))

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

    def _send(self, numbers: Any) -> Any:
        places = numbers % self.batches
        return {name: self._place(name, leaf[places], 1) for name, leaf in self._host.items()}

    def _place(self, name: str, leaf: Any, before: int) -> Any:
        """On the device, or of each of several its rows, which are the usual axis behind so many others."""
        return processes.place(leaf, self._job.sharding(before + self._job.kernel.row_axes[name]))


class BatchesApart(PoolOnDevice):
    """The same batches as arrays of their own: a step goes round all of them and knows each batch's place.

    A GPU copies a batch that it has to pick out of a pool (49 of the 224 us of an RNN of 1024 rows on an H200, 1.7 of
    the 5.3 of a dense layer of 32), and each turn of the loop costs a kernel besides.
    """

    def __init__(self, job: Job, batches: int):
        super().__init__(job, batches)
        self.iterations_a_step = batches

    def _send(self, numbers: Any) -> Any:
        return tuple(
            {name: self._place(name, leaf[number], 0) for name, leaf in self._host.items()}
            for number in numbers
        )


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
