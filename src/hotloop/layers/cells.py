"""The formulas of the tanh RNN, the GRU and the LSTM, one step forward and one step back.

`z` is a step's input product with its bias. Products are summed and gates are computed in float32 (float64 for
float64 inputs); `h` is rounded to the type of the inputs after each step, because the next product reads it,
while the LSTM's `c`, which only ever adds up, stays wide. The loop over time is in recurrence.py.
"""

import jax.numpy as jnp
from jax import Array
from jax.nn import sigmoid

from hotloop.layers.dense import TransposedProduct, kernel_gradient, matmul, wide
from hotloop.layers.paths import materialise_on_cpu
from hotloop.layers.recurrence import Cell, Factors, Kernels, State


def _plus(z: Array, h: Array, kernel: Array | None) -> Array:
    sums: Array = z.astype(wide(z.dtype)) if kernel is None else z + matmul(h, kernel)
    return sums


def _zero(z: Array, gates: int) -> Array:
    return jnp.zeros((z.shape[0], z.shape[1] // gates), z.dtype)


def logistic(sums: Array) -> Array:
    """All gates in one pass. On the CPU it is written out: fused into the slices that read it, XLA takes 3 us more."""
    gates: Array = materialise_on_cpu(sigmoid(sums))
    return gates


def _slope(gate: Array) -> Array:
    """The derivative of the logistic function at the value it gave."""
    return gate * (1 - gate)


def _rnn_step(z: Array, kernels: Kernels, state: State) -> tuple[State, Array]:
    (kernel,) = kernels
    sums = _plus(z, state[0], kernel)
    return (jnp.tanh(sums).astype(z.dtype),), sums


def _rnn_factors(sums: Array, states: State) -> Factors:
    h = jnp.tanh(sums.astype(wide(sums.dtype)))
    return (1 - h * h,)


def _rnn_back(
    kernels: tuple[TransposedProduct, ...], factors: Factors, d_state: State
) -> tuple[Array, State]:
    dz = d_state[0] * factors[0]
    return dz, (kernels[0](dz),)


def _whole_gradient(factors: Factors, states: State, dz: Array) -> Array:
    gradient: Array = kernel_gradient(states[0], dz)
    return gradient


def _gru_kernels(recurrent: Array) -> tuple[Array, ...]:
    """Gates and candidate apart; on the CPU cut once and written out (20 us against 25 for T5 H128)."""
    cut = jnp.split(recurrent, [2 * recurrent.shape[0]], 1)
    return tuple(materialise_on_cpu(cut))


def _gru_step(z: Array, kernels: Kernels, state: State) -> tuple[State, Array]:
    (h,) = state
    of_gates, of_candidate = kernels
    z_gates, z_candidate = jnp.split(z, [2 * h.shape[1]], 1)
    gate_sums = _plus(z_gates, h, of_gates)
    reset, update = jnp.split(logistic(gate_sums), 2, 1)
    candidate_sum = _plus(z_candidate, (reset * h).astype(h.dtype), of_candidate)
    h = (update * h + (1 - update) * jnp.tanh(candidate_sum)).astype(h.dtype)
    return (h,), jnp.concatenate([gate_sums, candidate_sum], 1)


def _gru_factors(sums: Array, states: State) -> Factors:
    (h,) = states
    reset, update, candidate = jnp.split(sums.astype(wide(sums.dtype)), 3, 2)
    reset, update, candidate = sigmoid(reset), sigmoid(update), jnp.tanh(candidate)
    by_candidate = (1 - update) * (1 - candidate * candidate)
    return reset, update, h * _slope(reset), (h - candidate) * _slope(update), by_candidate


def _gru_back(
    kernels: tuple[TransposedProduct, ...], factors: Factors, d_state: State
) -> tuple[Array, State]:
    reset, update, by_reset, by_update, by_candidate = factors
    (dh,) = d_state
    of_gates, of_candidate = kernels
    d_candidate = dh * by_candidate
    d_reset_h = of_candidate(d_candidate)
    d_gates = jnp.concatenate([d_reset_h * by_reset, dh * by_update], 1)
    before = dh * update + d_reset_h * reset + of_gates(d_gates)
    return jnp.concatenate([d_gates, d_candidate], 1), (before,)


def _gru_gradient(factors: Factors, states: State, dz: Array) -> Array:
    reset, (h,) = factors[0], states
    d_gates, d_candidate = jnp.split(dz, [2 * h.shape[2]], 2)
    of_gates = kernel_gradient(h, d_gates)
    of_candidate = kernel_gradient((reset * h).astype(h.dtype), d_candidate)
    return jnp.concatenate([of_gates, of_candidate], 1)


def _lstm_step(z: Array, kernels: Kernels, state: State) -> tuple[State, Array]:
    h, c = state
    (kernel,) = kernels
    sums = _plus(z, h, kernel)
    i, f, _, o = jnp.split(logistic(sums), 4, 1)
    c = f * c + i * jnp.tanh(jnp.split(sums, 4, 1)[2])
    return ((o * jnp.tanh(c)).astype(h.dtype), c), sums


def _lstm_factors(sums: Array, states: State) -> Factors:
    c = states[1]
    i, f, g, o = jnp.split(sums.astype(wide(sums.dtype)), 4, 2)
    i, f, g, o = sigmoid(i), sigmoid(f), jnp.tanh(g), sigmoid(o)
    tanh_c = jnp.tanh(f * c + i * g)
    to_c = o * (1 - tanh_c * tanh_c)
    return f, to_c, g * _slope(i), c * _slope(f), i * (1 - g * g), tanh_c * _slope(o)


def _lstm_back(
    kernels: tuple[TransposedProduct, ...], factors: Factors, d_state: State
) -> tuple[Array, State]:
    f, to_c, by_i, by_f, by_g, by_o = factors
    dh, dc = d_state
    dc = dc + dh * to_c
    dz = jnp.concatenate([dc * by_i, dc * by_f, dc * by_g, dh * by_o], 1)
    return dz, (kernels[0](dz), dc * f)


# The GRU whose reset gate acts after the candidate's product, as in cuDNN, torch and Keras: one product a step instead
# of two in a row. Its recurrent weights are the kernel and the bias of its product that the candidate's reset
# gate acts on; those of the two gates are in `z`.


def _reset_after_step(z: Array, kernels: Kernels, state: State) -> tuple[State, Array]:
    (h,), (kernel, bias) = state, kernels
    assert bias is not None
    gates = [2 * h.shape[1]]
    products = jnp.zeros(z.shape, wide(z.dtype)) if kernel is None else matmul(h, kernel)
    (z_gates, z_candidate), (of_gates, of_candidate) = jnp.split(z, gates, 1), jnp.split(products, gates, 1)
    gate_sums, of_candidate = z_gates + of_gates, of_candidate + bias
    reset, update = jnp.split(logistic(gate_sums), 2, 1)
    candidate_sum = z_candidate + reset * of_candidate
    h = (update * h + (1 - update) * jnp.tanh(candidate_sum)).astype(h.dtype)
    return (h,), jnp.concatenate([gate_sums, candidate_sum, of_candidate], 1)


def _reset_after_factors(sums: Array, states: State) -> Factors:
    (h,) = states
    reset, update, candidate, of_candidate = jnp.split(sums.astype(wide(sums.dtype)), 4, 2)
    reset, update, candidate = sigmoid(reset), sigmoid(update), jnp.tanh(candidate)
    by_candidate = (1 - update) * (1 - candidate * candidate)
    by_reset = by_candidate * of_candidate * reset * (1 - reset)
    return reset, update, by_reset, (h - candidate) * update * (1 - update), by_candidate


def _reset_after_back(
    kernels: tuple[TransposedProduct, ...], factors: Factors, d_state: State
) -> tuple[Array, State]:
    reset, update, by_reset, by_update, by_candidate = factors
    (dh,) = d_state
    d_gates, d_candidate = jnp.concatenate([dh * by_reset, dh * by_update], 1), dh * by_candidate
    before = dh * update + kernels[0](jnp.concatenate([d_gates, d_candidate * reset], 1))
    return jnp.concatenate([d_gates, d_candidate], 1), (before,)


def _reset_after_gradient(factors: Factors, states: State, dz: Array) -> tuple[Array, Array]:
    d_gates, d_candidate = jnp.split(dz, [2 * states[0].shape[2]], 2)
    d_of_candidate = d_candidate * factors[0]
    d_products = jnp.concatenate([d_gates, d_of_candidate.astype(dz.dtype)], 2)
    return kernel_gradient(states[0], d_products), d_of_candidate.sum((0, 1))


def _one(recurrent: Array) -> tuple[Array, ...]:
    return (recurrent,)


RNN = Cell(_one, lambda z: (_zero(z, 1),), _rnn_step, _rnn_factors, _rnn_back, _whole_gradient)
GRU = Cell(_gru_kernels, lambda z: (_zero(z, 3),), _gru_step, _gru_factors, _gru_back, _gru_gradient)
GRU_RESET_AFTER = Cell(
    tuple,
    lambda z: (_zero(z, 3),),
    _reset_after_step,
    _reset_after_factors,
    _reset_after_back,
    _reset_after_gradient,
)
LSTM = Cell(
    _one,
    lambda z: (_zero(z, 4), _zero(z, 4).astype(wide(z.dtype))),
    _lstm_step,
    _lstm_factors,
    _lstm_back,
    _whole_gradient,
)
