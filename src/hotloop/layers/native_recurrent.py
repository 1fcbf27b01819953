"""Recurrences by the handlers of `hotloop-native`: a whole sequence in one call, forward and backward.

They take what the operations of `recurrence.py` take, keep the same sums, and give the same gradients; what a cell
does not have is an empty array there. `CELLS` are the cells in the package's numbering.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.layers import native
from hotloop.layers.native import empty
from hotloop.layers.paths import Rival

CELLS = ("rnn", "gru", "gru_reset_after", "lstm")
SUMS = {"rnn": 1, "gru": 3, "gru_reset_after": 4, "lstm": 4}


WIDEST = 32
"""Columns of a panel of weights on the processors with the widest vectors."""


def pack(*arrays: Array, form: Any, cell: str) -> tuple[Array, ...]:
    """The arrays, and the weights as `infer` reads them: XLA takes this out of a loop in which they do not change."""
    (_, w, _, u, *_), (_, _, hidden) = _operands(arrays, form, cell)
    padded = -(-hidden // WIDEST) * WIDEST
    size = (w.shape[0] + hidden) * (u.shape[1] // hidden) * padded
    return *arrays, native.call("hotloop_recurrent_pack", _floats(size), w, u, cell=_number(cell))


def infer(*arrays: Array, form: Any, cell: str) -> Any:
    """Every output and the last state; the last array is that of the packed weights."""
    operands, (timesteps, batch, hidden) = _operands(arrays[:-1], form, cell)
    results = (_floats(timesteps, batch, hidden), _of_lstm(cell, batch, hidden))
    outputs, c = native.call(
        "hotloop_recurrent_infer_packed", results, *operands, arrays[-1], cell=_number(cell)
    )
    return outputs, (outputs[-1], c) if cell == "lstm" else (outputs[-1],)


def forward(*arrays: Array, form: Any, cell: str) -> Any:
    """Every state, the last one, and the gate sums."""
    operands, (timesteps, batch, hidden) = _operands(arrays, form, cell)
    results = (
        _floats(timesteps, batch, hidden),
        _of_lstm(cell, timesteps, batch, hidden),
        _floats(timesteps, batch, SUMS[cell] * hidden),
    )
    h, c, sums = native.call("hotloop_recurrent_forward", results, *operands, cell=_number(cell))
    states = (h, c) if cell == "lstm" else (h,)
    return states, tuple(part[-1] for part in states), sums


def backward(*arrays: Array, form: Any, cell: str) -> Any:
    """The gradients of the input sums, of the input weights and their bias, of the recurrent weights, and of the first
    state (None where there was none)."""
    d_outputs, x, recurrent, state, states, sums, d_last = jax.tree.unflatten(form, arrays)
    kernel, _ = _weights(recurrent, cell)
    timesteps, batch, hidden = states[0].shape
    dz, d_input, d_input_bias, d_kernel, d_bias, dh, dc = native.call(
        "hotloop_recurrent_backward",
        (
            _floats(timesteps, batch, kernel.shape[1]),
            _floats(x.shape[2], kernel.shape[1]),
            _floats(kernel.shape[1]),
            _floats(*kernel.shape),
            _floats(hidden if cell == "gru_reset_after" else 0),
            _floats(batch, hidden),
            _of_lstm(cell, batch, hidden),
        ),
        empty() if d_outputs is None else d_outputs,
        x,
        kernel,
        sums,
        *_both(states),
        *_both(state),
        *_both(d_last),
        cell=_number(cell),
        wants_start=state is not None,
    )
    d_recurrent = (d_kernel, d_bias) if cell == "gru_reset_after" else d_kernel
    d_state = (dh, dc) if cell == "lstm" else (dh,)
    return dz, d_input, d_input_bias, d_recurrent, None if state is None else d_state


def _operands(arrays: Sequence[Array], form: Any, cell: str) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    """What both forward passes are given, and the shape of their outputs."""
    inputs, recurrent, state = jax.tree.unflatten(form, arrays)
    kernel, bias = _weights(recurrent, cell)
    x, input_kernel, biases = inputs
    operands = (x, input_kernel, sum(biases[1:], biases[0]), kernel, bias, *_both(state))
    return operands, (*x.shape[:2], kernel.shape[0])


def _number(cell: str) -> np.int64:
    return np.int64(CELLS.index(cell))


def _weights(recurrent: Any, cell: str) -> tuple[Array, Array]:
    """The kernel, and the bias of the candidate's product."""
    return recurrent if cell == "gru_reset_after" else (recurrent, empty())


def _both(state: tuple[Array, ...] | None) -> tuple[Array, Array]:
    """h and c."""
    h, c = (*(state or ()), empty(), empty())[:2]
    return h, c


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)  # type: ignore[no-untyped-call]


def _of_lstm(cell: str, *shape: int) -> jax.ShapeDtypeStruct:
    return _floats(*shape) if cell == "lstm" else _floats(0)


FASTER = 1.02
"""The margin of large recurrences. They are at 0.95 of what two cores can do, so that no tenth is left to gain over
XLA's loop, and they run on XLA's own threads, so that nothing speaks against the faster path. A small one stands among
operations that XLA would have fused with it: the LSTM of B1 T5 H128 was 1.04 times as fast alone, and 0.6 in a program.
"""
INFER = Rival(
    "recurrence inference", "hotloop_recurrent_infer_packed", infer, prepare=pack, margin_of_large=FASTER
)
FORWARD = Rival("recurrence forward", "hotloop_recurrent_forward", forward, margin_of_large=FASTER)
BACKWARD = Rival("recurrence backward", "hotloop_recurrent_backward", backward, margin_of_large=FASTER)
