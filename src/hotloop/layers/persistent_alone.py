"""The tanh RNN as one GPU kernel whose blocks have nothing to exchange: each keeps the whole recurrent matrix.

So it is for few units (256 at most, in 128 KB) and any number of rows, of which a block has a few. The units are the
matrix unit's rows, a warpgroup has 64 of them, and the batch's rows are its columns. Forward and backward are the same
loop: a product with what the step before left in shared memory, a formula, and the result for the next.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.layers import persistent_cells as cells
from hotloop.layers.persistent_chain import plgpu, shared
from hotloop.layers.persistent_tiles import ROWS


class Job(NamedTuple):
    """One call of a kernel."""

    rows: int
    timesteps: int
    batch: int
    hidden: int
    dtype: Any
    fetched: tuple[str, ...]
    """Arrays [T, B, H] that a step reads: z; or sums and, if they have one, the outputs' gradient."""
    stored: tuple[str, ...]
    """Arrays [T, B, H] that a step gives, first that which the next one reads: h, and the sums if kept; or dz."""
    start: str | None
    """Where the first step's state comes from: the state itself forward, its gradient backward."""

    @property
    def is_backward(self) -> bool:
        return self.stored[0] == "dz"


def run(job: Job, weights: Array, arrays: Sequence[Array], interpret: Any = None) -> Any:
    """`weights` [to, from], what a step multiplies with; `arrays` those of `fetched`, and `start`."""
    whole = jax.ShapeDtypeStruct((job.timesteps, job.batch, job.hidden), job.dtype)  # type: ignore[no-untyped-call]
    groups = job.hidden // ROWS
    buffers = len(job.stored) - 1
    kernel = plgpu.kernel(
        partial(_body, job, interpret is None),
        out_type=(whole,) * len(job.stored),
        scratch_types={
            "weights": shared(job.hidden, job.hidden, dtype=job.dtype),
            "weights_filled": plgpu.Barrier(),
            "exchanged": shared(2, job.rows, job.hidden, dtype=job.dtype),
            "kept": shared(2, job.rows, job.hidden, dtype=job.dtype) if buffers else None,
            "tiles": shared(2, len(job.fetched), job.rows, job.hidden, dtype=job.dtype),
            "filled": plgpu.Barrier(num_arrivals=len(job.fetched), num_barriers=2 * groups),
            "start_filled": plgpu.Barrier(num_barriers=groups) if job.start else None,
            "start_tile": shared(job.rows, job.hidden, dtype=jnp.float32) if job.is_backward else None,
            "written": plgpu.Barrier(num_arrivals=groups),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(job.batch // job.rows,),
        grid_names=("group",),
        num_threads=groups,
        thread_name="units",
        interpret=interpret,
    )
    return dict(zip(job.stored, kernel(weights, *arrays), strict=True))


def _body(job: Job, in_registers: bool, *refs: Any, **scratch: Any) -> None:
    names = ["weights", *job.fetched, *([job.start] if job.start else []), *job.stored]
    _Alone(job, in_registers, dict(zip(names, refs, strict=True)), scratch).run()


class _Alone:
    """The work of one warpgroup: its units of a block's rows."""

    def __init__(self, job: Job, in_registers: bool, memory: dict[str, Any], scratch: dict[str, Any]):
        self.job, self.memory, self.scratch = job, memory, scratch
        self._in_registers = in_registers  # the interpreter's matrix unit reads shared memory alone
        self.number = lax.axis_index("units")
        self.units = pl.ds(self.number * ROWS, ROWS)
        self.rows = pl.ds(lax.axis_index("group") * job.rows, job.rows)

    def run(self) -> None:
        @pl.when(self.number == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(
                self.memory["weights"], self.scratch["weights"], self.scratch["weights_filled"]
            )

        self._fetch(0)
        pl.when(self.job.timesteps > 1)(lambda: self._fetch(1))
        plgpu.barrier_wait(self.scratch["weights_filled"])
        self.weights = self.scratch["weights"].at[self.units]
        if self._in_registers:
            # 64 of a thread. From shared memory each step would read all 128 KB of it anew (177 us instead of 125 for
            # T150 B1024). To send and fetch beside the product, which nobody waits for, was slower: 143.
            self.weights = plgpu.load(self.weights, layout=plgpu.Layout.WGMMA, optimized=False)
        self._step(0, self._first())
        lax.fori_loop(1, self.job.timesteps, lambda n, _: self._step(n, self._product(n)), None)
        plgpu.wait_smem_to_gmem(0)

    def _time(self, n: Any) -> Any:
        return self.job.timesteps - 1 - n if self.job.is_backward else n

    def _fetch(self, n: Any) -> None:
        """What step n reads of global memory, two steps ahead."""
        slot = lax.rem(n, 2)
        for place, name in enumerate(self.job.fetched):
            source = self.memory[name].at[self._time(n), self.rows, self.units]
            tile = self.scratch["tiles"].at[slot, place, :, self.units]
            plgpu.copy_gmem_to_smem(source, tile, self.scratch["filled"].at[2 * self.number + slot])

    def _first(self) -> Array | None:
        """What the first step adds to its sums; None for nothing."""
        if self.job.start is None:
            return None
        start, barrier = self.memory[self.job.start], self.scratch["start_filled"].at[self.number]
        tile = self.scratch["start_tile" if self.job.is_backward else "exchanged"]
        tile = tile if self.job.is_backward else tile.at[1]
        plgpu.copy_gmem_to_smem(start.at[self.rows, self.units], tile.at[:, self.units], barrier)
        plgpu.barrier_wait(barrier)
        if self.job.is_backward:
            return self._read(tile)
        self._wait_for_all()
        return self._product(0)

    def _read(self, tile: Any) -> Array:
        """This warpgroup's units of a tile, units down and rows across."""
        values: Array = plgpu.load(
            tile.at[:, self.units].transpose((1, 0)), layout=plgpu.Layout.WGMMA, optimized=False
        )
        return values.astype(jnp.float32)

    def _wait_for_all(self) -> None:
        """Until all warpgroups of the block are here."""
        plgpu.barrier_arrive(self.scratch["written"])
        plgpu.barrier_wait(self.scratch["written"])

    def _product(self, n: Any) -> Array:
        before = self.scratch["exchanged"].at[lax.rem(n + 1, 2)]

        def multiply(sums: Any) -> Any:
            plgpu.wgmma(sums, self.weights, before.transpose((1, 0)))
            return sums[...]

        products: Array = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.job.rows), jnp.float32))
        return products

    def _step(self, n: Any, product: Array | None) -> None:
        slot = lax.rem(n, 2)
        plgpu.barrier_wait(self.scratch["filled"].at[2 * self.number + slot])
        values = [self._read(self.scratch["tiles"].at[slot, place]) for place in range(len(self.job.fetched))]
        results = self._formula(values, product)
        # What the step before the last wrote leaves from the same slot.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        targets = [self.scratch[name].at[slot] for name in ("exchanged", "kept")[: len(results)]]
        for target, result in zip(targets, results, strict=True):
            target.at[:, self.units].transpose((1, 0))[...] = result.astype(self.job.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["written"])
        for name, target in zip(self.job.stored, targets, strict=True):
            place = self.memory[name].at[self._time(n), self.rows, self.units]
            plgpu.copy_smem_to_gmem(target.at[:, self.units], place, commit_group=name == self.job.stored[-1])
        pl.when(n + 2 < self.job.timesteps)(lambda: self._fetch(n + 2))
        plgpu.barrier_wait(self.scratch["written"])

    def _formula(self, values: list[Array], product: Array | None) -> list[Array]:
        if self.job.is_backward:
            sums, *d_outputs = values
            dh = sum(d_outputs, jnp.zeros_like(sums) if product is None else product)
            return [cells.rnn_back([sums], dh)]
        (sums,) = cells.plus(values, None if product is None else [product])
        return [jnp.tanh(sums), sums][: len(self.job.stored)]
