"""Recurrent layers once more, in float64 on the CPU, one cell a step from their formulas: the oracle of kernels' tests.

It shares no code with the layers, is called like them, and leaves its gradients to jax: nothing that a kernel is
compared with here was differentiated by hand.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import sigmoid


def rnn(params, x, h):
    return (jnp.tanh(x @ params["input"] + h @ params["recurrent"] + params["bias"]),)


def gru(params, x, h):
    reset, update, candidate = jnp.split(x @ params["input"] + params["bias"], 3, 1)
    by_reset, by_update, by_candidate = jnp.split(params["recurrent"], 3, 1)
    reset, update = sigmoid(reset + h @ by_reset), sigmoid(update + h @ by_update)
    return (update * h + (1 - update) * jnp.tanh(candidate + (reset * h) @ by_candidate),)


def gru_reset_after(params, x, h):
    inputs = jnp.split(x @ params["input"] + params["bias"], 3, 1)
    products = jnp.split(h @ params["recurrent"] + params["recurrent_bias"], 3, 1)
    reset, update = sigmoid(inputs[0] + products[0]), sigmoid(inputs[1] + products[1])
    return (update * h + (1 - update) * jnp.tanh(inputs[2] + reset * products[2]),)


def lstm(params, x, h, c):
    i, f, g, o = jnp.split(x @ params["input"] + h @ params["recurrent"] + params["bias"], 4, 1)
    c = sigmoid(f + 1) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


CELLS = {"rnn": rnn, "gru": gru, "gru_reset_after": gru_reset_after, "lstm": lstm}


def run_layer(cell, params, x, state=None):
    """Every h, and the last state."""
    is_lstm = cell == "lstm"
    if state is None:
        zero = jnp.zeros((x.shape[1], len(params["recurrent"])), x.dtype)
        state = (zero, zero) if is_lstm else zero

    def step(state, x):
        state = CELLS[cell](params, x, *state)
        return state, state[0]

    last, outputs = lax.scan(step, state if is_lstm else (state,), x)
    return outputs, last if is_lstm else last[0]


def in_float64(function, cell, *given):
    """What `function` gives when it is called with the oracle's layer and the same numbers."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda array: jnp.asarray(np.asarray(array, np.float64)), given)
        return jax.tree.map(np.asarray, jax.jit(partial(function, partial(run_layer, cell)))(*wide))


def differentiate(layer, params, x, state, gradients):
    """The outputs and the last state, and the gradients of parameters, inputs and state for `gradients` of those two:
    None for what is not used."""

    def run(*given):
        found = layer(*given)
        used = [part for part, gradient in zip(found, gradients, strict=True) if gradient is not None]
        return used, found

    _, back, found = jax.vjp(run, params, x, state, has_aux=True)
    return found, back([gradient for gradient in gradients if gradient is not None])


def assert_values_near(ours, exact, bound):
    for mine, right in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        assert np.abs(np.asarray(mine, np.float64) - right).max() < bound


def assert_gradients_near(ours, exact, bound):
    """Of each array as a whole."""
    for mine, right in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(np.asarray(mine, np.float64) - right) < bound * np.linalg.norm(right)
