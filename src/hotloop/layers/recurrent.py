"""Recurrent layers over time-major sequences [T, B, I]: tanh RNN, GRU and LSTM, fused and step by step.

Parameters are {"input": [I, G*H], "recurrent": [H, G*H], "bias": [G*H]} with G = 1 (RNN), 3 (GRU: reset, update,
candidate) or 4 (LSTM: input, forget, candidate, output). The LSTM adds 1 to the forget gate's sum; the GRU applies the
reset gate before the candidate's product and starts its gate biases at 1, both as TensorFlow's cells do. The fused
functions do the input product for all steps at once; the stepwise ones run a cell on [x, h] a step.
Losses and read-outs are the caller's.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

Params = dict[str, Array]
FORGET_BIAS = 1.0


def init_rnn(key: Array, inputs: int, hidden: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Glorot-uniform products over [x, h], zero bias."""
    return _init(key, inputs, hidden, 1, dtype)


def init_gru(key: Array, inputs: int, hidden: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Glorot-uniform products over [x, h]; reset and update biases 1, candidate bias 0."""
    params = _init(key, inputs, hidden, 3, dtype)
    return params | {"bias": params["bias"].at[: 2 * hidden].set(1)}


def init_lstm(key: Array, inputs: int, hidden: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Glorot-uniform products over [x, h], zero bias (the layer itself adds 1 to the forget gate)."""
    return _init(key, inputs, hidden, 4, dtype)


def _init(key: Array, inputs: int, hidden: int, gates: int, dtype: DTypeLike) -> Params:
    limit = (6.0 / (inputs + hidden + gates * hidden)) ** 0.5
    both = jax.random.uniform(key, (inputs + hidden, gates * hidden), jnp.float32, -limit, limit).astype(
        dtype
    )
    return {"input": both[:inputs], "recurrent": both[inputs:], "bias": jnp.zeros(gates * hidden, dtype)}


def rnn(
    params: Params, x_TBI: Float[Array, "T B I"], state: Float[Array, "B H"] | None = None
) -> tuple[Float[Array, "T B H"], Float[Array, "B H"]]:
    """h = tanh(x W + h U + b): every h, and the last."""
    return rnn_stepwise(params, x_TBI, state)


def gru(
    params: Params, x_TBI: Float[Array, "T B I"], state: Float[Array, "B H"] | None = None
) -> tuple[Float[Array, "T B H"], Float[Array, "B H"]]:
    """r, u = sigmoid(...); c = tanh(x W + (r h) U + b); h = u h + (1 - u) c: every h, and the last."""
    return gru_stepwise(params, x_TBI, state)


def lstm(
    params: Params, x_TBI: Float[Array, "T B I"], state: tuple[Array, Array] | None = None
) -> tuple[Float[Array, "T B H"], tuple[Float[Array, "B H"], Float[Array, "B H"]]]:
    """i, f, g, o gates; c = sigmoid(f + 1) c + sigmoid(i) tanh(g); h = sigmoid(o) tanh(c): every h, and the last (h, c)."""
    return lstm_stepwise(params, x_TBI, state)


def lstm_stack(params_list: list[Params], x_TBI: Float[Array, "T B I"]) -> Float[Array, "B H"]:
    """The last hidden state of the last of several LSTMs, each fed with the one before."""
    for params in params_list:
        x_TBI, (h, _) = lstm(params, x_TBI)
    return h


def _zero_state(params: Params, x_TBI: Array) -> Array:
    return jnp.zeros((x_TBI.shape[1], params["recurrent"].shape[0]), x_TBI.dtype)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def rnn_stepwise(
    params: Params, x_TBI: Float[Array, "T B I"], state: Float[Array, "B H"] | None = None
) -> tuple[Float[Array, "T B H"], Float[Array, "B H"]]:
    """As `rnn`, one cell a step on [x, h]."""
    both = jnp.concatenate([params["input"], params["recurrent"]])

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(_product(jnp.concatenate([x, h], 1), both) + params["bias"]).astype(x.dtype)
        return h, h

    h, outputs = lax.scan(step, _zero_state(params, x_TBI) if state is None else state, x_TBI)
    return outputs, h


def gru_stepwise(
    params: Params, x_TBI: Float[Array, "T B I"], state: Float[Array, "B H"] | None = None
) -> tuple[Float[Array, "T B H"], Float[Array, "B H"]]:
    """As `gru`, one cell a step on [x, h] and [x, r h]."""
    both = jnp.concatenate([params["input"], params["recurrent"]])
    gates = 2 * params["recurrent"].shape[0]

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        sums = _product(jnp.concatenate([x, h], 1), both[:, :gates]) + params["bias"][:gates]
        reset, update = jnp.split(jax.nn.sigmoid(sums), 2, 1)
        reset_h = (reset * h).astype(x.dtype)
        candidate = jnp.tanh(
            _product(jnp.concatenate([x, reset_h], 1), both[:, gates:]) + params["bias"][gates:]
        )
        h = (update * h + (1 - update) * candidate).astype(x.dtype)
        return h, h

    h, outputs = lax.scan(step, _zero_state(params, x_TBI) if state is None else state, x_TBI)
    return outputs, h


def lstm_stepwise(
    params: Params, x_TBI: Float[Array, "T B I"], state: tuple[Array, Array] | None = None
) -> tuple[Float[Array, "T B H"], tuple[Float[Array, "B H"], Float[Array, "B H"]]]:
    """As `lstm`, one cell a step on [x, h]."""
    both = jnp.concatenate([params["input"], params["recurrent"]])

    def step(state: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        sums = _product(jnp.concatenate([x, h], 1), both) + params["bias"]
        i, f, g, o = jnp.split(sums, 4, 1)
        c = jax.nn.sigmoid(f + FORGET_BIAS) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(x.dtype)
        return (h, c.astype(x.dtype)), h

    zero = _zero_state(params, x_TBI)
    state, outputs = lax.scan(step, (zero, zero) if state is None else state, x_TBI)
    return outputs, state
