"""A recurrence over time with a backward pass of its own: the loop that the fused recurrent layers share.

Autodiff through `lax.scan` adds up the weight gradients and repeats the activations inside the backward loop. Here
everything that does not depend on the step after (activations and their slopes) is worked out for all steps at once
before that loop, and the weight gradients are one large product over all steps after it. A `Cell` brings the formulas.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from hotloop.layers.dense import TransposedProduct, prepare_transposed, wide
from hotloop.layers.paths import Operation

SHORT = 8


def unroll_for(timesteps: int, platform: str) -> int:
    """Steps of a recurrence that are written out in one turn of its loop (measured: docs/layers.md)."""
    if timesteps <= SHORT:
        return timesteps
    return 1 if platform == "cpu" else 5


State = tuple[Array, ...]
Kernels = tuple[Array | None, ...]
Factors = tuple[Array, ...]


class Cell(NamedTuple):
    """The formulas of one kind of cell; `h`, the first entry of a state, is also the output.

    `kernels(recurrent)`: the recurrent weights (an array, or several) cut as the step uses them, kernels [H, O] first,
    a bias after them. `zero(z)`: the state before the first step, for one step's z. `step(z, kernels, state)`: the next
    state and the gate sums; None in a kernel's place means a zero state, whose product is left out. `factors(sums,
    states)`: from the sums of all steps and the states before each, whatever `back` and `weights` multiply with.
    `back(kernels, factors, d_state)`: one step's gradient of z and of the state before it, the kernels turned and
    without the bias. `weights(factors, states, dz)`: the recurrent weights' gradient.
    """

    kernels: Callable[[Any], tuple[Array, ...]]
    zero: Callable[[Array], State]
    step: Callable[[Array, Kernels, State], tuple[State, Array]]
    factors: Callable[[Array, State], Factors]
    back: Callable[[tuple[TransposedProduct, ...], Factors, State], tuple[Array, State]]
    weights: Callable[[Factors, State, Array], Any]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recur(cell: Cell, z_TBG: Array, recurrent: Any, state: State | None) -> tuple[Array, State]:
    """All outputs [T, B, H] and the last state, for input sums `z` that are known before; no state means zero."""
    (outputs, *_), last, _ = _run(z_TBG, recurrent, state, cell=cell)
    return outputs, last


def _remember(cell: Cell, z: Any, recurrent: Any, state: Any) -> tuple[tuple[Array, State], Any]:
    z, recurrent, state = jax.tree.map(lambda primal: primal.value, (z, recurrent, state), is_leaf=_is_primal)
    states, last, sums = _run(z, recurrent, state, cell=cell)
    return (states[0], last), (recurrent, state, states, sums)


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, CustomVJPPrimal)


def _backward(cell: Cell, saved: Any, gradients: tuple[Any, Any]) -> tuple[Array, Any, State | None]:
    recurrent, state, states, sums = saved
    d_outputs, d_last = gradients
    start = tuple(jnp.zeros_like(part[0]) for part in states) if state is None else state
    before = tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(start, states, strict=True))
    factors = cell.factors(sums, before)
    if isinstance(d_outputs, SymbolicZero):  # only the last state was used: nothing comes in at each step
        d_outputs = None
    d_last = tuple(jnp.zeros(d.shape) if isinstance(d, SymbolicZero) else d for d in d_last)
    d_last = tuple(d.astype(wide(sums.dtype)) for d in d_last)
    dz, d_state = _run_back(d_outputs, recurrent, factors, d_last, cell=cell)
    d_recurrent = jax.tree.map(
        lambda d, part: d.astype(part.dtype), cell.weights(factors, before, dz), recurrent
    )
    d_start = tuple(d.astype(part.dtype) for d, part in zip(d_state, start, strict=True))
    return dz, d_recurrent, None if state is None else d_start


recur.defvjp(_remember, _backward, symbolic_zeros=True)


def _forward_loop(z_TBG: Array, recurrent: Any, state: State | None, *, cell: Cell, platform: str) -> Any:
    """Every state, the last one, and the gate sums (which cost nothing where nobody reads them)."""
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


def _backward_loop(
    d_outputs: Array | None, recurrent: Any, factors: Factors, d_last: State, *, cell: Cell, platform: str
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


_run = Operation("recurrence", partial(_forward_loop, platform="gpu"))
_run.register("cpu loop", "cpu", partial(_forward_loop, platform="cpu"))
_run_back = Operation("recurrence backwards", partial(_backward_loop, platform="gpu"))
_run_back.register("cpu loop", "cpu", partial(_backward_loop, platform="cpu"))
