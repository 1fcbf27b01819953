"""A recurrence forward in time as one GPU kernel: every output, and for training what the way back needs.

The kernel is given the input sums of all steps. A step of a chain waits until all blocks have published the h before,
multiplies it by the block's weights, and publishes the new h of the block's units; input sums are fetched a step ahead.
The GRU that resets before its product publishes twice a step: reset times h, and h.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.layers import persistent_cells as cells
from hotloop.layers.persistent_chain import Chain, exchange_scratch, launch, plgpu, shared
from hotloop.layers.persistent_tiles import ROWS, Tile

GATES = {"rnn": 1, "gru": 3, "gru_reset_after": 3, "lstm": 4}
SUMS = {"rnn": 1, "gru": 3, "gru_reset_after": 4, "lstm": 4}
EXCHANGES = {"gru": 2}


class Job(NamedTuple):
    """One call of a kernel."""

    cell: str
    tile: Tile
    timesteps: int
    batch: int
    hidden: int
    dtype: Any
    has_state: bool
    keeps: bool
    """Whether states and gate sums are kept for the way back."""

    @property
    def grid(self) -> tuple[int, int]:
        return self.tile.grid(self.batch, self.hidden)


def run(
    job: Job, z: Array, recurrent: Array, bias: Array | None, state: Sequence[Array], interpret: Any = None
) -> Any:
    """Outputs [T, B, H]; an LSTM's last c, or every c where states are kept; the sums where they are kept."""
    cell, hidden = job.cell, job.hidden
    across = recurrent.T.reshape(GATES[cell], hidden, hidden)
    operands = [z, across, *([] if bias is None else [bias]), *state]
    kernel = launch(
        job.tile,
        job.grid,
        partial(_body, job),
        out_type=tuple(_results(job).values()),
        scratch_types=_scratch(job),
        interpret=interpret,
    )
    return dict(zip(_results(job), kernel(*operands), strict=True))


