"""The layers and losses again, as plain formulas in float64, to hold the fast layers against.

Nothing is shared with `hotloop.layers`: no time-major input product, no custom gradient, no convolution of
the library. Gradients come from differentiating these formulas. Slow on purpose; run it with `in_float64`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Params = dict[str, Any]


def in_float64(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of arrays in float64, on the CPU where there is one; the result is numpy's."""

    def widen(leaf: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(leaf)
        return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float64)

    wide = jax.tree.map(widen, arguments)
    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError:  # only an accelerator is enabled; it computes in float64 itself
        cpu = None
    with jax.enable_x64(True), jax.default_device(cpu):
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))


def dense(params: Params, x: Array) -> Array:
    y: Array = jnp.dot(x, params["kernel"]) + params["bias"]
    return y


def grouped_conv(x: Array, kernel: Array, groups: int, stride: int) -> Array:
    """The definition: shifted inputs times a tap's weights, group by group, summed over the taps."""
    size, depth, outputs = kernel.shape[0], kernel.shape[2], kernel.shape[3]
    out = -(-x.shape[1] // stride)
    padding = max((out - 1) * stride + size - x.shape[1], 0)
    before = padding // 2, padding - padding // 2
    padded = jnp.pad(x, ((0, 0), before, before, (0, 0)))
    grouped = padded.reshape(*padded.shape[:3], groups, depth)
    weights = kernel.reshape(size, size, depth, groups, outputs // groups)
    reach = (out - 1) * stride + 1
    total = jnp.zeros((x.shape[0], out, out, groups, outputs // groups), x.dtype)
    for i in range(size):
        for j in range(size):
            shifted = grouped[:, i : i + reach : stride, j : j + reach : stride]
            total += jnp.einsum("nhwgc,cgo->nhwgo", shifted, weights[i, j])
    return total.reshape(x.shape[0], out, out, outputs)


def rnn(params: Params, x_TBI: Array) -> Array:
    """h = tanh(x W + h U + b)."""
    return _unroll(
        lambda h, x: jnp.tanh(x @ params["input"] + h @ params["recurrent"] + params["bias"]), params, x_TBI
    )


def gru(params: Params, x_TBI: Array) -> Array:
    """r, u = sigmoid(x W + h U + b); c = tanh(x W + (r h) U + b); h = u h + (1 - u) c."""
    hidden = params["recurrent"].shape[0]

    def part(x: Array, h: Array, gate: int) -> Array:
        at = slice(gate * hidden, (gate + 1) * hidden)
        total: Array = x @ params["input"][:, at] + h @ params["recurrent"][:, at] + params["bias"][at]
        return total

    def cell(h: Array, x: Array) -> Array:
        reset, update = jax.nn.sigmoid(part(x, h, 0)), jax.nn.sigmoid(part(x, h, 1))
        return update * h + (1 - update) * jnp.tanh(part(x, reset * h, 2))

    return _unroll(cell, params, x_TBI)


def gru_reset_after(params: Params, x_TBI: Array) -> Array:
    """As `gru` with c = tanh(x W + b + r (h U + b')), and b' in the gates' sums too."""
    hidden = params["recurrent"].shape[0]

    def cell(h: Array, x: Array) -> Array:
        z, s = x @ params["input"] + params["bias"], h @ params["recurrent"] + params["recurrent_bias"]
        reset, update = (jax.nn.sigmoid((z + s)[:, gate * hidden : (gate + 1) * hidden]) for gate in range(2))
        return update * h + (1 - update) * jnp.tanh(z[:, 2 * hidden :] + reset * s[:, 2 * hidden :])

    return _unroll(cell, params, x_TBI)


def _unroll(cell: Callable[[Array, Array], Array], params: Params, x_TBI: Array) -> Array:
    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = cell(h, x)
        return h, h

    return lax.scan(step, _zeros(params, x_TBI), x_TBI)[1]


def lstm(params: Params, x_TBI: Array) -> Array:
    """c = sigmoid(f + 1) c + sigmoid(i) tanh(g); h = sigmoid(o) tanh(c), gates in the order i, f, g, o."""
    hidden = params["recurrent"].shape[0]

    def step(state: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        sums = x @ params["input"] + h @ params["recurrent"] + params["bias"]
        i, f, g, o = (sums[:, gate * hidden : (gate + 1) * hidden] for gate in range(4))
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = _zeros(params, x_TBI)
    return lax.scan(step, (zeros, zeros), x_TBI)[1]


def mean_square(y: Array, target: Array) -> Array:
    return ((y - target) ** 2).mean()


def cross_entropy(logits: Array, labels: Array) -> Array:
    """-log softmax at the label, mean over all rows and steps."""
    exponentials = jnp.exp(logits - logits.max(-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    chosen = (jnp.arange(logits.shape[-1]) == labels[..., None]) * probabilities
    return -jnp.log(chosen.sum(-1)).mean()


def _zeros(params: Params, x_TBI: Array) -> Array:
    return jnp.zeros((x_TBI.shape[1], params["recurrent"].shape[0]), x_TBI.dtype)
