"""Muon for many matrices at once: momentum, orthogonalised by Newton-Schulz steps as one batched product for all.

`optax.contrib.muon` makes a chain of small products for each matrix, one after the other; here matrices are padded with
zeros to a common size, which changes nothing about their singular vectors, and stacked. K. Jordan et al. (2024) have
the method; the coefficients are those of optax's default. Kernels can be brought back to a fixed norm now and then. It
knows no network.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TINY = 1e-7  # beside a norm that it may be divided by
Schedule = Callable[[Array], Array]


class MuonState(NamedTuple):
    updates: Array  # so far
    velocity: Any


def muon(
    rate: Schedule,
    *,
    momentum: float,
    steps: int,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    decay: float = 0.0,
    is_rescaled: Schedule | None = None,
    dtype: DTypeLike = jnp.float32,
) -> optax.GradientTransformation:
    """W becomes (s W - r O) (1 - r decay), O the orthogonalised Nesterov momentum of all axes but the last by the last.

    Where `is_rescaled` of the update's number holds, s brings the weights to a norm of the root of the last axis first,
    else it is 1. `dtype` is that of the products; what is kept between updates is of the gradients' type.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        velocity = jax.tree.map(lambda v, g: momentum * v + g, state.velocity, gradients)
        ahead, tree = jax.tree.flatten(jax.tree.map(lambda g, v: g + momentum * v, gradients, velocity))
        directions = jax.tree.unflatten(tree, orthogonalise(ahead, steps, coefficients, dtype))
        now = rate(state.updates)
        due = jnp.asarray(False if is_rescaled is None else is_rescaled(state.updates))

        def change(weight: Array, direction: Array) -> Array:
            scale = jnp.where(due, weight.shape[-1] ** 0.5 / (jnp.linalg.norm(weight.ravel()) + _TINY), 1)
            return (scale * weight - now * direction) * (1 - now * decay) - weight

        return jax.tree.map(change, params, directions), MuonState(state.updates + 1, velocity)

    return optax.GradientTransformation(init, update)


def orthogonalise(
    arrays: Sequence[Array],
    steps: int,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: DTypeLike = jnp.float32,
) -> list[Array]:
    """Each array, as a matrix of all axes but the last by the last, with its singular values brought near 1.

    Each begins with the Frobenius norm 1 and goes through X <- X (a + b A + c A^2), A = X'X. Sums are float32.
    """
    matrices = [array.reshape(-1, array.shape[-1]) for array in arrays]
    rows, columns = (max(matrix.shape[axis] for matrix in matrices) for axis in (0, 1))
    padded = [
        jnp.pad(matrix, ((0, rows - matrix.shape[0]), (0, columns - matrix.shape[1]))) for matrix in matrices
    ]
    stack = jnp.stack(padded).astype(jnp.float32)
    size = jnp.sqrt(jnp.square(stack).sum((1, 2), keepdims=True))
    stack, (a, b, c) = (stack / (size + _TINY)).astype(dtype), coefficients
    for _ in range(steps):
        square = _product(stack.mT, stack).astype(dtype)
        change = (b * square + c * _product(square, square)).astype(dtype)
        stack = (a * stack + _product(stack, change)).astype(dtype)
    return [
        stack[i, : matrix.shape[0], : matrix.shape[1]].reshape(arrays[i].shape).astype(arrays[i].dtype)
        for i, matrix in enumerate(matrices)
    ]


def _product(left: Array, right: Array) -> Array:
    """In float32 products of float32 values are whole: a GPU would round them to ten bits."""
    precision = "highest" if left.dtype == jnp.float32 else None
    return jnp.matmul(left, right, precision=precision, preferred_element_type=jnp.float32)
