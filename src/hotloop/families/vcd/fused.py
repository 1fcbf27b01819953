"""One HMC iteration as one GPU kernel: leapfrogs, energies and decision, sixteen chains to a multiprocessor.

On a GPU the plain sampler is a queue of small products, each launched, filled and emptied for a microsecond of
work. Here a tile of sixteen chains stays in registers from the first kick to the decision, and the weights
stream past it from the L2 cache, rounded to float16 (ten bits of mantissa, as many as the TF32 that XLA uses
for float32 products there); sums, positions, momenta and energies are float32. The output layer is read once
for both directions: a block of pixels gives its logits, its share of the likelihood, and at once its share of
the gradient. The mathematics is `mcmc.hmc.transition` on `density.value_and_gradient`, which stays the
reference and the way on every other device. It knows two hidden layers, not the objective.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.engine.where import platform
from hotloop.families.vcd.config import Model
from hotloop.families.vcd.density import LOG_TWO_PI
from hotloop.families.vcd.networks import PIXELS
from hotloop.mcmc import hmc

ROWS = 16
"""Chains of a tile: the least that a matrix unit takes."""
PIXEL_BLOCK, HIDDEN_BLOCK = 64, 64
WIDEST = 256
"""Hidden units that fit; a layer's activations lie in registers."""
LARGEST_BATCH = 2112
"""Beyond 132 tiles a second round begins, and the compiler's large products win."""
NEVER = -1e4
"""Logit of a pixel that is not there: likelihood 0, gradient 0."""


def fits(model: Model) -> bool:
    """Whether this kernel is written for the networks."""
    return len(model.hidden) == 2 and max(model.hidden) <= WIDEST and model.z_dim <= 64


def wanted(model: Model) -> bool:
    """Whether to use it here: as asked, or on a GPU for the batches that it is faster for."""
    if model.sampler == "auto":
        return platform() == "gpu" and fits(model) and model.micro_batch_size <= LARGEST_BATCH
    return model.sampler == "fused"


class Weights(NamedTuple):
    """The decoder, padded to whole blocks and rounded to float16; biases float32."""

    w1: Array
    b1: Array
    w2: Array
    b2: Array
    w3: Array
    b3: Array


