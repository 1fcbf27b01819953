"""A leapfrog as one GPU kernel: a tile of chains and a block of pixels to a multiprocessor.

On a GPU the plain sampler is a queue of small products, each launched, filled and emptied for a microsecond of
work. Here one kernel makes a whole leapfrog. Its grid is (tiles of chains) x (blocks of pixels): each program
kicks and drifts its chains, carries them through the hidden layers, makes the logits of its own pixels, and
takes their part of the gradient all the way back to the latents. The way back is linear once the way forward is known,
so the parts of all blocks add up, which the next kernel does in a fixed order: no atomics, the same bits every time.
Inside, a column is a chain: the weights are then the left operand, large enough for the matrix units that read both
operands from shared memory, and each weight is fetched once and used in both directions. Weights are rounded to float16
(ten bits of mantissa, as many as TF32 has); sums, positions, momenta and energies are float32. The reference, and the
way on every other device, is `mcmc.hmc.transition` on `networks.value_and_gradient`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from hotloop.families.vcd.config import PIXELS, VcdModel
from hotloop.families.vcd.networks import LOG_TWO_PI
from hotloop.mcmc import hmc

ROWS = 16  # chains of a tile, at least 16
BLOCK = 64  # pixels of a block: 13 blocks and the 7 tiles of 100 chains keep 91 of 132 multiprocessors busy
WARPS = 4
"""Warps of a program: one group of the wide matrix units; two groups would both do all of a block of 64."""
WIDEST = 256  # hidden units that fit: all weights of a program lie in shared memory at once (177 of 227 KB)
LARGEST_BATCH = 512
"""Beyond it the compiler's own large products fill the device (docs/vcd.md has the numbers)."""
NEVER = -1e4  # logit of a pixel that is not there: likelihood 0, gradient 0


def leapfrog(
    kick: float,
    units: tuple[int, int],
    step: Any,
    position: Any,
    momentum: Any,
    force: Any,
    x: Any,
    *refs: Any,
) -> None:
    """Kick by the sum of the parts of the force, drift, and this block's part of the force at the new place.

    With one output more, this block's part of the log density as well.
    """
    w1, b1, w2, b2, w3, b3, new_position, new_momentum, new_force, *value = refs
    size = step[0]  # all is fetched before anything is computed: one wait for the memory, not ten
    q, p, total = position[...], momentum[...], _total(force)
    one, two, three = _fetch(w1, w1.shape[0], units[0]), _fetch(w2, *units), _fetch(w3, units[1], w3.shape[1])
    bias1, bias2, bias3, ones = b1[...], b2[...], b3[...], x[...].astype(jnp.float32)
    first = (pl.program_id(1) == 0).astype(jnp.float32)  # the prior is a part of the first block's
    p = p + (kick * size) * total
    q = q + size * p
    h1 = jnp.maximum(_dot(one, q.astype(jnp.float16), 0) + bias1[:, None], 0.0)
    h2 = jnp.maximum(_dot(two, h1.astype(jnp.float16), 0) + bias2[:, None], 0.0)
    logits = _dot(three, h2.astype(jnp.float16), 0) + bias3[:, None]
    small = jnp.exp(-jnp.abs(logits))
    probability = jnp.where(logits > 0, 1.0, small) / (1.0 + small)
    back = _dot(three, (ones - probability).astype(jnp.float16), 1)
    back = _dot(two, jnp.where(h2 > 0, back, 0.0).astype(jnp.float16), 1)
    back = _dot(one, jnp.where(h1 > 0, back, 0.0).astype(jnp.float16), 1)
    new_force[0] = back - first * q

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        new_position[...] = q
        new_momentum[...] = p

    if value:
        softplus = jnp.maximum(logits, 0.0) + jnp.log(1.0 + small)
        value[0][0, :] = (ones * logits - softplus).sum(0) - first * 0.5 * (q * q).sum(0)


