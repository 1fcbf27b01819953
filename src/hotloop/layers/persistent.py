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
    tile = table[cell, batch, hidden]
    job = Job(cell, tile, timesteps, batch, hidden, z.dtype, state is not None, keeps)
    results: dict[str, Array] = run(job, z, kernel, bias, state or ())
    return results


def _input_sums(inputs: Any) -> Array:
    x, kernel, biases = inputs
    sums: Array = matmul(x, kernel)
    return sum(biases, sums).astype(x.dtype)


def backward(*arrays: Array, form: Any, cell: str) -> Any:
    """The gradients of the input sums, of the input weights and their bias, of the recurrent weights, and of the first
    state (None where there was none)."""
    from hotloop.layers.persistent_backward import BEFORE, Job, run

    d_outputs, x, recurrent, state, states, sums, d_last = jax.tree.unflatten(form, arrays)
    kernel = recurrent[0] if cell == "gru_reset_after" else recurrent
    start = tuple(jnp.zeros_like(part[0]) for part in states) if state is None else state
    operands = {"recurrent": kernel, "sums": sums, "d_last_h": d_last[0]}
    if d_outputs is not None:
        operands["d_outputs"] = d_outputs
    if cell == "lstm":
        operands |= {"c": states[1], "start_c": start[1], "d_last_c": d_last[1]}
    elif cell in BEFORE:
        operands |= {"h": states[0], "start_h": start[0]}
    timesteps, batch, hidden = states[0].shape
    tile = persistent_tiles.BACKWARD[cell, batch, hidden]
    found = run(Job(cell, tile, timesteps, batch, hidden, sums.dtype, d_outputs is not None), operands)
    dz = found["dz"]
    d_start = None if state is None else _start_gradient(cell, kernel, found, start)
    d_recurrent = _recurrent_gradient(cell, start, states, sums, found)
    d_recurrent = jax.tree.map(lambda d, part: d.astype(part.dtype), d_recurrent, recurrent)
    return dz, kernel_gradient(x, dz), dz.sum((0, 1)), d_recurrent, d_start


def _start_gradient(cell: str, kernel: Array, found: dict[str, Array], start: Any) -> tuple[Array, ...]:
    """By the products of the first step, which the kernel does not make, and past its gates."""
    hidden, dz = kernel.shape[0], found["dz"][0]
    if cell == "gru_reset_after":
        dz = jnp.concatenate([dz[:, : 2 * hidden], found["d_of_candidate"][0]], 1)
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
    of_gates = kernel_gradient(h, dz[..., : 2 * hidden])
    if cell == "gru_reset_after":
        d_of_candidate = found["d_of_candidate"]
        of_candidate = kernel_gradient(h, d_of_candidate)
        return jnp.concatenate([of_gates, of_candidate], 1), d_of_candidate.sum((0, 1))
    reset_h = (sigmoid(sums[..., :hidden].astype(jnp.float32)) * h).astype(h.dtype)
    return jnp.concatenate([of_gates, kernel_gradient(reset_h, dz[..., 2 * hidden :])], 1)


def _forward_blocks(table: dict[Any, Tile]) -> Any:
    def count(*arrays: Any, form: Any, cell: str) -> int | None:
        inputs, recurrent, _ = jax.tree.unflatten(form, arrays)
        kernel = recurrent[0] if cell == "gru_reset_after" else recurrent
        return _blocks(table, cell, inputs.x_TBI, kernel)

    return count


def _backward_blocks(*arrays: Any, form: Any, cell: str) -> int | None:
    _, x, recurrent, *_ = jax.tree.unflatten(form, arrays)
    kernel = recurrent[0] if cell == "gru_reset_after" else recurrent
    return _blocks(persistent_tiles.BACKWARD, cell, x, kernel)


def _blocks(table: dict[Any, Tile], cell: str, x: Any, kernel: Any) -> int | None:
    """Blocks that must be on the card together; None for a shape that was not measured."""
    (timesteps, batch, _), hidden = x.shape, kernel.shape[0]
    tile = table.get((cell, batch, hidden))
    if tile is None or kernel.dtype not in TYPES or timesteps < FEWEST_STEPS:
        return None
    return tile.blocks(batch, hidden)


INFER = CardKernel(infer, _forward_blocks(persistent_tiles.INFER))
FORWARD = CardKernel(forward, _forward_blocks(persistent_tiles.FORWARD))
BACKWARD = CardKernel(backward, _backward_blocks)
