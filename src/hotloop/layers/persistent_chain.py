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

from hotloop.layers.persistent_tiles import ROWS, Tile

plgpu: Any = mosaic_gpu  # its types change from version to version
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


def exchange_scratch(tile: Tile, columns: int, dtype: DTypeLike) -> dict[str, Any]:
    """What the chains of a block need to fetch the others' units and, split, to collect sums of so many columns."""
    # Of slots of fewer rows than the matrix unit reads, each runs into the next, which does its own rows no harm.
    rows = tile.stages * tile.rows + ROWS - tile.rows
    scratch = {
        "ring": shared(tile.chains, rows, tile.part, dtype=dtype),
        "ring_filled": plgpu.Barrier(num_barriers=tile.chains * tile.stages),
    }
    if tile.split > 1:
        scratch["shares"] = shared(tile.split - 1, ROWS, columns, dtype=jnp.float32)
        scratch["shares_filled"] = plgpu.Barrier(num_arrivals=tile.split - 1)
    return scratch


def launch(tile: Tile, grid: tuple[int, int], body: Callable[..., None], **options: Any) -> Any:
    """The kernel of a body which makes a `Chain`."""
    cluster = {"cluster": (tile.split,), "cluster_names": ("peer",)} if tile.split > 1 else {}
    return plgpu.kernel(
        body,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=grid,
        grid_names=("group", "slice"),
        num_threads=tile.chains,
        thread_name="chain",
        **cluster,
        **options,
    )


class Chain:
    """The rows of this warpgroup, and the units of this block."""

    def __init__(self, tile: Tile, grid: tuple[int, int], scratch: dict[str, Any], exchanges: int = 1):
        self.tile, self.slices, self._scratch = tile, grid[1], scratch
        self.number = lax.axis_index("chain")
        self.peer = lax.axis_index("peer") if tile.split > 1 else 0
        self.tile_number = self.number if tile.split == 1 else 0
        place = lax.axis_index("group") * tile.chains + self.number
        self.rows = pl.ds(place * tile.rows, tile.rows)
        self.slice = lax.axis_index("slice")
        self.units = pl.ds(self.slice * tile.units, tile.units)
        self._ring = scratch["ring"].at[self.number]
        self._written = self._semaphores(exchanges, grid[0] * tile.chains, place)

    def _semaphores(self, exchanges: int, chains: int, place: Any) -> list[Any]:
        """One for each exchange of a step; a block that has all units exchanges with nobody."""
        if self.slices == 1:
            return []
        every = pl.get_global(plgpu.SemaphoreType.REGULAR((exchanges * chains,)))
        return [every.at[number * chains + place] for number in range(exchanges)]

    def play(self, own: Callable[[], None], help_owner: Callable[[], None]) -> None:
        """The first where this block works out the chain's gates, else the second."""
        if self.tile.split == 1:
            own()
        else:
            pl.when(self.number == self.peer)(own)
            pl.when(self.number != self.peer)(help_owner)

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

    def publish(
        self,
        pairs: Sequence[tuple[Any, Any, Array]],
        exchange: int = 0,
        again: Sequence[tuple[Any, Any, Array]] = (),
    ) -> None:
        """Write, the tiles of `again` to second places, and tell the other blocks of this chain when it is there."""
        self.write(pairs)
        for shared_tile, target, _ in again:
            plgpu.copy_smem_to_gmem(self.own_rows(shared_tile), target)
        plgpu.wait_smem_to_gmem(0)
        if self._written:
            plgpu.semaphore_signal(self._written[exchange], memory_scope="gpu")

    def wait(self, steps: Any, exchange: int = 0) -> None:
        """Until all units have been published so many times."""
        if self._written:
            plgpu.semaphore_wait(
                self._written[exchange], steps * self.slices, decrement=False, memory_scope="gpu"
            )

    def product(
        self, part: Callable[[Any], Any], parts: int, weights: Callable[[int], Any], columns: int
    ) -> Array:
        """The sum over this block's share of the parts [rows, part] of what was exchanged, times weights
        [part, columns], of which it has no others."""
        stages, count = self.tile.stages, parts // self.tile.split
        filled = self._scratch["ring_filled"]

        def slot(number: int) -> Any:
            return self._ring.at[pl.ds(number % stages * self.tile.rows, ROWS)]

        def barrier(number: int) -> Any:
            return filled.at[self.number * stages + number % stages]

        def fetch(number: int) -> None:
            self.fetch(part(self.peer * count + number), slot(number), barrier(number))

        def accumulate(sums: Any) -> Any:
            for number in range(min(stages, count)):
                fetch(number)
            for number in range(count):
                plgpu.barrier_wait(barrier(number))
                plgpu.wgmma(sums, slot(number), weights(number))
                # The slot before this one is free once its product is done, which this one's need not be.
                if number > 0 and number - 1 + stages < count:
                    plgpu.wgmma_wait(1)
                    fetch(number - 1 + stages)
            return sums[...]

        total: Array = pl.run_scoped(accumulate, plgpu.ACC((ROWS, columns), jnp.float32))
        return total

    def send(self, sums: Array) -> None:
        """This block's share of a chain's sums, to the block that works out its gates. There is room: the products of
        a step begin when it has published the step before."""
        number = self.peer - (self.peer > self.number).astype(jnp.int32)
        room = self._scratch["shares"].at[number, :, pl.ds(0, sums.shape[1])]
        plgpu.async_store_smem(
            sums, room, self._scratch["shares_filled"], cluster_idx=self.number, cluster_dim="peer"
        )

    def collect(self, sums: Array) -> Array:
        """All shares of this block's chain."""
        if self.tile.split == 1:
            return sums
        plgpu.barrier_wait(self._scratch["shares_filled"])
        for number in range(self.tile.split - 1):
            sums += self.read(self._scratch["shares"].at[number, :, pl.ds(0, sums.shape[1])])
        return sums
