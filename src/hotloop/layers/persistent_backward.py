"""A recurrence backward in time as one GPU kernel: the gradient of every step's gate sums.

The mirror of `persistent_forward.py`: a block keeps the weights by which its units acted on all gates, each step waits
for the gate gradients of the step after it, and publishes its own. Activations and their slopes are worked out from the
kept sums where they are used. Weight gradients are products over all steps, made after it by the caller.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.layers import persistent_cells as cells
from hotloop.layers.persistent_chain import Chain, exchange_scratch, launch, plgpu, shared
from hotloop.layers.persistent_forward import EXCHANGES, GATES, SUMS
from hotloop.layers.persistent_tiles import ROWS, Tile

BEFORE = {"lstm": "c", "gru": "h", "gru_reset_after": "h"}
"""The state before a step that its gradients need besides the sums."""
PRODUCTS = {"gru": ((0, 2), (2, 1))}
"""The products of a step: of which gate on, and of how many gates. Else there is one, of all gates."""


class Job(NamedTuple):
    """One call of a kernel."""

    cell: str
    tile: Tile
    timesteps: int
    batch: int
    hidden: int
    dtype: Any
    has_outputs: bool
    """Whether outputs have a gradient, or the last state alone."""

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        return PRODUCTS.get(self.cell, ((0, GATES[self.cell]),))

    @property
    def grid(self) -> tuple[int, int]:
        return self.tile.grid(self.batch, self.hidden)


def run(job: Job, operands: dict[str, Array], interpret: Any = None) -> dict[str, Array]:
    """`operands`: recurrent, sums and d_last_h; d_outputs where they have one; of an LSTM c, start_c and d_last_c, of a
    GRU h and start_h. Gives dz; d_start, what goes to the first state past the gates; and, of the GRU that
    resets after its product, d_products, which differ from dz where the reset gate acts."""
    kernel = launch(
        job.tile,
        job.grid,
        partial(_body, job, tuple(operands)),
        out_type=tuple(_results(job).values()),
        scratch_types=_scratch(job),
        interpret=interpret,
    )
    return dict(zip(_results(job), kernel(*operands.values()), strict=True))


def _results(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    def array(*shape: int, dtype: Any = job.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

    results = {"dz": array(job.timesteps, job.batch, GATES[job.cell] * job.hidden)}
    if job.cell in BEFORE:
        results["d_start"] = array(job.batch, job.hidden, dtype=jnp.float32)
    if job.cell == "gru_reset_after":
        results["d_products"] = results["dz"]
    return results


def _scratch(job: Job) -> dict[str, Any]:
    tile, sums = job.tile, SUMS[job.cell]
    tiles = partial(shared, tile.own_chains)
    narrow = partial(tiles, ROWS, tile.units, dtype=job.dtype)
    fetched = sums + job.has_outputs + (job.cell in BEFORE)
    return {
        **exchange_scratch(tile, tile.units, job.dtype),
        **{
            f"weights_{number}": shared(tile.units, gates * job.hidden // tile.split, dtype=job.dtype)
            for number, (_, gates) in enumerate(job.products)
        },
        "weights_filled": plgpu.Barrier(num_arrivals=len(job.products)),
        # A step's gradients leave from where its sums were.
        "sums_tiles": tiles(sums, ROWS, tile.units, dtype=job.dtype),
        "dy_tiles": narrow() if job.has_outputs else None,
        "h_tiles": narrow() if BEFORE.get(job.cell) == "h" else None,
        "c_tiles": tiles(ROWS, tile.units, dtype=jnp.float32),
        "filled": plgpu.Barrier(num_arrivals=fetched, num_barriers=tile.own_chains),
        "last_filled": plgpu.Barrier(num_barriers=tile.own_chains),
    }


def _body(job: Job, names: tuple[str, ...], *refs: Any, **scratch: Any) -> None:
    _Backward(job, dict(zip([*names, *_results(job)], refs, strict=True)), scratch).run()


class _Backward:
    """The work of one chain."""

    def __init__(self, job: Job, memory: dict[str, Any], scratch: dict[str, Any]):
        self.job, self.memory, self.scratch = job, memory, scratch
        self.chain = Chain(job.tile, job.grid, scratch, EXCHANGES.get(job.cell, 1))
        own = self.chain.tile_number
        self.sums_tiles, self.filled = scratch["sums_tiles"].at[own], scratch["filled"].at[own]
        self.c_tile = scratch["c_tiles"].at[own]
        self.h_tile = scratch["h_tiles"].at[own] if BEFORE.get(job.cell) == "h" else None
        self.dy_tile = scratch["dy_tiles"].at[own] if job.has_outputs else None

    def run(self) -> None:
        self._fetch_weights()
        plgpu.barrier_wait(self.scratch["weights_filled"])
        self.chain.play(self._own, self._help)

    def _fetch_weights(self) -> None:
        """Of each product this block's share."""
        chain, share = self.chain, self.job.hidden // self.job.tile.split

        @pl.when(chain.number == 0)
        def _() -> None:
            for number, (first, gates) in enumerate(self.job.products):
                columns = pl.ds(first * self.job.hidden + chain.peer * gates * share, gates * share)
                plgpu.copy_gmem_to_smem(
                    self.memory["recurrent"].at[chain.units, columns],
                    self.scratch[f"weights_{number}"],
                    self.scratch["weights_filled"],
                )

    def _own(self) -> None:
        job, chain = self.job, self.chain
        dh = self._read_last("d_last_h")
        dc = self._read_last("d_last_c") if job.cell == "lstm" else None
        self._fetch(job.timesteps - 1)
        carry = self._gradients(0, dh, dc)
        carry = lax.fori_loop(1, job.timesteps, self._step, carry)
        if carry is not None:
            target = self.memory["d_start"].at[chain.rows, chain.units]
            chain.write([(self.c_tile, target, carry)])
        plgpu.wait_smem_to_gmem(0)

    def _help(self) -> None:
        """All products of a chain whose gates another block of the cluster works out."""

        def step(number: Any, carry: None, is_first: bool = False) -> None:
            if not is_first:
                self.chain.wait(number)
                self.chain.send(self._sums(self.job.timesteps - number))
            if self.job.cell == "gru":
                self.chain.wait(number + 1, exchange=1)
                self.chain.send(self._sums(self.job.timesteps - 1 - number, product=1))

        step(0, None, is_first=True)
        lax.fori_loop(1, self.job.timesteps, step, None)

    def _read_last(self, name: str) -> Array:
        """The last state's gradient, by the tile that nothing else uses yet."""
        barrier = self.scratch["last_filled"].at[self.chain.tile_number]
        self.chain.fetch(self.memory[name].at[self.chain.rows, self.chain.units], self.c_tile, barrier)
        plgpu.barrier_wait(barrier)
        gradient = self.chain.read(self.c_tile)
        plgpu.commit_smem()
        return gradient

    def _fetch(self, t: Any) -> None:
        """What a step needs besides the exchanged gradients."""
        chain, memory = self.chain, self.memory
        for part in range(SUMS[self.job.cell]):
            source = memory["sums"].at[t, chain.rows, chain.gate(part, self.job.hidden)]
            chain.fetch(source, self.sums_tiles.at[part], self.filled)
        if self.dy_tile is not None:
            chain.fetch(memory["d_outputs"].at[t, chain.rows, chain.units], self.dy_tile, self.filled)
        if self.job.cell in BEFORE:
            self._fetch_before(t)

    def _fetch_before(self, t: Any) -> None:
        chain, name = self.chain, BEFORE[self.job.cell]
        tile = self.c_tile if name == "c" else self.h_tile

        @pl.when(t > 0)
        def _() -> None:
            chain.fetch(self.memory[name].at[t - 1, chain.rows, chain.units], tile, self.filled)

        @pl.when(t == 0)
        def _() -> None:
            chain.fetch(self.memory[f"start_{name}"].at[chain.rows, chain.units], tile, self.filled)

    def _step(self, number: Any, carry: Any) -> Any:
        """The `number`th from the last."""
        t = self.job.timesteps - number
        self.chain.wait(number)
        dh, dc = self.chain.collect(self._sums(t)), None
        if self.job.cell == "lstm":
            dc = carry
        elif carry is not None:
            dh = dh + carry
        return self._gradients(number, dh, dc)

    def _sums(self, t: Any, product: int = 0) -> Array:
        """This block's share of a product of the gate gradients of step t."""
        (first, gates), part = self.job.products[product], self.job.tile.part
        exchanged = self.memory["d_products" if self.job.cell == "gru_reset_after" else "dz"].at[t]
        weights = self.scratch[f"weights_{product}"]
        return self.chain.product(
            lambda n: exchanged.at[self.chain.rows, pl.ds(first * self.job.hidden + n * part, part)],
            gates * self.job.hidden // part,
            lambda n: weights.at[:, pl.ds(n * part, part)].transpose((1, 0)),
            self.job.tile.units,
        )

    def _gradients(self, number: Any, dh: Array, dc: Array | None) -> Any:
        """Work out and publish this step's gate gradients, and fetch for the next; gives what is carried to it."""
        t = self.job.timesteps - 1 - number
        plgpu.barrier_wait(self.filled)
        sums = [self.chain.read(self.sums_tiles.at[n]) for n in range(SUMS[self.job.cell])]
        if self.dy_tile is not None:
            dh = dh + self.chain.read(self.dy_tile)
        carry = getattr(self, f"_{self.job.cell}")(number, t, sums, dh, dc)
        pl.when(t > 0)(lambda: self._fetch(t - 1))
        return carry

    def _target(
        self, t: Any, gate: int, values: Array, tile: int | None = None, name: str = "dz"
    ) -> tuple[Any, Any, Array]:
        """Values that leave by a tile, that of their gate if none is said."""
        place = self.memory[name].at[t, self.chain.rows, self.chain.gate(gate, self.job.hidden)]
        return self.sums_tiles.at[gate if tile is None else tile], place, values

    def _rnn(self, number: Any, t: Any, sums: list[Array], dh: Array, dc: None) -> None:
        self.chain.publish([self._target(t, 0, cells.rnn_back(sums, dh))])

    def _lstm(self, number: Any, t: Any, sums: list[Array], dh: Array, dc: Array) -> Array:
        dz, dc = cells.lstm_back(sums, self.chain.read(self.c_tile), dh, dc)
        self.chain.publish([self._target(t, gate, part) for gate, part in enumerate(dz)])
        return dc

    def _gru_reset_after(self, number: Any, t: Any, sums: list[Array], dh: Array, dc: None) -> Array:
        d_update, d_candidate, straight = cells.candidate_back(sums, self.chain.read(self.h_tile), dh)
        d_reset = cells.reset_back(sums, sums[3], d_candidate)
        of_candidate = d_candidate * cells.logistic(sums[0])
        self.chain.publish(
            [
                self._target(t, 0, d_reset, name="d_products"),
                self._target(t, 1, d_update, name="d_products"),
                self._target(t, 2, of_candidate, tile=3, name="d_products"),
                self._target(t, 2, d_candidate),
            ],
            again=[self._target(t, 0, d_reset), self._target(t, 1, d_update)],
        )
        return straight

    def _gru(self, number: Any, t: Any, sums: list[Array], dh: Array, dc: None) -> Array:
        h = self.chain.read(self.h_tile)
        d_update, d_candidate, straight = cells.candidate_back(sums, h, dh)
        self.chain.publish([self._target(t, 2, d_candidate)], exchange=1)
        self.chain.wait(number + 1, exchange=1)
        d_reset_h = self.chain.collect(self._sums(t, product=1))
        d_reset = cells.reset_back(sums, h, d_reset_h)
        self.chain.publish([self._target(t, 0, d_reset), self._target(t, 1, d_update)])
        return straight + d_reset_h * cells.logistic(sums[0])
