"""A leapfrog as one GPU kernel: sixteen chains and a block of pixels to a multiprocessor.

On a GPU the plain sampler is a queue of small products, each launched, filled and emptied for a microsecond of
work. Here one kernel makes a whole leapfrog. Its grid is (tiles of sixteen chains) x (blocks of pixels): each
program kicks and drifts its chains, carries them through the hidden layers, makes the logits of its own pixels,
and takes their part of the gradient all the way back to the latents. That is allowed because the way back is
linear once the way forward is known, so the parts of all blocks simply add up, which the next kernel does in a
fixed order: no atomics, the same bits every time. Weights are rounded to float16 (ten bits of mantissa, as many
as the TF32 that XLA uses for float32 products there); sums, positions, momenta and energies are float32. The
mathematics is `mcmc.hmc.transition` on `density.value_and_gradient`, which stays the reference and the way on
every other device. It knows two hidden layers, not the objective.
"""

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
BLOCK = 64
"""Pixels of a block: 13 blocks and the 7 tiles of 100 chains keep 91 of 132 multiprocessors busy."""
WIDEST = 256
"""Hidden units that fit: a layer's weights lie in shared memory."""
LARGEST_BATCH = 1024
"""Beyond it the compiler's own large products fill the device (docs/vcd.md has the numbers)."""
NEVER = -1e4
"""Logit of a pixel that is not there: likelihood 0, gradient 0."""


def fits(model: Model) -> bool:
    """Whether the kernel is written for these networks."""
    return len(model.hidden) == 2 and max(model.hidden) <= WIDEST and model.z_dim <= 64


def wanted(model: Model) -> bool:
    """Whether to use it here: as asked, or on a GPU for the batches that it is faster for."""
    if model.sampler == "auto":
        return platform() == "gpu" and fits(model) and model.micro_batch_size <= LARGEST_BATCH
    return model.sampler == "fused"


class Weights(NamedTuple):
    """The decoder, padded to whole blocks and rounded to float16; biases float32."""

    w1: Any
    b1: Any
    w2: Any
    b2: Any
    w3: Any
    b3: Any