def decide(constant: float, step: Any, *refs: Any) -> None:
    """The last half kick, energies, and for each chain its old state or the new one."""
    old = hmc.State(*(ref[...] for ref in refs[:3]))
    momentum, position, p, force, values, uniform, *results = refs[3:]
    end = hmc.State(position[...], _total(values) - constant, _total(force))
    p = p[...] + 0.5 * step[0] * end.gradient
    change = hmc.energy(transpose(end), p.T) - hmc.energy(transpose(old), momentum[...].T)
    kept, info = hmc.metropolis(transpose(old), transpose(end), change, uniform[...])
    for ref, result in zip(results, (*transpose(kept), info.acceptance, info.energy_change), strict=True):
        ref[...] = result


def _fetch(weights: Any, rows: int, columns: int) -> Array:
    """The weights, without reading those that are zero because their unit is not there."""
    if (rows, columns) == weights.shape:
        whole: Array = weights[...]
        return whole
    from jax.experimental.pallas import triton

    there = lax.broadcasted_iota(jnp.int32, weights.shape, 0) < rows
    there &= lax.broadcasted_iota(jnp.int32, weights.shape, 1) < columns
    return triton.load(weights, mask=there, other=0.0)


def _total(parts: Any) -> Array:
    total: Array = parts[0]
    for n in range(1, parts.shape[0]):
        total = total + parts[n]
    return total


