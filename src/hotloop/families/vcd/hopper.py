"""The chains of an update on a NVIDIA Hopper card: what `hopper_kernel.py` is given, where it may run, and what comes
out of it. The reference is `mcmc.hmc.transition`.

Weights and activations are rounded to float16; sums, positions, momenta and energies are float32. Biases are weights of
units that are always one: two each, since one float16 would round them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hotloop.families.vcd.config import VcdModel
from hotloop.families.vcd.hopper_decoder import HALF
from hotloop.families.vcd.hopper_kernel import CUT, ONES, Cut, Job, fill_up, run
from hotloop.layers.persistent_tiles import ROWS
from hotloop.mcmc import hmc

NEVER = -1e4  # logit of a pixel that is not there: likelihood 0, gradient 0
SIZES = 16, (208, 208)
"""Of latents and hidden layers, filled up, with which it was tried on a card; larger ones find no room there."""
MOST_TILES = 8
"""That wait for each other, so that all iterations are one kernel."""
UNUSABLE = 8 * (CUT.blocks - 1)
"""Multiprocessors that may be of no use: a cluster lies within one of their groups, of which a Hopper card has eight at
the most, and each group may be one block short of another cluster."""


def pack_weights(job: Job, decoder: Any) -> list[Array]:
    """The weights of each layer with its bias, from the ones of the layer before, and with ones of its own."""
    inputs = [job.latent, *job.hidden]
    outputs = [*job.hidden, job.cut.blocks * job.pixels]
    return [
        _pack_layer(layer, rows, columns, is_last=layer is decoder[-1])
        for layer, rows, columns in zip(decoder, inputs, outputs, strict=True)
    ]


def _pack_layer(layer: Any, rows: int, columns: int, is_last: bool) -> Array:
    weights, bias = layer["w"].astype(jnp.float32), layer["b"].astype(jnp.float32)
    units, wide = weights.shape
    first = bias.astype(HALF)
    rest = (bias - first.astype(jnp.float32)).astype(HALF)
    if is_last:
        fill = jnp.zeros((units + ONES, columns - wide), HALF).at[units].set(NEVER)
    else:
        fill = jnp.zeros((units + ONES, columns - wide), HALF).at[units, :ONES].set(1)
    body = jnp.concatenate([weights.astype(HALF), first[None], rest[None]])
    whole = jnp.concatenate([body, fill], 1)
    return jnp.pad(whole, [(0, rows - len(whole)), (0, 0)])


def fits(model: VcdModel) -> bool:
    """Whether it is made for networks of these sizes."""
    sizes = fill_up(model.z_dim + ONES), tuple(fill_up(units + ONES) for units in model.hidden)
    return sizes == SIZES


def can_wait(chains: int) -> bool:
    """Whether there are so few that their tiles may wait for each other between iterations."""
    return -(-chains // ROWS) <= MOST_TILES


def count_blocks(chains: int) -> int:
    """Multiprocessors that a card must have: where tiles wait for each other, room for all of them at once."""
    return -(-chains // ROWS) * CUT.blocks + UNUSABLE if can_wait(chains) else CUT.blocks


class Tiles(NamedTuple):
    """The chains' state as the kernel has it: [rows, latent] each."""

    position: Array
    slope: Array


class Sampler:
    """`hmc.transition` and `hmc.adaptation` for a decoder and images, a number of iterations at a time."""

    def __init__(
        self,
        model: VcdModel,
        decoder: Any,
        images: Array,
        iterations: int,
        *,
        cut: Cut | None = None,
        interpret: Any = None,
    ):
        cut = cut or CUT
        rate = model.adaptation_rate if model.adaptation == "ruiz" else 0.0
        sizes = (*(layer["w"].shape[0] for layer in decoder), images.shape[1])
        self.job = Job(
            cut, sizes, len(images), iterations, model.leapfrog_steps, model.target_acceptance, rate
        )
        self.weights, self.interpret = pack_weights(self.job, decoder), interpret
        wide = cut.blocks * self.job.pixels
        fill = [(0, self.job.rows - len(images)), (0, wide - images.shape[1])]
        self.x = jnp.pad(images.astype(HALF), fill)

    def enter(self, state: hmc.State) -> Tiles:
        ones = jnp.ones((self.job.chains, ONES), jnp.float32)
        slope = jnp.concatenate([state.gradient, state.log_density[:, None]], 1)
        return Tiles(self._fill(jnp.concatenate([state.position, ones], 1)), self._fill(slope))

    def leave(self, tiles: Tiles) -> hmc.State:
        chains, latents = self.job.chains, self.job.sizes[0]
        slope = tiles.slope[:chains]
        return hmc.State(tiles.position[:chains, :latents], slope[:, latents], slope[:, :latents])

    def noise(self, momenta: Array, uniforms: Array) -> Array:
        """[iterations, rows, latent]. Rows that only fill up a tile draw a number above every chance: they never move,
        and so have no say."""
        return self._fill(jnp.concatenate([momenta, uniforms[..., None]], 2), 2.0)

    def advance(self, tiles: Tiles, noise: Array, step_size: Any) -> tuple[Tiles, Array, Array]:
        """The chains after these iterations, the step size, and who moved [iterations, chains], as ones."""
        step = jnp.full(ROWS, step_size, jnp.float32)
        *new, moved, sizes = run(self.job, [*self.weights, self.x, *tiles, noise, step], self.interpret)
        return Tiles(*new), sizes[0], moved[:, : self.job.chains]

    def _fill(self, array: Array, value: float = 0.0) -> Array:
        """[..., chains, columns] with zeros as further columns and `value` in further rows."""
        lead = [(0, 0)] * (array.ndim - 2)
        rows = [*lead, (0, self.job.rows - self.job.chains), (0, 0)]
        columns = [*lead, (0, 0), (0, self.job.latent - array.shape[-1])]
        return jnp.pad(jnp.pad(array, rows, constant_values=value), columns)
