"""The likelihood estimate on the device: programs compiled once, dispatched in pieces of about half a second.

Three programs: encoding, HMC over all images as one ensemble, and a loop over (batch of images, chunk of
samples). The pieces let a bar move and Ctrl-C be heard and change no number; nor do the sizes of batches and
chunks, which only keep memory bounded. Products are full float32 here (no TF32), on weights widened to
float32, whatever the run was trained in. The mathematics is in `likelihood` and `proposals`; this file
neither loads nor prints.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from hotloop.engine.device import platform
from hotloop.engine.drive import Pieces
from hotloop.engine.keys import stream
from hotloop.engine.progress import compiling
from hotloop.families.vcd import likelihood, networks
from hotloop.families.vcd.config import PIXELS
from hotloop.families.vcd.likelihood import Ensemble, LikelihoodEstimate, Proposal, Sums
from hotloop.families.vcd.model import State
from hotloop.families.vcd.networks import Network

MEMORY = {"cpu": 32 << 20}  # bytes of logits at once: on a CPU little more than its caches hold
MEMORY_ELSEWHERE = 256 << 20
CHAINS = {"cpu": 1000}
"""HMC chains at once, where fewer than memory allows are faster (on a CPU by 1.4, logits in its caches)."""

Carry = TypeVar("Carry")
Advance = Callable[[int], None]


class LikelihoodEstimator:
    """A model's weights and images [N, 784] of zeros and ones, ready to be sampled and weighed.

    `batch_size` images are weighed at once (fewer where memory would not do), with as many of the `samples`
    as then fit.
    """

    def __init__(
        self, params: State, images: NDArray[np.uint8], key: Array, *, batch_size: int, samples: int
    ):
        rows = MEMORY.get(platform(), MEMORY_ELSEWHERE) // (4 * PIXELS)
        self.count = len(images)
        self._key = key
        self._decoder: Network = networks.widen(params["decoder"])
        self._batches = jax.device_put(split_rows(images, min(batch_size, rows // likelihood.BLOCK)))
        self._blocks = likelihood.blocks_of(samples, rows // self._batches.shape[1])
        # The batch size never cuts HMC: rounding would follow it, and a chain's decisions follow rounding.
        self._groups = jax.device_put(split_rows(images, CHAINS.get(platform(), rows)))
        encoded = _encode(networks.widen(params), self._groups)
        self.encoder = Proposal(*(self._flat(part) for part in encoded))

    def units(self, samples: int) -> int:
        """Pieces of work that `weigh` reports."""
        return len(self._batches) * int(likelihood.chunks_of(samples, self._blocks))

    def weigh(self, name: str, proposal: Proposal, samples: int, advance: Advance) -> LikelihoodEstimate:
        """The estimates of all images by a proposal; `name` says which random numbers."""
        cut = Proposal(*(split_rows(part, self._batches.shape[1]) for part in proposal))
        key = stream(self._key, name, 0)
        step = partial(_weigh, self._blocks, self._decoder, self._batches, cut, key, samples)
        start = likelihood.empty_sums(self._batches.shape[:2])
        sums = run_in_pieces(step, start, self.units(samples), advance)
        return LikelihoodEstimate(*(self._flat(part) for part in likelihood.estimate(sums, samples)))

    def sample(self, step_size: float, leapfrogs: int, burn_in: int, kept: int, advance: Advance) -> Ensemble:
        """HMC from the encoder's means; the moments are [N, z] in the result."""
        key = stream(self._key, "hmc", 0)
        step = partial(_iterate, leapfrogs, self.count, self._decoder, self._groups, key, burn_in)
        places = split_rows(self.encoder.mean, self._groups.shape[1])
        start = _begin(self._decoder, self._groups, places, jnp.float32(step_size))
        ensemble: Ensemble = run_in_pieces(step, start, burn_in + kept, advance)
        return ensemble._replace(mean=self._flat(ensemble.mean), squares=self._flat(ensemble.squares))

    @property
    def flops(self) -> float:
        """Products of the decoder for one sample of every image; a gradient takes twice as many."""
        return 2.0 * self.count * sum(layer["w"].size for layer in self._decoder)

    def _flat(self, cut: Array) -> Array:
        return cut.reshape(-1, *cut.shape[2:])[: self.count]


