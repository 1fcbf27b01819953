"""A tile of chains through the decoder and back, on one block of a Hopper card: weights in shared memory, activations
in registers.

Weights and activations are rounded to float16, sums are float32. Biases are weights of units that are always one.
It knows nothing of chains, clusters and iterations: those are `hopper_kernel.py`'s.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.layers.persistent_cells import logistic
from hotloop.layers.persistent_chain import plgpu
from hotloop.layers.persistent_tiles import ROWS

HALF = jnp.float16
STEP = 16  # of the matrix unit along a sum: sizes are filled up to its multiples
LARGE = 2.0**15  # units below 3e-5, which float16 loses in sums around one, have a part of their slope


class Decoder:
    def __init__(self, weights: Sequence[Any], hidden: tuple[int, int], pieces: int, again: int):
        """The references of the three layers' weights; a hidden layer is worked out in so many pieces, and for the way
        back the first one again in so many of each."""
        self.weights, self.again = weights, again
        self.pieces = [_cut_up(units, pieces) for units in hidden]

    def differentiate(
        self, position: Array, read_images: Callable[[], Array], has_density: bool
    ) -> tuple[Array, Any]:
        """The gradient in the latents of the log likelihood of these pixels, and the likelihood if asked for.

        Images are read where they are needed: until then they would take registers."""
        w1, w2, w3 = self.weights
        one, two = self.pieces
        q = position.astype(HALF)

        def first(piece: Any) -> Array:
            return jnp.maximum(multiply([(q, w1.at[:, piece])]), 0.0).astype(HALF)

        h1 = [first(piece) for piece in one]
        h2 = []
        for piece in two:
            sums = multiply([(part, w2.at[rows, piece]) for part, rows in zip(h1, one, strict=True)])
            h2.append(jnp.maximum(sums, 0.0).astype(HALF))
        logits = multiply([(part, w3.at[rows]) for part, rows in zip(h2, two, strict=True)])
        x = read_images()
        density = (x * logits - _softplus(logits)).sum(1) if has_density else None
        error = (x - logistic(logits)).astype(HALF)
        back = []
        for piece, active in zip(two, h2, strict=True):
            back.append(_where_active(active, multiply([(error, _turned(w3.at[piece]))])))
        pairs = []
        for piece in one:
            sums = multiply(
                [(part, _turned(w2.at[piece, columns])) for part, columns in zip(back, two, strict=True)]
            )
            for small in _cut_up(piece.size, self.again):
                place = pl.ds(piece.start + small.start, small.size)
                passed = sums[:, small.start : small.start + small.size]
                pairs.append((_where_active(first(place), passed), _turned(w1.at[:, place])))
        return multiply(pairs), density


def _cut_up(units: int, pieces: int) -> list[Any]:
    """Slices of whole steps, the first ones the larger."""
    steps = units // STEP
    ends = [-(-steps * n // pieces) * STEP for n in range(pieces + 1)]
    return [pl.ds(start, end - start) for start, end in pairwise(ends)]


def _turned(weights: Any) -> Any:
    return weights.transpose((1, 0))


def multiply(pairs: Sequence[tuple[Array, Any]]) -> Array:
    """The sum of the products of rows in registers with weights in shared memory."""

    def accumulate(sums: Any) -> Any:
        for rows, weights in pairs:
            plgpu.wgmma(sums, rows, weights)
        return sums[...]

    total: Array = pl.run_scoped(accumulate, plgpu.ACC((ROWS, pairs[0][1].shape[1]), jnp.float32))
    # Without it the compiler may move an instruction on the sums to before the wait for them, and to be right after all
    # would have the matrix unit wait after each of its instructions.
    settled: Array = lax.optimization_barrier(total)  # type: ignore[no-untyped-call]
    return settled


def _where_active(units: Array, sums: Array) -> Array:
    """The sums of units above zero, and zero for the others, which are zero. By arithmetic: each comparison would
    take a register."""
    is_active = jnp.minimum(units * LARGE, 1.0)
    return sums.astype(HALF) * is_active


def _softplus(logits: Array) -> Array:
    return jnp.maximum(logits, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(logits)))
