"""The GRU whose reset gate acts after the candidate's product: one product a step instead of two in a row.

This is the form that cuDNN, torch and Keras's default compute. The recurrent weights are the kernel and the bias of its
product that the candidate's reset gate acts on; those of the two gates are in `z`, a step's input product with its
bias. Types are as in cells.py.
"""

import jax.numpy as jnp
from jax import Array
from jax.nn import sigmoid

from hotloop.layers import product
from hotloop.layers.cells import logistic
from hotloop.layers.product import Turned, wide
from hotloop.layers.recurrence import Cell, Factors, Kernels, State


def _zero(z: Array) -> State:
    return (jnp.zeros((z.shape[0], z.shape[1] // 3), z.dtype),)


def _step(z: Array, kernels: Kernels, state: State) -> tuple[State, Array]:
    (h,), (kernel, bias) = state, kernels
    assert bias is not None
    gates = [2 * h.shape[1]]
    products = jnp.zeros(z.shape, wide(z.dtype)) if kernel is None else product.forward(h, kernel)
    (z_gates, z_candidate), (of_gates, of_candidate) = jnp.split(z, gates, 1), jnp.split(products, gates, 1)
    gate_sums, of_candidate = z_gates + of_gates, of_candidate + bias
    reset, update = jnp.split(logistic(gate_sums), 2, 1)
    candidate_sum = z_candidate + reset * of_candidate
    h = (update * h + (1 - update) * jnp.tanh(candidate_sum)).astype(h.dtype)
    return (h,), jnp.concatenate([gate_sums, candidate_sum, of_candidate], 1)


def _factors(sums: Array, states: State) -> Factors:
    (h,) = states
    reset, update, candidate, of_candidate = jnp.split(sums.astype(wide(sums.dtype)), 4, 2)
    reset, update, candidate = sigmoid(reset), sigmoid(update), jnp.tanh(candidate)
    by_candidate = (1 - update) * (1 - candidate * candidate)
    by_reset = by_candidate * of_candidate * reset * (1 - reset)
    return reset, update, by_reset, (h - candidate) * update * (1 - update), by_candidate


def _back(kernels: tuple[Turned, ...], factors: Factors, d_state: State) -> tuple[Array, State]:
    reset, update, by_reset, by_update, by_candidate = factors
    (dh,) = d_state
    d_gates, d_candidate = jnp.concatenate([dh * by_reset, dh * by_update], 1), dh * by_candidate
    before = dh * update + kernels[0](jnp.concatenate([d_gates, d_candidate * reset], 1))
    return jnp.concatenate([d_gates, d_candidate], 1), (before,)


def _weights(factors: Factors, states: State, dz: Array) -> tuple[Array, Array]:
    d_gates, d_candidate = jnp.split(dz, [2 * states[0].shape[2]], 2)
    d_of_candidate = d_candidate * factors[0]
    d_products = jnp.concatenate([d_gates, d_of_candidate.astype(dz.dtype)], 2)
    return product.kernel_gradient(states[0], d_products), d_of_candidate.sum((0, 1))


GRU_RESET_AFTER = Cell(tuple, _zero, _step, _factors, _back, _weights)