def _results(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    def array(*shape: int, dtype: Any = job.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

    results = {"h": array(job.timesteps, job.batch, job.hidden)}
    if job.cell == "lstm":
        lead = (job.timesteps,) if job.keeps else ()
        results["c"] = array(*lead, job.batch, job.hidden, dtype=jnp.float32)
    if job.cell == "gru":
        results["reset_h"] = array(job.batch, job.hidden)
    if job.keeps:
        results["sums"] = array(job.timesteps, job.batch, SUMS[job.cell] * job.hidden)
    return results


def _scratch(job: Job) -> dict[str, Any]:
    tile, gates = job.tile, GATES[job.cell]
    kept = SUMS[job.cell] if job.keeps else 0
    tiles = partial(shared, tile.own_chains)
    return {
        **exchange_scratch(tile, gates * tile.units, job.dtype),
        "weights": shared(gates * tile.units, job.hidden // tile.split, dtype=job.dtype),
        "weights_filled": plgpu.Barrier(num_arrivals=gates),
        # The sums of a step are kept from where its input sums were.
        "z_tiles": tiles(max(gates, kept), ROWS, tile.units, dtype=job.dtype),
        "z_filled": plgpu.Barrier(num_arrivals=gates, num_barriers=tile.own_chains),
        "h_tiles": tiles(ROWS, tile.units, dtype=job.dtype),
        "c_tiles": tiles(ROWS, tile.units, dtype=jnp.float32) if job.cell == "lstm" else None,
        "start_filled": plgpu.Barrier(num_barriers=tile.own_chains) if job.has_state else None,
    }


def _body(job: Job, *refs: Any, **scratch: Any) -> None:
    names = ["z", "across", *(["bias"] if job.cell == "gru_reset_after" else [])]
    names += ["start_h", "start_c"][: len(refs) - len(names) - len(_results(job))]
    _Forward(job, dict(zip([*names, *_results(job)], refs, strict=True)), scratch).run()


class _Forward:
    """The work of one chain."""

    def __init__(self, job: Job, memory: dict[str, Any], scratch: dict[str, Any]):
        self.job, self.memory, self.scratch = job, memory, scratch
        self.chain = Chain(job.tile, job.grid, scratch, EXCHANGES.get(job.cell, 1))
        own = self.chain.tile_number
        self.z_tiles, self.z_filled = scratch["z_tiles"].at[own], scratch["z_filled"].at[own]
        self.h_tile = scratch["h_tiles"].at[own]
        self.c_tile = scratch["c_tiles"].at[own] if job.cell == "lstm" else None

    def run(self) -> None:
        self._fetch_weights()
        plgpu.barrier_wait(self.scratch["weights_filled"])
        self.chain.play(self._own, self._help)

    def _own(self) -> None:
        self._fetch_z(0)
        start = self._read_start()
        self.bias: Any = self._read_bias() if self.job.cell == "gru_reset_after" else None
        carry = self._step(0, start, is_first=True)
        carry = lax.fori_loop(1, self.job.timesteps, self._step, carry)
        if self.job.cell == "lstm" and not self.job.keeps:
            target = self.memory["c"].at[self.chain.rows, self.chain.units]
            self.chain.write([(self.c_tile, target, carry)])
        plgpu.wait_smem_to_gmem(0)

    def _help(self) -> None:
        """All products of a chain whose gates another block of the cluster works out."""

        def step(t: Any, carry: None, is_first: bool = False) -> None:
            before = self._state_before(t, is_first)
            if before is None:
                return
            is_gru = self.job.cell == "gru"
            self.chain.send(self._sums(before, range(2 if is_gru else GATES[self.job.cell])))
            if is_gru:
                self.chain.wait(self._resets(t), exchange=1)
                self.chain.send(self._sums(self.memory["reset_h"], range(2, 3)))

        step(0, None, is_first=True)
        lax.fori_loop(1, self.job.timesteps, step, None)

    def _fetch_weights(self) -> None:
        units, share = self.job.tile.units, self.job.hidden // self.job.tile.split

        @pl.when(self.chain.number == 0)
        def _() -> None:
            for gate in range(GATES[self.job.cell]):
                plgpu.copy_gmem_to_smem(
                    self.memory["across"].at[gate, self.chain.units, pl.ds(self.chain.peer * share, share)],
                    self.scratch["weights"].at[pl.ds(gate * units, units)],
                    self.scratch["weights_filled"],
                )

    def _fetch_z(self, t: Any) -> None:
        for gate in range(GATES[self.job.cell]):
            source = self.memory["z"].at[t, self.chain.rows, self.chain.gate(gate, self.job.hidden)]
            self.chain.fetch(source, self.z_tiles.at[gate], self.z_filled)

    def _read_start(self) -> Array | None:
        """What is carried besides the h that all blocks share: an LSTM's c, a GRU's own units of h."""
        if not self.job.has_state or self.job.cell == "rnn":
            return None
        is_lstm = self.job.cell == "lstm"
        tile = self.c_tile if is_lstm else self.h_tile
        source = self.memory["start_c" if is_lstm else "start_h"].at[self.chain.rows, self.chain.units]
        barrier = self.scratch["start_filled"].at[self.chain.tile_number]
        self.chain.fetch(source, tile, barrier)
        plgpu.barrier_wait(barrier)
        start = self.chain.read(tile)
        plgpu.commit_smem()
        return start

    def _sums(self, source: Any, gates: range) -> Array:
        """This block's share of the products of these gates' weights with what was exchanged."""
        units, part, weights = self.job.tile.units, self.job.tile.part, self.scratch["weights"]
        rows = pl.ds(gates.start * units, len(gates) * units)
        return self.chain.product(
            lambda n: source.at[self.chain.rows, pl.ds(n * part, part)],
            self.job.hidden // part,
            lambda n: weights.at[rows, pl.ds(n * part, part)].transpose((1, 0)),
            len(gates) * units,
        )

    def _product(self, source: Any, gates: range) -> list[Array]:
        """The products of each of these gates, for this block's units."""
        units, sums = self.job.tile.units, self.chain.collect(self._sums(source, gates))
        return [sums[:, n * units : (n + 1) * units] for n in range(len(gates))]

    def _resets(self, t: Any) -> Any:
        """How often reset times h has been published when step t reads it; a zero h is not."""
        return t + 1 if self.job.has_state else t

    def _read_z(self) -> list[Array]:
        plgpu.barrier_wait(self.z_filled)
        return [self.chain.read(self.z_tiles.at[gate]) for gate in range(GATES[self.job.cell])]

    def _step(self, t: Any, carry: Any, is_first: bool = False) -> Any:
        before = self._state_before(t, is_first)
        if self.job.cell == "gru":
            h, carry, sums = self._reset_before(t, carry, before)
        else:
            gates = range(GATES[self.job.cell])
            products = None if before is None else self._product(before, gates)
            h, carry, sums = self._one_product(self._read_z(), products, carry)
        self._finish(t, h, carry, sums)
        return carry

    def _state_before(self, t: Any, is_first: bool) -> Any:
        """Where the h before this step lies once all blocks have written theirs; None where it is zero."""
        if is_first:
            return self.memory["start_h"] if self.job.has_state else None
        self.chain.wait(t)
        return self.memory["h"].at[t - 1]

    def _one_product(self, z: list[Array], products: list[Array] | None, carry: Any) -> Any:
        cell = self.job.cell
        if cell == "gru_reset_after":
            sums = cells.reset_after(z, products, self.bias)
            h = self._rounded(cells.mix(sums[1], sums[2], carry))
            return h, h, sums
        sums = cells.plus(z, products)
        if cell == "rnn":
            return jnp.tanh(sums[0]), carry, sums
        h, c = cells.lstm(sums, carry)
        return h, c, sums

    def _read_bias(self) -> Array:
        layout = plgpu.Layout.WGMMA.reduce(0)
        bias = plgpu.load(self.memory["bias"].at[self.chain.units], layout=layout, optimized=False)
        return lax.broadcast_in_dim(bias.astype(jnp.float32), (ROWS, self.job.tile.units), (1,))

    def _reset_before(self, t: Any, h: Array | None, before: Any) -> Any:
        products = None if before is None else self._product(before, range(2))
        z = self._read_z()
        sums = cells.plus(z[:2], products)
        candidate = z[2]
        if h is not None:
            reset_h = self.memory["reset_h"]
            own = reset_h.at[self.chain.rows, self.chain.units]
            self.chain.publish([(self.h_tile, own, cells.logistic(sums[0]) * h)], exchange=1)
            self.chain.wait(self._resets(t), exchange=1)
            candidate += self._product(reset_h, range(2, 3))[0]
        h = self._rounded(cells.mix(sums[1], candidate, h))
        return h, h, [*sums, candidate]

    def _rounded(self, h: Array) -> Array:
        """What the next step reads of it."""
        return h.astype(self.job.dtype).astype(jnp.float32)

    def _finish(self, t: Any, h: Array, carry: Any, sums: list[Array]) -> None:
        chain, memory = self.chain, self.memory
        chain.publish([(self.h_tile, memory["h"].at[t, chain.rows, chain.units], h)])
        if self.job.keeps:
            pairs = [
                (self.z_tiles.at[n], memory["sums"].at[t, chain.rows, chain.gate(n, self.job.hidden)], part)
                for n, part in enumerate(sums)
            ]
            if self.job.cell == "lstm":
                pairs.append((self.c_tile, memory["c"].at[t, chain.rows, chain.units], carry))
            chain.write(pairs)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(t + 1 < self.job.timesteps)(lambda: self._fetch_z(t + 1))