def padded(decoder: Any) -> Weights:
    """Units that are not there have weights and biases of zero, pixels that are not there a logit of NEVER."""
    latent = max(ROWS, pl.next_power_of_2(decoder[0]["w"].shape[0]))
    pixels = -(-PIXELS // PIXEL_BLOCK) * PIXEL_BLOCK
    sizes = [(latent, WIDEST), (WIDEST, WIDEST), (WIDEST, pixels)]
    parts = []
    for layer, size in zip(decoder, sizes, strict=True):
        fill = NEVER if size[1] == pixels else 0.0
        parts += [
            _fill(layer["w"].astype(jnp.float16), size),
            _fill(layer["b"].astype(jnp.float32), size[1:], fill),
        ]
    return Weights(*parts)


def _fill(array: Array, shape: tuple[int, ...], value: float = 0.0) -> Array:
    widths = [(0, new - old) for old, new in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, widths, constant_values=value)


def transition(
    decoder: Any, images: Array, leapfrog_steps: int, *, interpret: bool = False
) -> hmc.Transition:
    """`hmc.transition` for this decoder and these images, in one kernel."""
    weights = padded(decoder)
    rows = -(-len(images) // ROWS) * ROWS
    x = _fill(images.astype(jnp.uint8), (rows, weights.b3.shape[0]))
    constant = 0.5 * decoder[0]["w"].shape[0] * LOG_TWO_PI
    run = partial(_call, weights, x, leapfrog_steps, constant, interpret)

    def step(state: hmc.State, momentum: Array, uniform: Array, step_size: Any) -> tuple[hmc.State, hmc.Info]:
        count, latent = state.position.shape
        wide = rows, weights.w1.shape[0]
        position, log_density, gradient, change = run(
            _fill(state.position, wide),
            _fill(state.log_density, (rows,)),
            _fill(state.gradient, wide),
            _fill(momentum, wide),
            _fill(uniform, (rows,)),
            jnp.reshape(step_size, (1,)).astype(jnp.float32),
        )
        change = change[:count]
        acceptance = jnp.where(jnp.isfinite(change), jnp.exp(jnp.minimum(-change, 0.0)), 0.0)
        info = hmc.Info(acceptance, uniform < acceptance, change)
        kept = hmc.State(position[:count, :latent], log_density[:count], gradient[:count, :latent])
        return kept, info

    return step


def _call(
    weights: Weights, x: Array, steps: int, constant: float, interpret: bool, *chains: Array
) -> list[Array]:
    rows, latent = chains[0].shape
    tile = pl.BlockSpec((ROWS, latent), lambda i: (i, 0))
    line = pl.BlockSpec((ROWS,), lambda i: (i,))
    whole = [pl.BlockSpec(w.shape, lambda i, n=w.ndim: (0,) * n) for w in weights]
    matrix, vector = (jax.typeof(chains[i]) for i in (0, 1))
    results: list[Array] = pl.pallas_call(
        partial(_kernel, steps, constant),
        grid=(rows // ROWS,),
        in_specs=[
            tile,
            line,
            tile,
            tile,
            line,
            pl.BlockSpec((1,), lambda i: (0,)),
            pl.BlockSpec((ROWS, x.shape[1]), lambda i: (i, 0)),
            *whole,
        ],
        out_specs=[tile, line, tile, line],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (matrix, vector, matrix, vector)],  # type: ignore[no-untyped-call]
        interpret=interpret,
        compiler_params=None if interpret else _compiler(),
        name="leapfrogs",
    )(*chains, x, *weights)
    return results


def _compiler() -> Any:
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=4, num_stages=3)


def _kernel(
    steps: int,
    constant: float,
    position: Any,
    density: Any,
    gradient: Any,
    momentum: Any,
    uniform: Any,
    size: Any,
    x: Any,
    w1: Any,
    b1: Any,
    w2: Any,
    b2: Any,
    w3: Any,
    b3: Any,
    *out: Any,
) -> None:
    weights = Weights(w1, b1, w2, b2, w3, b3)
    e = size[0]
    q0, p0, g0, d0 = position[...], momentum[...], gradient[...], density[...]

    def drift_and_kick(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        q, p = carry
        q = q + e * p
        return q, p + e * _gradient(weights, x, q)

    q, p = lax.fori_loop(0, steps - 1, drift_and_kick, (q0, p0 + 0.5 * e * g0))
    q = q + e * p
    d, g = _value_and_gradient(weights, x, q)
    d = d - constant
    p = p + 0.5 * e * g
    change = 0.5 * ((p * p).sum(1) - (p0 * p0).sum(1)) - (d - d0)
    moved = uniform[...] < jnp.exp(jnp.minimum(-change, 0.0))  # false for nan
    moved = moved & (change < jnp.inf) & (change > -jnp.inf)
    row = moved[:, None]
    results = jnp.where(row, q, q0), jnp.where(moved, d, d0), jnp.where(row, g, g0), change
    for ref, value in zip(out, results, strict=True):
        ref[...] = value


def _hidden(weights: Weights, q: Array) -> Array:
    """The second hidden layer; the first is made block by block and never kept."""
    half = q.astype(jnp.float16)

    def block(k: Any, total: Array) -> Array:
        at = pl.ds(k * HIDDEN_BLOCK, HIDDEN_BLOCK)
        first = jnp.maximum(_dot(half, weights.w1[:, at]) + weights.b1[at][None, :], 0.0)
        return total + _dot(first.astype(jnp.float16), weights.w2[at, :])

    zero = jnp.zeros((ROWS, WIDEST), jnp.float32)
    total = lax.fori_loop(0, WIDEST // HIDDEN_BLOCK, block, zero)
    return jnp.maximum(total + weights.b2[...][None, :], 0.0)


def _into_latents(weights: Weights, q: Array, hidden: Array, back: Array) -> Array:
    """The gradient at the second hidden layer taken back to q, with the prior's."""
    half = q.astype(jnp.float16)
    back = jnp.where(hidden > 0, back, 0.0).astype(jnp.float16)

    def block(k: Any, total: Array) -> Array:
        at = pl.ds(k * HIDDEN_BLOCK, HIDDEN_BLOCK)
        w1 = weights.w1[:, at]
        first = _dot(half, w1) + weights.b1[at][None, :]
        inner = jnp.where(first > 0, _dot_transposed(back, weights.w2[at, :]), 0.0)
        return total + _dot_transposed(inner.astype(jnp.float16), w1)

    total: Array = lax.fori_loop(0, WIDEST // HIDDEN_BLOCK, block, jnp.zeros(q.shape, jnp.float32))
    return total - q


def _gradient(weights: Weights, x: Any, q: Array) -> Array:
    hidden = _hidden(weights, q)
    half = hidden.astype(jnp.float16)

    def block(k: Any, back: Array) -> Array:
        at = pl.ds(k * PIXEL_BLOCK, PIXEL_BLOCK)
        w = weights.w3[:, at]
        logits = _dot(half, w) + weights.b3[at][None, :]
        error = x[:, at].astype(jnp.float32) - lax.logistic(logits)
        return back + _dot_transposed(error.astype(jnp.float16), w)

    back = lax.fori_loop(0, x.shape[1] // PIXEL_BLOCK, block, jnp.zeros((ROWS, WIDEST), jnp.float32))
    return _into_latents(weights, q, hidden, back)


def _value_and_gradient(weights: Weights, x: Any, q: Array) -> tuple[Array, Array]:
    hidden = _hidden(weights, q)
    half = hidden.astype(jnp.float16)

    def block(k: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        value, back = carry
        at = pl.ds(k * PIXEL_BLOCK, PIXEL_BLOCK)
        w = weights.w3[:, at]
        logits = _dot(half, w) + weights.b3[at][None, :]
        ones = x[:, at].astype(jnp.float32)
        softplus = jnp.maximum(logits, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(logits)))
        value = value + (ones * logits - softplus).sum(1)
        return value, back + _dot_transposed((ones - lax.logistic(logits)).astype(jnp.float16), w)

    start = jnp.zeros((ROWS,), jnp.float32), jnp.zeros((ROWS, WIDEST), jnp.float32)
    value, back = lax.fori_loop(0, x.shape[1] // PIXEL_BLOCK, block, start)
    return value - 0.5 * (q * q).sum(1), _into_latents(weights, q, hidden, back)


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_transposed(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