def split_rows(rows: Any, size: int) -> Any:
    """[N, ...] as [batches, size or less, ...], as equal as can be, filled up with copies of the last row."""
    count = -(-len(rows) // size)
    size = -(-len(rows) // count)
    return rows[np.minimum(np.arange(count * size), len(rows) - 1)].reshape(count, size, *rows.shape[1:])


def run_in_pieces(
    step: Callable[[int, int, Carry], Carry], carry: Carry, units: int, advance: Advance
) -> Carry:
    """step(first, stop, carry) over all units, in dispatches of about half a second.

    `advance` hears of each piece, and of a first one of no units: by then the program is compiled.
    """
    pieces, done, count = Pieces(units), 0, 0
    while done < units:
        started = time.perf_counter()
        with nullcontext() if count else compiling():
            carry = jax.block_until_ready(step(done, done + count, carry))  # type: ignore[no-untyped-call]
        pieces.learn(max(1, count), time.perf_counter() - started)
        done += count
        advance(count)
        count = pieces.next(units - done)
    return carry


@jax.jit
def _encode(params: Any, groups: Array) -> tuple[Array, Array]:
    def group(images: Array) -> tuple[Array, Array]:
        return networks.encode(params, images.astype(jnp.float32))

    with jax.default_matmul_precision("highest"):
        encoded: tuple[Array, Array] = lax.map(group, groups)
    return encoded


@partial(jax.jit, static_argnums=0)
def _weigh(
    blocks: int,
    decoder: Network,
    batches: Array,
    proposals: Proposal,
    key: Array,
    samples: Array,
    first: Array,
    stop: Array,
    sums: Sums,
) -> Sums:
    """Units `first` .. `stop` - 1, each one chunk of samples for one batch of images."""
    chunks, size = likelihood.chunks_of(samples, blocks), batches.shape[1]

    def unit(number: Array, sums: Sums) -> Sums:
        batch, chunk = number // chunks, number % chunks
        images, proposal, old = jax.tree.map(lambda leaf: leaf[batch], (batches, proposals, sums))
        joint = partial(_log_joint, decoder, images.astype(jnp.float32))
        numbers = batch * size + jnp.arange(size)
        new = likelihood.add_chunk(old, joint, proposal, key, numbers, samples, chunk, blocks)
        return Sums(*(all_.at[batch].set(one) for all_, one in zip(sums, new, strict=True)))

    with jax.default_matmul_precision("highest"):
        weighed: Sums = lax.fori_loop(first, stop, unit, sums)
    return weighed


def _log_joint(decoder: Network, images: Array, z: Array) -> Array:
    """For z [images, samples, latent], with products as large as they can be."""
    logits = networks.forward(decoder, z.reshape(-1, z.shape[-1]))[-1].reshape(*z.shape[:2], -1)
    return networks.log_likelihood(logits, images[:, None]) + networks.log_prior(z)


def _target(decoder: Network) -> Any:
    return lambda images: networks.value_and_gradient(decoder, images.astype(jnp.float32))


@jax.jit
def _begin(decoder: Network, groups: Array, start: Array, step_size: Array) -> Ensemble:
    with jax.default_matmul_precision("highest"):
        return likelihood.begin_chains(_target(decoder), groups, start, step_size)


@partial(jax.jit, static_argnums=(0, 1))
def _iterate(
    leapfrogs: int,
    count: int,
    decoder: Network,
    groups: Array,
    key: Array,
    burn_in: Array,
    first: Array,
    stop: Array,
    ensemble: Ensemble,
) -> Ensemble:
    """HMC iterations `first` .. `stop` - 1 of all chains."""
    with jax.default_matmul_precision("highest"):
        step = partial(likelihood.iterate_chains, _target(decoder), leapfrogs, count, key, groups, burn_in)
        iterated: Ensemble = lax.fori_loop(first, stop, step, ensemble)
    return iterated
