"""HMC iterations as one kernel for NVIDIA's Hopper cards: the decoder's weights stay on chip over all leapfrogs.

The grid is tiles of 64 chains, each with a cluster of blocks. A block has all weights of the hidden layers in its
shared memory, and those of its own share of the pixels. It carries the tile's chains forward, makes the logits of its
pixels, and takes their part of the gradient all the way back to the latents: the way back is linear once the way
forward is known, so the parts of all blocks add up. Each block sends its part to all others of the cluster, adds them
in the same order as they do, and so has the same chains to the last bit: nothing else is exchanged. Chains are the
matrix unit's rows, so that activations go from one product to the next in registers (`hopper_decoder.py`).

It must not know how states and weights look elsewhere: `hopper.py` makes its arrays.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.families.vcd.hopper_decoder import HALF, STEP, Decoder
from hotloop.families.vcd.networks import LOG_TWO_PI
from hotloop.layers.persistent_chain import plgpu, shared
from hotloop.layers.persistent_tiles import ROWS

ONES = 2  # units that are always one, for the two halves of a bias
FINITE = 3e38
COPIED = 256  # numbers of a line that one copy takes at the most


class Cut(NamedTuple):
    """How the work of a tile of chains is cut up."""

    blocks: int = 7
    """Of a cluster: they share the pixels, 112 each."""
    pieces: int = 1
    """In which a hidden layer is worked out, one after the other: what is not a result yet takes fewer registers."""
    again: int = 2
    """Pieces, of each of these, in which the first hidden layer is worked out again for the way back."""


CUT = Cut()


class Job(NamedTuple):
    """One call of a kernel."""

    cut: Cut
    sizes: tuple[int, int, int, int]
    """Latents, both hidden layers and pixels, as they are."""
    chains: int
    iterations: int
    leapfrogs: int
    target: float
    rate: float
    """By which the step size follows the acceptance of all chains between iterations."""

    @property
    def tiles(self) -> int:
        return -(-self.chains // ROWS)

    @property
    def rows(self) -> int:
        return self.tiles * ROWS

    @property
    def latent(self) -> int:
        return fill_up(self.sizes[0] + ONES)

    @property
    def hidden(self) -> tuple[int, int]:
        return fill_up(self.sizes[1] + ONES), fill_up(self.sizes[2] + ONES)

    @property
    def pixels(self) -> int:
        """Of a block."""
        return fill_up(-(-self.sizes[3] // self.cut.blocks))

    @property
    def adapts(self) -> bool:
        """Whether a tile waits for all others between iterations."""
        return self.iterations > 1 and self.rate != 0


def fill_up(size: int) -> int:
    return -(-size // STEP) * STEP


def run(job: Job, arrays: Sequence[Array], interpret: Any = None) -> Any:
    """From weights, images [rows, pixels], positions and slopes [rows, latent], noise [iterations, rows, latent], step
    [64]: positions, slopes, who moved [iterations, rows], and the step size [rows].

    A position has ones after its latents; a slope is a gradient, then the log density; noise is a momentum, then the
    uniform number."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)  # type: ignore[no-untyped-call]

    state = array(job.rows, job.latent)
    cluster = {"cluster": (job.cut.blocks,), "cluster_names": ("peer",)} if job.cut.blocks > 1 else {}
    kernel = plgpu.kernel(
        partial(_body, job),
        out_type=(state, state, array(job.iterations, job.rows), array(job.rows)),
        scratch_types=_scratch(job),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(job.tiles,),
        grid_names=("tile",),
        interpret=interpret,
        **cluster,
    )
    return kernel(*arrays)