def padded(decoder: Any) -> Weights:
    """Units that are not there have weights and biases of zero, pixels that are not there a logit of NEVER."""
    latent = max(ROWS, pl.next_power_of_2(decoder[0]["w"].shape[0]))
    pixels = -(-PIXELS // BLOCK) * BLOCK
    sizes = [(latent, WIDEST), (WIDEST, WIDEST), (WIDEST, pixels)]
    parts = []
    for layer, size in zip(decoder, sizes, strict=True):
        fill = NEVER if size[1] == pixels else 0.0
        parts += [_fill(layer["w"].astype(jnp.float16), size), _fill(_wide(layer["b"]), size[1:], fill)]
    return Weights(*parts)


def _wide(array: Array) -> Array:
    return array.astype(jnp.float32)


def _fill(array: Array, shape: tuple[int, ...], value: float = 0.0) -> Array:
    """The array at the beginning of a larger one; leading axes that `shape` does not name stay."""
    lead = array.ndim - len(shape)
    widths = [(0, new - old) for old, new in zip(array.shape[lead:], shape, strict=True)]
    return jnp.pad(array, [(0, 0)] * lead + widths, constant_values=value)


class Sampler:
    """`hmc.transition` for a decoder and images, over chains and latents padded to what the kernel takes."""

    def __init__(self, decoder: Any, images: Array, leapfrog_steps: int, *, interpret: bool = False):
        self.chains, self.latent, self.steps = len(images), decoder[0]["w"].shape[0], leapfrog_steps
        self.weights = padded(decoder)
        self.rows = -(-self.chains // ROWS) * ROWS
        self.x = _fill(images.astype(jnp.uint8), (self.rows, self.weights.b3.shape[0]))
        self.interpret = interpret

    def wide(self, matrix: Array) -> Array:
        """[..., chains, z] with rows and columns of zeros added."""
        return _fill(matrix, (self.rows, self.weights.w1.shape[0]))

    def wide_line(self, line: Array) -> Array:
        """[..., chains] with zeros added."""
        return _fill(line, (self.rows,))

    def enter(self, state: hmc.State) -> hmc.State:
        """A state in the kernel's shape."""
        return hmc.State(
            self.wide(state.position), self.wide_line(state.log_density), self.wide(state.gradient)
        )

    def leave(self, state: hmc.State) -> hmc.State:
        """A state in its own shape again."""
        inside = slice(self.chains), slice(self.latent)
        return hmc.State(state.position[inside], state.log_density[inside[:1]], state.gradient[inside])

    def transition(
        self, state: hmc.State, momentum: Array, uniform: Array, step_size: Any
    ) -> tuple[hmc.State, hmc.Info]:
        """One HMC iteration, everything in the kernel's shape; rows that are not there count for nothing."""
        position, p, force = state.position, momentum, state.gradient[None]
        for n in range(self.steps):
            kick = 0.5 * step_size if n == 0 else step_size
            scales = jnp.stack([kick, step_size]).astype(jnp.float32)
            position, p, force, values = self._leapfrog(scales, position, p, force)
        gradient = force.sum(0)
        constant = 0.5 * self.latent * LOG_TWO_PI
        end = hmc.State(position, values.sum(0) - constant, gradient)
        p = p + 0.5 * step_size * gradient
        return hmc.metropolis(state, end, hmc.energy(end, p) - hmc.energy(state, momentum), uniform)

    def _leapfrog(self, scales: Array, position: Array, momentum: Array, force: Array) -> list[Array]:
        """Kick by the sum of the parts of the force, drift, and the parts of the force at the new place."""
        rows, latent = position.shape
        blocks = self.x.shape[1] // BLOCK
        tile = pl.BlockSpec((ROWS, latent), lambda i, j: (i, 0))
        parts = pl.BlockSpec((force.shape[0], ROWS, latent), lambda i, j: (0, i, 0))
        pixels = pl.BlockSpec((ROWS, BLOCK), lambda i, j: (i, j))
        w1, b1, w2, b2 = (pl.BlockSpec(w.shape, lambda i, j, n=w.ndim: (0,) * n) for w in self.weights[:4])
        w3, b3 = pl.BlockSpec((WIDEST, BLOCK), lambda i, j: (0, j)), pl.BlockSpec((BLOCK,), lambda i, j: (j,))
        shapes = [(rows, latent), (rows, latent), (blocks, rows, latent), (blocks, rows)]
        results: list[Array] = pl.pallas_call(
            _kernel,
            grid=(rows // ROWS, blocks),
            in_specs=[
                pl.BlockSpec((2,), lambda i, j: (0,)),
                tile,
                tile,
                parts,
                pixels,
                w1,
                b1,
                w2,
                b2,
                w3,
                b3,
            ],
            out_specs=[
                tile,
                tile,
                pl.BlockSpec((1, ROWS, latent), lambda i, j: (j, i, 0)),
                pl.BlockSpec((1, ROWS), lambda i, j: (j, i)),
            ],
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],  # type: ignore[no-untyped-call]
            interpret=self.interpret,
            compiler_params=None if self.interpret else _compiler(),
            name="leapfrog",
        )(scales, position, momentum, force, self.x, *self.weights)
        return results


def _compiler() -> Any:
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=8, num_stages=1)


def _kernel(
    scales: Any,
    position: Any,
    momentum: Any,
    force: Any,
    x: Any,
    w1: Any,
    b1: Any,
    w2: Any,
    b2: Any,
    w3: Any,
    b3: Any,
    new_position: Any,
    new_momentum: Any,
    new_force: Any,
    value: Any,
) -> None:
    first = (pl.program_id(1) == 0).astype(jnp.float32)  # the prior is a part of the first block's
    p = momentum[...] + scales[0] * _total(force)
    q = position[...] + scales[1] * p
    one, two, three = w1[...], w2[...], w3[...]
    h1 = jnp.maximum(_dot(_half(q), one) + b1[...][None, :], 0.0)
    h2 = jnp.maximum(_dot(_half(h1), two) + b2[...][None, :], 0.0)
    logits = _dot(_half(h2), three) + b3[...][None, :]
    ones = x[...].astype(jnp.float32)
    softplus = jnp.maximum(logits, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(logits)))
    back = _dot_transposed(_half(ones - lax.logistic(logits)), three)
    back = _dot_transposed(_half(jnp.where(h2 > 0, back, 0.0)), two)
    back = _dot_transposed(_half(jnp.where(h1 > 0, back, 0.0)), one)
    value[0, :] = (ones * logits - softplus).sum(1) - first * 0.5 * (q * q).sum(1)
    new_force[0] = back - first * q

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        new_position[...] = q
        new_momentum[...] = p


def _total(parts: Any) -> Array:
    total: Array = parts[0]
    for n in range(1, parts.shape[0]):
        total = total + parts[n]
    return total


def _half(array: Array) -> Array:
    return array.astype(jnp.float16)


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_transposed(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