def _dot(weights: Array, columns: Array, axis: int) -> Array:
    """The product over this axis of the weights, summed in float32."""
    return lax.dot_general(weights, columns, (((axis,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def transpose(state: hmc.State) -> hmc.State:
    """[chains, z] for [z, chains] and back."""
    return hmc.State(state.position.T, state.log_density, state.gradient.T)


def fits(model: VcdModel) -> bool:
    return len(model.hidden) == 2 and max(model.hidden) <= WIDEST and model.z_dim <= 64


def _fill(array: Array, shape: tuple[int, ...], value: float = 0.0) -> Array:
    """The array at the beginning of a larger one; leading axes that `shape` does not name stay."""
    lead = array.ndim - len(shape)
    widths = [(0, new - old) for old, new in zip(array.shape[lead:], shape, strict=True)]
    return jnp.pad(array, [(0, 0)] * lead + widths, constant_values=value)


class FusedSampler:
    """`hmc.transition` for a decoder and images, over chains and latents padded to what the kernel takes."""

    def __init__(self, decoder: Any, images: Array, leapfrog_steps: int, *, interpret: bool = False):
        self.chains, self.latent, self.steps = len(images), decoder[0]["w"].shape[0], leapfrog_steps
        # The decoder in whole blocks: units that are not there have weights and biases of zero, pixels NEVER as logit.
        latent = max(16, pl.next_power_of_2(self.latent))
        one, two = (max(64, pl.next_power_of_2(layer["w"].shape[1])) for layer in decoder[:2])
        pixels = -(-PIXELS // BLOCK) * BLOCK
        parts = []
        for layer, size in zip(decoder, [(latent, one), (one, two), (two, pixels)], strict=True):
            fill = NEVER if layer is decoder[-1] else 0.0
            bias = _fill(layer["b"].astype(jnp.float32), size[1:], fill)
            parts += [_fill(layer["w"].astype(jnp.float16), size), bias]
        self.weights = tuple(parts)  # w1, b1, w2, b2, w3, b3
        self.units = tuple(-(-layer["w"].shape[1] // 8) * 8 for layer in decoder[:2])
        self.rows = -(-self.chains // ROWS) * ROWS
        self.x = _fill(images.astype(jnp.uint8).T, (pixels, self.rows))
        self.interpret = interpret

    def wide(self, matrix: Array) -> Array:
        """[..., chains, z] as [..., z, chains], with rows and columns of zeros added."""
        return _fill(jnp.swapaxes(matrix, -1, -2), (len(self.weights[0]), self.rows))

    def wide_line(self, line: Array) -> Array:
        """[..., chains] with zeros added."""
        return _fill(line, (self.rows,))

    def enter(self, state: hmc.State) -> hmc.State:
        return hmc.State(
            self.wide(state.position), self.wide_line(state.log_density), self.wide(state.gradient)
        )

    def leave(self, state: hmc.State) -> hmc.State:
        inside = slice(self.chains), slice(self.latent)
        position, values, gradient = transpose(state)
        return hmc.State(position[inside], values[inside[:1]], gradient[inside])

    def transition(
        self, state: hmc.State, momentum: Array, uniform: Array, step_size: Any
    ) -> tuple[hmc.State, hmc.Info]:
        """One HMC iteration, everything in the kernel's shape; rows that are not there count for nothing."""
        position, p, force = state.position, momentum, state.gradient[None]
        step = jnp.asarray(step_size, jnp.float32).reshape(1)
        for n in range(self.steps):
            kick, last = (0.5 if n == 0 else 1.0), n == self.steps - 1
            position, p, force, *values = self._leapfrog(kick, last, step, position, p, force)
        operands = (*state, momentum, position, p, force, *values, uniform)
        shapes = [a.shape for a in (*state, state.log_density, state.log_density)]
        *kept, acceptance, change = self._call(
            partial(decide, 0.5 * self.latent * LOG_TWO_PI),
            (self.rows // ROWS,),
            [pl.BlockSpec(step.shape, lambda i: (0,)), *(_columns(a.shape) for a in operands)],
            [_columns(shape) for shape in shapes],
            shapes,
            (step, *operands),
        )
        return hmc.State(*kept), hmc.Info(acceptance, uniform < acceptance, change)

    def _leapfrog(self, kick: float, last: bool, step: Array, *chains: Array) -> list[Array]:
        """`chains` are position, momentum, parts of the force; so are the results, and at last parts of the density."""
        blocks = self.x.shape[0] // BLOCK
        pixels = pl.BlockSpec((BLOCK, ROWS), lambda i, j: (j, i))
        whole = [pl.BlockSpec(w.shape, lambda i, j, n=w.ndim: (0,) * n) for w in (step, *self.weights[:4])]
        w3 = pl.BlockSpec((len(self.weights[4]), BLOCK), lambda i, j: (0, j))
        b3 = pl.BlockSpec((BLOCK,), lambda i, j: (j,))
        tile, tall = _columns(chains[0].shape), (blocks, *chains[0].shape)
        part = pl.BlockSpec((1, *tile.block_shape), lambda i, j: (j, 0, i))
        value = pl.BlockSpec((1, ROWS), lambda i, j: (j, i))
        shapes = [chains[0].shape, chains[1].shape, tall, (blocks, self.rows)]
        return self._call(
            partial(leapfrog, kick, self.units),
            (self.rows // ROWS, blocks),
            [whole[0], *(_columns(a.shape) for a in chains), pixels, *whole[1:], w3, b3],
            [tile, tile, part, value][: 4 if last else 3],
            shapes,
            (step, *chains, self.x, *self.weights),
        )

    def _call(
        self, kernel: Any, grid: Any, inputs: Any, outputs: Any, shapes: Any, operands: Any
    ) -> list[Array]:
        from jax.experimental.pallas import triton

        options = triton.CompilerParams(num_warps=WARPS, num_stages=1)
        results: list[Array] = pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=inputs,
            out_specs=outputs,
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes[: len(outputs)]],  # type: ignore[no-untyped-call]
            interpret=self.interpret,
            compiler_params=None if self.interpret else options,
        )(*operands)
        return results


def _columns(shape: tuple[int, ...]) -> Any:
    """A tile's chains: they are the last axis everywhere."""
    lead = (0,) * (len(shape) - 1)
    return pl.BlockSpec((*shape[:-1], ROWS), lambda i, *_: (*lead, i))
