"""A recurrence over time with a backward pass of its own, and the formulas of the tanh RNN, the GRUs and the LSTM.

Autodiff through `lax.scan` adds up the weight gradients and repeats the activations inside the backward loop. Here
everything that does not depend on the step after (activations and their slopes) is worked out for all steps at once
before that loop, and the weight gradients are one large product over all steps after it. Products are summed and gates
are computed in float32 (float64 for float64 inputs); `h` is rounded to the type of the inputs after each step, because
the next product reads it, while the LSTM's `c`, which only ever adds up, stays wide.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.nn import sigmoid

from hotloop.layers import native_recurrent, persistent
from hotloop.layers.dense import (
    TransposedProduct,
    input_gradient,
    kernel_gradient,
    matmul,
    prepare_transposed,
    product,
    wide,
)
from hotloop.layers.paths import CardKernel, Operation, Rival, materialise_on_cpu

SHORT = 8


def unroll_for(timesteps: int, platform: str) -> int:
    """Steps of a recurrence that are written out in one turn of its loop (measured: docs/layers.md)."""
    if timesteps <= SHORT:
        return timesteps
    return 1 if platform == "cpu" else 5


State = tuple[Array, ...]
Kernels = tuple[Array | None, ...]
Factors = tuple[Array, ...]
Turned = tuple[TransposedProduct, ...]


class Cell(NamedTuple):
    """The formulas of one kind of cell; `h`, the first entry of a state, is also the output.

    `name`: in `CELLS`. `kernels(recurrent)`: the recurrent weights (an array, or several) cut as the step uses them,
    kernels [H, O] first, a bias after them. `zero(z)`: the state before the first step, for one step's z. `step(z,
    kernels, state)`: the next state and the gate sums; None in a kernel's place means a zero state, whose product is
    left out. `factors(sums, states)`: from the sums of all steps and the states before each, whatever `back` and
    `weights` multiply with. `back(kernels, factors, d_state)`: one step's gradient of z and of the state before it, the
    kernels turned and without the bias. `weights(factors, states, dz)`: the recurrent weights' gradient.
    """

    name: str
    kernels: Callable[[Any], tuple[Array, ...]]
    zero: Callable[[Array], State]
    step: Callable[[Array, Kernels, State], tuple[State, Array]]
    factors: Callable[[Array, State], Factors]
    back: Callable[[Turned, Factors, State], tuple[Array, State]]
    weights: Callable[[Factors, State, Array], Any]


class Inputs(NamedTuple):
    """What the input sums are made of: x kernel, and biases that are added one after the other."""

    x_TBI: Array
    kernel: Array
    biases: tuple[Array, ...]


def recur_inputs(cell: Cell, inputs: Inputs, recurrent: Any, state: State | None) -> tuple[Array, State]:
    """`recur` for these inputs' sums. `hotloop-native` makes them itself, of a few steps at a time: those of all steps
    at once would leave the cache before they are read. So do the kernels for a GPU."""
    arrays, form = jax.tree.flatten((inputs, recurrent, state))
    takes_inputs = _infer_inputs.may_be_persistent(*arrays, form=form, cell=cell.name)
    if takes_inputs or _infer_inputs.may_be_native(*arrays):
        outputs, last = _recur_inputs(cell, inputs, recurrent, state)
        return outputs, last
    outputs, last = recur(cell, input_sums(inputs), recurrent, state)
    return outputs, last


def input_sums(inputs: Inputs) -> Array:
    """What is known of the gate sums before the loop, in the inputs' type: half the traffic for 16 bits."""
    return sum(inputs.biases, product(inputs.x_TBI, inputs.kernel)).astype(inputs.x_TBI.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recur(cell: Cell, z_TBG: Array, recurrent: Any, state: State | None) -> tuple[Array, State]:
    """All outputs [T, B, H] and the last state, for input sums `z` that are known before; no state means zero."""
    outputs, last = _call(_infer, (z_TBG, recurrent, state), cell)
    return outputs, last


def _remember(cell: Cell, *operands: Any) -> tuple[tuple[Array, State], Any]:
    z, recurrent, state = _values(operands)
    states, last, sums = _call(_run, (z, recurrent, state), cell)
    return (states[0], last), (recurrent, state, states, sums)


def _backward(cell: Cell, saved: Any, gradients: tuple[Any, Any]) -> tuple[Array, Any, State | None]:
    recurrent, state, states, sums = saved
    d_outputs, d_last = _exact(gradients, wide(sums.dtype))
    dz, d_recurrent, d_state = _call(_run_back, (d_outputs, recurrent, state, states, sums, d_last), cell)
    return dz, d_recurrent, d_state


def _values(operands: Any) -> Any:
    return jax.tree.map(
        lambda primal: primal.value, operands, is_leaf=lambda leaf: isinstance(leaf, CustomVJPPrimal)
    )


def _exact(gradients: tuple[Any, Any], dtype: Any) -> tuple[Array | None, State]:
    """The outputs' gradient, None where only the last state was used and nothing comes in at each step; the state's."""
    d_outputs, d_last = gradients
    d_last = tuple(jnp.zeros(d.shape) if isinstance(d, SymbolicZero) else d for d in d_last)
    return None if isinstance(d_outputs, SymbolicZero) else d_outputs, tuple(d.astype(dtype) for d in d_last)


recur.defvjp(_remember, _backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recur_inputs(cell: Cell, inputs: Inputs, recurrent: Any, state: State | None) -> tuple[Array, State]:
    outputs, last = _call(_infer_inputs, (inputs, recurrent, state), cell)
    return outputs, last


def _remember_inputs(cell: Cell, *operands: Any) -> tuple[tuple[Array, State], Any]:
    inputs, recurrent, state = _values(operands)
    states, last, sums = _call(_run_inputs, (inputs, recurrent, state), cell)
    return (states[0], last), (inputs, recurrent, state, states, sums)


def _backward_inputs(cell: Cell, saved: Any, gradients: tuple[Any, Any]) -> tuple[Inputs, Any, State | None]:
    inputs, recurrent, state, states, sums = saved
    d_outputs, d_last = _exact(gradients, wide(sums.dtype))
    dz, d_kernel, d_bias, d_recurrent, d_state = _call(
        _run_inputs_back, (d_outputs, inputs.x_TBI, recurrent, state, states, sums, d_last), cell
    )
    x, kernel, biases = inputs
    d_inputs = Inputs(
        input_gradient(dz, kernel).astype(x.dtype),
        d_kernel.astype(kernel.dtype),
        tuple(d_bias.astype(bias.dtype) for bias in biases),
    )
    return d_inputs, d_recurrent, d_state


_recur_inputs.defvjp(_remember_inputs, _backward_inputs, symbolic_zeros=True)


def _call(operation: Operation, operands: Any, cell: Cell) -> Any:
    """Operations take arrays and settings: `form` says what the arrays are, None among them."""
    arrays, form = jax.tree.flatten(operands)
    return operation(*arrays, form=form, cell=cell.name)


def _infer_loop(*arrays: Array, form: Any, cell: str, platform: str) -> Any:
    """Every output and the last state."""
    (outputs, *_), last, _ = _forward_loop(*arrays, form=form, cell=cell, platform=platform)
    return outputs, last


def _forward_loop(*arrays: Array, form: Any, cell: str, platform: str) -> Any:
    """Every state, the last one, and the gate sums (which cost nothing where they are not read)."""
    z_TBG, recurrent, state = jax.tree.unflatten(form, arrays)
    return _run_forward(z_TBG, recurrent, state, CELLS[cell], platform)


def _run_forward(z_TBG: Array, recurrent: Any, state: State | None, cell: Cell, platform: str) -> Any:
    kernels = cell.kernels(recurrent)

    def step(state: State, z: Array) -> tuple[State, tuple[State, Array]]:
        state, sums = cell.step(z, kernels, state)
        return state, (state, sums.astype(z.dtype))

    unroll = unroll_for(z_TBG.shape[0], platform)
    if state is None and unroll == z_TBG.shape[0]:
        states, last, sums = _written_out(z_TBG, kernels, cell)
    else:
        last, (states, sums) = lax.scan(
            step, cell.zero(z_TBG[0]) if state is None else state, z_TBG, unroll=unroll
        )
    return states, last, sums


def _written_out(z_TBG: Array, kernels: tuple[Array, ...], cell: Cell) -> Any:
    """Without a loop, so that the first step can leave out its products with zeros."""
    biases_alone = tuple(None if kernel.ndim == 2 else kernel for kernel in kernels)
    steps = [cell.step(z_TBG[0], biases_alone, cell.zero(z_TBG[0]))]
    for z in z_TBG[1:]:
        steps.append(cell.step(z, kernels, steps[-1][0]))
    states, sums = jax.tree.map(lambda *parts: jnp.stack(parts), *steps)
    return states, steps[-1][0], sums.astype(z_TBG.dtype)


def _backward_loop(*arrays: Array, form: Any, cell: str, platform: str) -> Any:
    """The gradients of `z`, of the recurrent weights, and of the first state (None where there was none)."""
    d_outputs, recurrent, state, states, sums, d_last = jax.tree.unflatten(form, arrays)
    formulas = CELLS[cell]
    start = tuple(jnp.zeros_like(part[0]) for part in states) if state is None else state
    before = tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(start, states, strict=True))
    factors = formulas.factors(sums, before)
    dz, d_state = _run_backward(d_outputs, recurrent, factors, d_last, formulas, platform)
    d_recurrent = jax.tree.map(
        lambda d, part: d.astype(part.dtype), formulas.weights(factors, before, dz), recurrent
    )
    d_start = tuple(d.astype(part.dtype) for d, part in zip(d_state, start, strict=True))
    return dz, d_recurrent, None if state is None else d_start


def _run_backward(
    d_outputs: Array | None, recurrent: Any, factors: Factors, d_last: State, cell: Cell, platform: str
) -> Any:
    timesteps, batch, _ = factors[0].shape
    kernels = [kernel for kernel in cell.kernels(recurrent) if kernel.ndim == 2]
    back = partial(cell.back, tuple(prepare_transposed(kernel, batch, platform) for kernel in kernels))

    def step(d_state: State, now: tuple[Array | None, Factors]) -> tuple[State, Array]:
        dy, factors = now
        if dy is not None:
            d_state = (d_state[0] + dy, *d_state[1:])
        dz, d_state = back(factors, d_state)
        return d_state, dz.astype(kernels[0].dtype)

    unroll = unroll_for(timesteps, platform)
    d_state, dz = lax.scan(step, d_last, (d_outputs, factors), reverse=True, unroll=unroll)
    return dz, d_state


def _after_input_sums(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A forward loop that is given `Inputs` in place of their sums."""

    def run(*arrays: Array, form: Any, cell: str, platform: str) -> Any:
        inputs, recurrent, state = jax.tree.unflatten(form, arrays)
        operands, of_sums = jax.tree.flatten((input_sums(inputs), recurrent, state))
        return loop(*operands, form=of_sums, cell=cell, platform=platform)

    return run


def _inputs_backward_loop(*arrays: Array, form: Any, cell: str, platform: str) -> Any:
    """As `_backward_loop`, with the gradients of the input weights and the bias after that of the sums."""
    d_outputs, x, *rest = jax.tree.unflatten(form, arrays)
    operands, without_x = jax.tree.flatten((d_outputs, *rest))
    dz, d_recurrent, d_state = _backward_loop(*operands, form=without_x, cell=cell, platform=platform)
    return dz, kernel_gradient(x, dz), dz.sum((0, 1)), d_recurrent, d_state


def _operation(
    loop: Callable[..., Any], rival: Rival | None = None, card_kernel: CardKernel | None = None
) -> Operation:
    cpu = ("cpu loop", partial(loop, platform="cpu"))
    return Operation(partial(loop, platform="gpu"), rival, card_kernel, cpu=cpu)


_infer = _operation(_infer_loop)
_run = _operation(_forward_loop)
_run_back = _operation(_backward_loop)
_infer_inputs = _operation(_after_input_sums(_infer_loop), native_recurrent.INFER, persistent.INFER)
_run_inputs = _operation(_after_input_sums(_forward_loop), native_recurrent.FORWARD, persistent.FORWARD)
_run_inputs_back = _operation(_inputs_backward_loop, native_recurrent.BACKWARD, persistent.BACKWARD)


def _plus(z: Array, h: Array, kernel: Array | None) -> Array:
    sums: Array = z.astype(wide(z.dtype)) if kernel is None else z + matmul(h, kernel)
    return sums


def _zero(gates: int) -> Callable[[Array], State]:
    return lambda z: (jnp.zeros((z.shape[0], z.shape[1] // gates), z.dtype),)


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


def _rnn_back(kernels: Turned, factors: Factors, d_state: State) -> tuple[Array, State]:
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


def _gru_back(kernels: Turned, factors: Factors, d_state: State) -> tuple[Array, State]:
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


def _lstm_back(kernels: Turned, factors: Factors, d_state: State) -> tuple[Array, State]:
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


def _reset_after_back(kernels: Turned, factors: Factors, d_state: State) -> tuple[Array, State]:
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


RNN = Cell("rnn", lambda whole: (whole,), _zero(1), _rnn_step, _rnn_factors, _rnn_back, _whole_gradient)
GRU = Cell("gru", _gru_kernels, _zero(3), _gru_step, _gru_factors, _gru_back, _gru_gradient)
GRU_RESET_AFTER = Cell(
    "gru_reset_after",
    tuple,
    _zero(3),
    _reset_after_step,
    _reset_after_factors,
    _reset_after_back,
    _reset_after_gradient,
)
LSTM = Cell(
    "lstm",
    lambda whole: (whole,),
    lambda z: (*_zero(4)(z), *_zero(4)(z.astype(wide(z.dtype)))),
    _lstm_step,
    _lstm_factors,
    _lstm_back,
    _whole_gradient,
)
CELLS = {cell.name: cell for cell in (RNN, GRU, GRU_RESET_AFTER, LSTM)}
