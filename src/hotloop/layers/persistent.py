"""Recurrences as one kernel for all time steps, for NVIDIA's Hopper cards: the recurrent weights stay on chip.

A plain loop fetches them anew each step, and starts its kernels anew. These take what the operations of `recurrence.py`
take, in 16 bits and of the shapes of `persistent_tiles.py`, keep the same sums and give the same gradients. The
products with the inputs are made before, and the weight gradients after, as one product each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import sigmoid

from hotloop.layers import persistent_tiles
from hotloop.layers.dense import kernel_gradient, matmul
from hotloop.layers.paths import CardKernel
from hotloop.layers.persistent_tiles import Tile

TYPES = (jnp.float16, jnp.bfloat16)
FEWEST_STEPS = 5  # with fewer there is nothing to keep weights for


def infer(*arrays: Array, form: Any, cell: str) -> Any:
    """Every output and the last state."""
    results = _forward(persistent_tiles.INFER, False, *arrays, form=form, cell=cell)
    outputs = results["h"]
    return outputs, (outputs[-1], results["c"]) if cell == "lstm" else (outputs[-1],)


def forward(*arrays: Array, form: Any, cell: str) -> Any:
    """Every state, the last one, and the gate sums."""
    results = _forward(persistent_tiles.FORWARD, True, *arrays, form=form, cell=cell)
    states = tuple(results[name] for name in ("h", "c") if name in results)
    return states, tuple(part[-1] for part in states), results["sums"]


def _forward(table: dict[Any, Tile], keeps: bool, *arrays: Array, form: Any, cell: str) -> dict[str, Array]:
    from hotloop.layers.persistent_forward import Job, run

    inputs, recurrent, state = jax.tree.unflatten(form, arrays)
    kernel, bias = recurrent if cell == "gru_reset_after" else (recurrent, None)
    z = _input_sums(inputs)
    timesteps, batch, hidden = *z.shape[:2], kernel.shape[0]
    if is_alone(cell, batch, hidden):
        return _forward_alone(keeps, z, kernel, state)
    tile = table[cell, batch, hidden]
    job = Job(cell, tile, timesteps, batch, hidden, z.dtype, state is not None, keeps)
    results: dict[str, Array] = run(job, z, kernel, bias, state or ())
    return results


def _forward_alone(keeps: bool, z: Array, kernel: Array, state: Any) -> dict[str, Array]:
    from hotloop.layers.persistent_alone import Job, run

    start = None if state is None else "start"
    stored = ("h", "sums") if keeps else ("h",)
    timesteps, batch, hidden = z.shape
    job = Job(persistent_tiles.ROWS_ALONE, timesteps, batch, hidden, z.dtype, ("z",), stored, start)
    results: dict[str, Array] = run(job, kernel.T, [z, *(state or ())])
    return results


def _input_sums(inputs: Any) -> Array:
    """In 16 bits from the first: the library then adds the bias to its sums itself and writes half as much (T150 B1024
    H256: 195 us against 230)."""
    x, kernel, biases = inputs
    return sum(biases, jnp.matmul(x, kernel))


def backward(*arrays: Array, form: Any, cell: str) -> Any:
    """The gradients of the input sums, of the input weights and their bias, of the recurrent weights, and of the first
    state (None where there was none)."""
    d_outputs, x, recurrent, state, states, sums, d_last = jax.tree.unflatten(form, arrays)
    kernel = recurrent[0] if cell == "gru_reset_after" else recurrent
    start = tuple(jnp.zeros_like(part[0]) for part in states) if state is None else state
    found = _run_backward(cell, d_outputs, kernel, start, states, sums, d_last)
    dz = found["dz"]
    d_start = None if state is None else _start_gradient(cell, kernel, found, start)
    d_recurrent = _recurrent_gradient(cell, start, states, sums, found)
    d_recurrent = jax.tree.map(lambda d, part: d.astype(part.dtype), d_recurrent, recurrent)
    return dz, kernel_gradient(x, dz), dz.sum((0, 1)), d_recurrent, d_start


def _run_backward(
    cell: str, d_outputs: Array | None, kernel: Array, start: Any, states: Any, sums: Array, d_last: Any
) -> dict[str, Array]:
    from hotloop.layers import persistent_alone, persistent_backward

    timesteps, batch, hidden = states[0].shape
    given = {"sums": sums} | ({} if d_outputs is None else {"d_outputs": d_outputs})
    if is_alone(cell, batch, hidden):
        rows = persistent_tiles.ROWS_ALONE
        alone = persistent_alone.Job(
            rows, timesteps, batch, hidden, sums.dtype, tuple(given), ("dz",), "d_last_h"
        )
        found: dict[str, Array] = persistent_alone.run(alone, kernel, [*given.values(), d_last[0]])
        return found
    operands = given | {"recurrent": kernel, "d_last_h": d_last[0]}
    if cell == "lstm":
        operands |= {"c": states[1], "start_c": start[1], "d_last_c": d_last[1]}
    elif cell in persistent_backward.BEFORE:
        operands |= {"h": states[0], "start_h": start[0]}
    tile = persistent_tiles.BACKWARD[cell, batch, hidden]
    job = persistent_backward.Job(cell, tile, timesteps, batch, hidden, sums.dtype, d_outputs is not None)
    return persistent_backward.run(job, operands)


def _start_gradient(cell: str, kernel: Array, found: dict[str, Array], start: Any) -> tuple[Array, ...]:
    """By the products of the first step, which the kernel does not make, and past its gates."""
    hidden, dz = kernel.shape[0], found["dz"][0]
    if cell == "gru_reset_after":
        dz = found["d_products"][0]
    width = 2 * hidden if cell == "gru" else dz.shape[1]
    dh = matmul(dz[:, :width], kernel[:, :width].T)
    if cell == "lstm":
        return dh.astype(start[0].dtype), found["d_start"].astype(start[1].dtype)
    straight = found.get("d_start", 0)
    return ((dh + straight).astype(start[0].dtype),)


def _recurrent_gradient(cell: str, start: Any, states: Any, sums: Array, found: dict[str, Array]) -> Any:
    """The sum over all steps of the state before times the gate gradients."""
    h, dz = jnp.concatenate([start[0][None], states[0][:-1]]), found["dz"]
    hidden = h.shape[2]
    if cell in ("rnn", "lstm"):
        return kernel_gradient(h, dz)
    if cell == "gru_reset_after":
        d_products = found["d_products"]
        return kernel_gradient(h, d_products), d_products[..., 2 * hidden :].sum((0, 1))
    of_gates = kernel_gradient(h, dz[..., : 2 * hidden])
    reset_h = (sigmoid(sums[..., :hidden].astype(jnp.float32)) * h).astype(h.dtype)
    return jnp.concatenate([of_gates, kernel_gradient(reset_h, dz[..., 2 * hidden :])], 1)


def _forward_blocks(table: dict[Any, Tile]) -> Any:
    def count(*arrays: Any, form: Any, cell: str) -> int | None:
        inputs, recurrent, state = jax.tree.unflatten(form, arrays)
        kernel = recurrent[0] if cell == "gru_reset_after" else recurrent
        is_for = _has_its_types((inputs, recurrent), state)
        return _blocks(table, cell, inputs.x_TBI, kernel) if is_for else None

    return count


def _backward_blocks(*arrays: Any, form: Any, cell: str) -> int | None:
    _, x, recurrent, state, states, sums, _ = jax.tree.unflatten(form, arrays)
    kernel = recurrent[0] if cell == "gru_reset_after" else recurrent
    is_for = _has_its_types((x, recurrent, states[0], sums), state)
    return _blocks(persistent_tiles.BACKWARD, cell, x, kernel) if is_for else None


def _has_its_types(arrays: Any, state: Any) -> bool:
    """Whether nothing has to be widened, as a float32 bias beside weights of 16 bits would be, and an LSTM's c is
    float32."""
    h, c = (state or ())[:1], (state or ())[1:]
    has_one = len({array.dtype for array in jax.tree.leaves((arrays, h))}) == 1
    return has_one and all(part.dtype == jnp.float32 for part in c)


def _blocks(table: dict[Any, Tile], cell: str, x: Any, kernel: Any) -> int | None:
    """Blocks that must be on the card together; None for a shape that was not measured."""
    (timesteps, batch, _), hidden = x.shape, kernel.shape[0]
    if kernel.dtype not in TYPES or timesteps < FEWEST_STEPS:
        return None
    if is_alone(cell, batch, hidden):
        return 1
    tile = table.get((cell, batch, hidden))
    return None if tile is None else tile.blocks(batch, hidden)


def is_alone(cell: str, batch: int, hidden: int) -> bool:
    """Whether the kernel is taken whose blocks do not wait for each other."""
    return cell == "rnn" and (batch, hidden) in persistent_tiles.ALONE


INFER = CardKernel(infer, _forward_blocks(persistent_tiles.INFER))
FORWARD = CardKernel(forward, _forward_blocks(persistent_tiles.FORWARD))
BACKWARD = CardKernel(backward, _backward_blocks)
