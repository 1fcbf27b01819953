"""What the kernels of `persistent.py` share: the tiles that a block works on, and a warpgroup's part of it, its chain.

A grid is (groups of rows) x (slices of units). A block keeps the recurrent weights of its units in shared memory
over all steps. Each of its warpgroups owns a chain: some rows of the batch, which have nothing to do with any others.
The blocks of a group exchange their units through global memory, and a semaphore of each chain counts who has written.
It must not know a cell's formulas.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.typing import DTypeLike

from hotloop.layers.persistent_tiles import Tile

plgpu: Any = mosaic_gpu  # its types change from version to version
ROWS = 64  # of the matrix unit's left operand; a chain may have fewer, and the rest is never written out
PART = 64  # columns of the state that are fetched at once: 128 bytes of 16-bit numbers, the widest swizzle
SWIZZLES = (128, 64, 32)  # bytes


def swizzled(columns: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """How the matrix unit wants rows of so many columns laid out; plain where they are shorter than any swizzle."""
    size = jnp.dtype(dtype).itemsize
    for swizzle in SWIZZLES:
        if columns * size % swizzle == 0:
            return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return ()


def shared(*shape: int, dtype: DTypeLike) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))


def exchange_scratch(tile: Tile, dtype: DTypeLike) -> dict[str, Any]:
    """What a chain needs to fetch the others' units."""
    count = tile.chains * tile.stages
    return {
        "ring": shared(tile.chains, tile.stages, ROWS, PART, dtype=dtype),
        "ring_filled": plgpu.Barrier(num_barriers=count),
    }


class Chain:
    """The rows of this warpgroup, and the units of this block."""

    def __init__(self, tile: Tile, grid: tuple[int, int], ring: Any, ring_filled: Any, exchanges: int = 1):
        self.tile, self.slices = tile, grid[1]
        self.number = lax.axis_index("chain")
        place = lax.axis_index("group") * tile.chains + self.number
        self.rows = pl.ds(place * tile.rows, tile.rows)
        self.slice = lax.axis_index("slice")
        self.units = pl.ds(self.slice * tile.units, tile.units)
        self._ring, self._filled = ring.at[self.number], ring_filled
        self._written = self._semaphores(exchanges, grid[0] * tile.chains, place)

    def _semaphores(self, exchanges: int, chains: int, place: Any) -> list[Any]:
        """One for each exchange of a step; a block that has all units exchanges with nobody."""
        if self.slices == 1:
            return []
        every = pl.get_global(plgpu.SemaphoreType.REGULAR((exchanges * chains,)))
        return [every.at[number * chains + place] for number in range(exchanges)]

    def gate(self, number: int, hidden: int) -> Any:
        """The columns of this block's units in an array of several gates side by side."""
        return pl.ds(number * hidden + self.slice * self.tile.units, self.tile.units)

    def own_rows(self, shared_tile: Any) -> Any:
        return shared_tile if self.tile.rows == ROWS else shared_tile.at[pl.ds(0, self.tile.rows)]

    def fetch(self, source: Any, shared_tile: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(source, self.own_rows(shared_tile), barrier)

    def read(self, shared_tile: Any) -> Array:
        """A tile in float32, laid out like the matrix unit's sums."""
        values: Array = plgpu.load(shared_tile, layout=plgpu.Layout.WGMMA, optimized=False)
        return values.astype(jnp.float32)

    def write(self, pairs: Sequence[tuple[Any, Any, Array]]) -> None:
        """Each (tile, target, values): through shared memory to global memory, on its way when this returns."""
        for shared_tile, _, values in pairs:
            shared_tile[...] = values.astype(shared_tile.dtype)
        plgpu.commit_smem()
        for shared_tile, target, _ in pairs:
            plgpu.copy_smem_to_gmem(self.own_rows(shared_tile), target)

    def publish(self, pairs: Sequence[tuple[Any, Any, Array]], exchange: int = 0) -> None:
        """Write, and let the other blocks of this chain know when it is there."""
        self.write(pairs)
        plgpu.wait_smem_to_gmem(0)
        if self._written:
            plgpu.semaphore_signal(self._written[exchange], memory_scope="gpu")

    def wait(self, steps: Any, exchange: int = 0) -> None:
        """Until all blocks have published so many times."""
        if self._written:
            plgpu.semaphore_wait(
                self._written[exchange], steps * self.slices, decrement=False, memory_scope="gpu"
            )

    def product(
        self, parts: Sequence[Callable[[], Any]], weights: Callable[[int], Any], columns: int
    ) -> Array:
        """The sum over all parts [rows, PART] of the exchanged state times weights [PART, columns]."""
        stages = self.tile.stages

        def fetch(number: int) -> None:
            slot = number % stages
            self.fetch(parts[number](), self._ring.at[slot], self._filled.at[self.number * stages + slot])

        def accumulate(sums: Any) -> Any:
            for number in range(min(stages, len(parts))):
                fetch(number)
            for number in range(len(parts)):
                slot = number % stages
                plgpu.barrier_wait(self._filled.at[self.number * stages + slot])
                plgpu.wgmma(sums, self._ring.at[slot], weights(number))
                # The slot before this one is free once its product is done, which this one's need not be.
                if number > 0 and number - 1 + stages < len(parts):
                    plgpu.wgmma_wait(1)
                    fetch(number - 1 + stages)
            return sums[...]

        total: Array = pl.run_scoped(accumulate, plgpu.ACC((ROWS, columns), jnp.float32))
        return total
