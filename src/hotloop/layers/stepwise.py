"""Recurrent layers as a plain loop of cells on [x, h], one step after the other, differentiated by JAX.

The slow way, kept for comparison with the fused layers of recurrent.py: same parameters, same results.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.nn import sigmoid
from jaxtyping import Float

from hotloop.layers.dense import wide

Params = dict[str, Array]
Outputs = Float[Array, "T B H"]
Hidden = Float[Array, "B H"]
FORGET_BIAS = 1.0


def rnn_stepwise(
    params: Params, x_TBI: Float[Array, "T B I"], state: Hidden | None = None
) -> tuple[Outputs, Hidden]:
    """As `rnn`, one cell a step on [x, h]."""
    kernel = jnp.concatenate([params["input"], params["recurrent"]])

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(_sums(kernel, params["bias"], x, h)).astype(x.dtype)
        return h, h

    h, outputs = lax.scan(step, zero_state(params, x_TBI) if state is None else state, x_TBI)
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

    h, outputs = lax.scan(step, zero_state(params, x_TBI) if state is None else state, x_TBI)
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

    h, c = (zero_state(params, x_TBI),) * 2 if state is None else state
    (h, c), outputs = lax.scan(step, (h, c.astype(wide(c.dtype))), x_TBI)
    return outputs, (h, c.astype(h.dtype))


def zero_state(params: Params, x_TBI: Array) -> Array:
    """Zeros [B, H] in the type of the inputs."""
    return jnp.zeros((x_TBI.shape[1], params["recurrent"].shape[0]), x_TBI.dtype)


def _sums(kernel: Array, bias: Array, x: Array, h: Array) -> Array:
    sums: jax.Array = jnp.matmul(jnp.concatenate([x, h], 1), kernel, preferred_element_type=wide(x.dtype))
    return sums + bias