def _scratch(job: Job) -> dict[str, Any]:
    tile = partial(shared, ROWS, job.latent, dtype=jnp.float32)
    has_others = job.adapts and job.tiles > 1
    return {
        "w1": shared(job.latent, job.hidden[0], dtype=HALF),
        "w2": shared(*job.hidden, dtype=HALF),
        "w3": shared(job.hidden[1], job.pixels, dtype=HALF),
        "x": shared(ROWS, job.pixels, dtype=HALF),
        "filled": plgpu.Barrier(num_arrivals=6),
        "position": tile(),
        "slope": tile(),
        "noise": tile(),
        "noise_filled": plgpu.Barrier(),
        "line": plgpu.SMEM((ROWS,), jnp.float32),
        "lines": plgpu.SMEM((job.rows,), jnp.float32) if has_others else None,
        "lines_filled": plgpu.Barrier(num_arrivals=-(-job.rows // COPIED)) if has_others else None,
        # Two sets: a block may be sent the next parts while it still reads those before.
        "parts": shared(2, job.cut.blocks, ROWS, job.latent, dtype=jnp.float32)
        if job.cut.blocks > 1
        else None,
        "parts_filled": plgpu.Barrier(num_arrivals=job.cut.blocks, num_barriers=2)
        if job.cut.blocks > 1
        else None,
    }


INPUTS = ("w1", "w2", "w3", "x", "position", "slope", "noise", "step")
OUTPUTS = ("new_position", "new_slope", "moved", "new_step")


def _body(job: Job, *refs: Any, **scratch: Any) -> None:
    _Chains(job, dict(zip([*INPUTS, *OUTPUTS], refs, strict=True)), scratch).run()


class _Chains:
    """The work of one block: a tile of chains, and its share of the pixels."""

    def __init__(self, job: Job, memory: dict[str, Any], scratch: dict[str, Any]):
        self.job, self.memory, self.scratch = job, memory, scratch
        self.latents = job.sizes[0]
        self.tile = lax.axis_index("tile")
        self.peer = lax.axis_index("peer") if job.cut.blocks > 1 else 0
        self.rows = pl.ds(self.tile * ROWS, ROWS)
        weights = [scratch[name] for name in ("w1", "w2", "w3")]
        self.decoder = Decoder(weights, job.hidden, job.cut.pieces, job.cut.again)
        self.has_others = job.adapts and job.tiles > 1
        self.voted = pl.get_global(plgpu.SemaphoreType.REGULAR((1,))).at[0] if self.has_others else None

    def run(self) -> None:
        self._fetch()
        plgpu.barrier_wait(self.scratch["filled"])
        position = self._read("position")
        force, density = self._split(self._read("slope"))
        step = plgpu.load(self.memory["step"], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        carry = lax.fori_loop(0, self.job.iterations, self._iterate, (position, force, density, step))
        self._write_line(carry[3])
        self._as_first(
            lambda: [
                plgpu.copy_smem_to_gmem(self.scratch["position"], self.memory["new_position"].at[self.rows]),
                plgpu.copy_smem_to_gmem(self.scratch["slope"], self.memory["new_slope"].at[self.rows]),
                plgpu.copy_smem_to_gmem(self.scratch["line"], self.memory["new_step"].at[self.rows]),
                plgpu.wait_smem_to_gmem(0),
            ]
        )

    def _as_first(self, write: Any) -> None:
        """What one block of a cluster does for all."""
        if self.job.cut.blocks == 1:
            write()
            return

        @pl.when(self.peer == 0)
        def _() -> None:
            write()

    def _fetch(self) -> None:
        memory, pixels = self.memory, pl.ds(self.peer * self.job.pixels, self.job.pixels)
        sources = {
            "w1": memory["w1"],
            "w2": memory["w2"],
            "w3": memory["w3"].at[:, pixels],
            "x": memory["x"].at[self.rows, pixels],
            "position": memory["position"].at[self.rows],
            "slope": memory["slope"].at[self.rows],
        }
        for name, source in sources.items():
            plgpu.copy_gmem_to_smem(source, self.scratch[name], self.scratch["filled"])
        self._fetch_noise(0)

    def _fetch_noise(self, iteration: Any) -> None:
        source = self.memory["noise"].at[iteration, self.rows]
        plgpu.copy_gmem_to_smem(source, self.scratch["noise"], self.scratch["noise_filled"])

    def _read(self, name: str) -> Array:
        values: Array = plgpu.load(self.scratch[name], layout=plgpu.Layout.WGMMA, optimized=False)
        return values.astype(jnp.float32)

    def _column(self) -> Array:
        shape = (ROWS, self.job.latent)
        number: Array = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        return number

    def _split(self, tile: Array) -> tuple[Array, Array]:
        """What belongs to the latents, and the column after them."""
        column = self._column()
        last = jnp.where(column == self.latents, tile, 0.0).sum(1)
        return jnp.where(column < self.latents, tile, 0.0), last

    def _join(self, tile: Array, last: Array) -> Array:
        return jnp.where(self._column() == self.latents, self._wide(last), tile)

    def _wide(self, line: Array) -> Array:
        return lax.broadcast_in_dim(line, (ROWS, self.job.latent), (0,))

    def _iterate(self, iteration: Any, carry: Any) -> Any:
        job = self.job
        position, force, density, step = carry
        momentum, uniform = self._read_noise(iteration)
        before = 0.5 * (momentum * momentum).sum(1) - density
        size, first = self._wide(step), iteration * job.leapfrogs
        momentum += 0.5 * size * force

        def leap(n: Any, carry: Any) -> Any:
            position, momentum = carry
            position += size * momentum
            return position, momentum + size * self._force(position, first + n)[0]

        position, momentum = lax.fori_loop(0, job.leapfrogs - 1, leap, (position, momentum))
        position += size * momentum
        force, density = self._force(position, first + job.leapfrogs - 1, has_density=True)
        momentum += 0.5 * size * force
        change = 0.5 * (momentum * momentum).sum(1) - density - before
        moved = self._decide(change, uniform)
        position, slope = self._keep(moved, position, self._join(force, density))
        return position, *self._split(slope), self._adapt(iteration, moved, step)

    def _read_noise(self, iteration: Any) -> tuple[Array, Array]:
        plgpu.barrier_wait(self.scratch["noise_filled"])
        noise = self._split(self._read("noise"))
        plgpu.commit_smem()  # all have read it
        pl.when(iteration + 1 < self.job.iterations)(lambda: self._fetch_noise(iteration + 1))
        return noise

    def _decide(self, change: Array, uniform: Array) -> Array:
        """One for each chain that moves; none whose energy is not finite (no comparison holds for a NaN)."""
        chance = jnp.exp(jnp.minimum(-change, 0.0))
        chance = jnp.where(change < FINITE, jnp.where(change > -FINITE, chance, 0.0), 0.0)
        return jnp.where(uniform < chance, 1.0, 0.0)

    def _keep(self, moved: Array, position: Array, slope: Array) -> list[Array]:
        has_moved, kept = self._wide(moved) > 0.5, []
        for name, new in (("position", position), ("slope", slope)):
            kept.append(jnp.where(has_moved, new, self._read(name)))
            self.scratch[name][...] = kept[-1]
        return kept

    def _adapt(self, iteration: Any, moved: Array, step: Array) -> Array:
        """Tell who moved, and follow the share of all."""
        job = self.job
        self._write_line(moved)
        place = self.memory["moved"].at[iteration, self.rows]

        def publish() -> None:
            plgpu.copy_smem_to_gmem(self.scratch["line"], place)
            plgpu.wait_smem_to_gmem(0)
            if self.has_others:
                plgpu.semaphore_signal(self.voted, memory_scope="gpu")

        self._as_first(publish)
        if not job.adapts:
            return step
        votes = self.scratch["line"]
        if self.has_others:
            plgpu.semaphore_wait(self.voted, (iteration + 1) * job.tiles, decrement=False, memory_scope="gpu")
            votes, barrier = self.scratch["lines"], self.scratch["lines_filled"]
            for start in range(0, job.rows, COPIED):
                some = pl.ds(start, min(COPIED, job.rows - start))
                plgpu.copy_gmem_to_smem(self.memory["moved"].at[iteration, some], votes.at[some], barrier)
            plgpu.barrier_wait(barrier)
        share = self._count(votes, job.tiles if self.has_others else 1) * (1 / job.chains)
        return step * (1.0 + job.rate * (share - job.target) * (1 / job.target))

    def _count(self, votes: Any, tiles: int) -> Array:
        """Their sum, in every row."""
        total: Any = 0.0
        for tile in range(tiles):
            layout = plgpu.Layout.WGMMA.reduce(0)
            across = plgpu.load(votes.at[pl.ds(tile * ROWS, ROWS)], layout=layout, optimized=False)
            total += lax.broadcast_in_dim(across, (ROWS, ROWS), (1,))
        counted: Array = total.sum(1)
        return counted

    def _write_line(self, line: Array) -> None:
        self.scratch["line"][...] = line
        plgpu.commit_smem()

    def _force(self, position: Array, number: Any, has_density: bool = False) -> tuple[Array, Array]:
        """The gradient of the log density, and the density itself where it is asked for."""
        part, density = self.decoder.differentiate(position, partial(self._read, "x"), has_density)
        if has_density:
            part = self._join(part, density)
        total, density = self._split(self._add_up(part, number))
        inside = self._split(position)[0]
        if has_density:
            density -= 0.5 * (inside * inside).sum(1) + 0.5 * self.latents * LOG_TWO_PI
        return total - inside, density

    def _add_up(self, part: Array, number: Any) -> Array:
        """The sum of the parts of all blocks, in one order."""
        blocks = self.job.cut.blocks
        if blocks == 1:
            return part
        turn = lax.rem(number, 2)
        parts, barrier = self.scratch["parts"].at[turn], self.scratch["parts_filled"].at[turn]
        for n in range(blocks):
            plgpu.async_store_smem(
                part,
                parts.at[self.peer],
                barrier,
                cluster_idx=lax.rem(self.peer + n, blocks),
                cluster_dim="peer",
                optimized=False,
            )
        plgpu.barrier_wait(barrier)
        read = partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)
        total: Array = read(parts.at[0])
        for n in range(1, blocks):
            total += read(parts.at[n])
        return total
