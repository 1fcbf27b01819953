"""Recurrent layers over time-major sequences [T, B, I]: tanh RNN, GRU and LSTM. The state starts at zero.

Parameters are {"input": [I, G*H], "recurrent": [H, G*H], "bias": [G*H]}, with G = 1 (RNN), 3 (GRU: reset, update,
candidate) or 4 (LSTM: input, forget, candidate, output). As TensorFlow's cells do, the LSTM adds 1 to the forget
gate's sum, and the GRU applies the reset gate before the candidate's product; `gru_reset_after` has a second bias,
{"recurrent_bias": [3*H]}, as torch and Keras have. The input product is made for all steps at once; the `_stepwise`
functions, kept for comparison, run one cell a step on [x, h] and are differentiated by JAX.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxtyping import Float

from hotloop.layers.dense import wide
from hotloop.layers.recurrence import GRU, GRU_RESET_AFTER, LSTM, RNN, Cell, Inputs, recur_inputs

Params = dict[str, Array]
Outputs = Float[Array, "T B H"]
Hidden = Float[Array, "B H"]
FORGET_BIAS = 1.0


def rnn(params: Params, x_TBI: Float[Array, "T B I"], state: Hidden | None = None) -> tuple[Outputs, Hidden]:
    """h = tanh(x W + h U + b). Gives every h, and the last."""
    return _recur_hidden(RNN, _inputs(params, x_TBI), params["recurrent"], state)


def gru(params: Params, x_TBI: Float[Array, "T B I"], state: Hidden | None = None) -> tuple[Outputs, Hidden]:
    """r, u = sigmoid(x W + h U + b), c = tanh(x W + (r h) U + b), h = u h + (1 - u) c. Every h, and the last."""
    return _recur_hidden(GRU, _inputs(params, x_TBI), params["recurrent"], state)


def gru_reset_after(
    params: Params, x_TBI: Float[Array, "T B I"], state: Hidden | None = None
) -> tuple[Outputs, Hidden]:
    """As `gru` with c = tanh(x W + b + r (h U + b')): the form of cuDNN, one product a step. Every h, and the last."""
    of_gates, of_candidate = jnp.split(params["recurrent_bias"], [2 * params["recurrent"].shape[0]])
    biases = jnp.concatenate([of_gates, jnp.zeros_like(of_candidate)])
    inputs = Inputs(x_TBI, params["input"], (params["bias"], biases))
    return _recur_hidden(GRU_RESET_AFTER, inputs, (params["recurrent"], of_candidate), state)


def lstm(
    params: Params, x_TBI: Float[Array, "T B I"], state: tuple[Hidden, Hidden] | None = None
) -> tuple[Outputs, tuple[Hidden, Hidden]]:
    """c = sigmoid(f + 1) c + sigmoid(i) tanh(g); h = sigmoid(o) tanh(c). Gives every h, and the last (h, c)."""
    before = None if state is None else (state[0], state[1].astype(wide(state[1].dtype)))
    hidden = params["recurrent"].shape[0]
    forget = jnp.repeat(jnp.array([0, FORGET_BIAS, 0, 0], params["bias"].dtype), hidden)
    inputs = Inputs(x_TBI, params["input"], (params["bias"] + forget,))
    outputs, (h, c) = recur_inputs(LSTM, inputs, params["recurrent"], before)
    return outputs, (h, c.astype(h.dtype))


def lstm_stack(params_list: Sequence[Params], x_TBI: Float[Array, "T B I"]) -> Hidden:
    """The last hidden state of the last of several LSTMs, each fed with the outputs of the one before."""
    for params in params_list:
        x_TBI, (h, _) = lstm(params, x_TBI)
    return h


def init_rnn(key: Array, inputs: int, hidden: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Glorot-uniform kernels over [x, h] and a zero bias."""
    return _init(key, inputs, hidden, 1, dtype)


def init_gru(key: Array, inputs: int, hidden: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Glorot-uniform kernels over [x, h]; reset and update biases 1, candidate bias 0."""
    params = _init(key, inputs, hidden, 3, dtype)
    return params | {"bias": params["bias"].at[: 2 * hidden].set(1)}


def init_gru_reset_after(key: Array, inputs: int, hidden: int, dtype: DTypeLike = jnp.float32) -> Params:
    """As `init_gru`; the second bias is 0."""
    return init_gru(key, inputs, hidden, dtype) | {"recurrent_bias": jnp.zeros(3 * hidden, dtype)}


def init_lstm(key: Array, inputs: int, hidden: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Glorot-uniform kernels over [x, h] and a zero bias (the layer itself adds 1 to the forget gate)."""
    return _init(key, inputs, hidden, 4, dtype)


def _init(key: Array, inputs: int, hidden: int, gates: int, dtype: DTypeLike) -> Params:
    limit = (6.0 / (inputs + hidden + gates * hidden)) ** 0.5
    shape = (inputs + hidden, gates * hidden)
    kernels = jax.random.uniform(key, shape, jnp.float32, -limit, limit).astype(dtype)
    return {"input": kernels[:inputs], "recurrent": kernels[inputs:], "bias": jnp.zeros(shape[1], dtype)}


def _recur_hidden(cell: Cell, inputs: Inputs, recurrent: Any, state: Hidden | None) -> tuple[Outputs, Hidden]:
    """A recurrence whose state is `h` alone."""
    outputs, (h,) = recur_inputs(cell, inputs, recurrent, None if state is None else (state,))
    return outputs, h


def _inputs(params: Params, x_TBI: Array) -> Inputs:
    return Inputs(x_TBI, params["input"], (params["bias"],))


def rnn_stepwise(
    params: Params, x_TBI: Float[Array, "T B I"], state: Hidden | None = None
) -> tuple[Outputs, Hidden]:
    """As `rnn`, one cell a step on [x, h]."""
    kernel = jnp.concatenate([params["input"], params["recurrent"]])

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(_sums(kernel, params["bias"], x, h)).astype(x.dtype)
        return h, h

    h, outputs = lax.scan(step, _zero_state(params, x_TBI) if state is None else state, x_TBI)
    return outputs, h


def gru_stepwise(
    params: Params, x_TBI: Float[Array, "T B I"], state: Hidden | None = None
) -> tuple[Outputs, Hidden]:
    """As `gru`, one cell a step on [x, h] and [x, reset h]."""
    kernel = jnp.concatenate([params["input"], params["recurrent"]])
    bias, gates = params["bias"], 2 * params["recurrent"].shape[0]

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        reset, update = jnp.split(sigmoid(_sums(kernel[:, :gates], bias[:gates], x, h)), 2, 1)
        candidate = jnp.tanh(_sums(kernel[:, gates:], bias[gates:], x, (reset * h).astype(x.dtype)))
        h = (update * h + (1 - update) * candidate).astype(x.dtype)
        return h, h

    h, outputs = lax.scan(step, _zero_state(params, x_TBI) if state is None else state, x_TBI)
    return outputs, h


def lstm_stepwise(
    params: Params, x_TBI: Float[Array, "T B I"], state: tuple[Hidden, Hidden] | None = None
) -> tuple[Outputs, tuple[Hidden, Hidden]]:
    """As `lstm`, one cell a step on [x, h]."""
    kernel = jnp.concatenate([params["input"], params["recurrent"]])

    def step(state: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        i, f, g, o = jnp.split(_sums(kernel, params["bias"], x, h), 4, 1)
        c = sigmoid(f + FORGET_BIAS) * c + sigmoid(i) * jnp.tanh(g)
        h = (sigmoid(o) * jnp.tanh(c)).astype(x.dtype)
        return (h, c), h

    h, c = (_zero_state(params, x_TBI),) * 2 if state is None else state
    (h, c), outputs = lax.scan(step, (h, c.astype(wide(c.dtype))), x_TBI)
    return outputs, (h, c.astype(h.dtype))


def _zero_state(params: Params, x_TBI: Array) -> Array:
    return jnp.zeros((x_TBI.shape[1], params["recurrent"].shape[0]), x_TBI.dtype)


def _sums(kernel: Array, bias: Array, x: Array, h: Array) -> Array:
    sums: jax.Array = jnp.matmul(jnp.concatenate([x, h], 1), kernel, preferred_element_type=wide(x.dtype))
    return sums + bias
