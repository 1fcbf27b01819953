"""log p(x) by importance sampling, the three proposals for it, and both on the device in pieces of half a second.

For samples z_s of a Gaussian proposal r the mean of w_s = p(x, z_s) / r(z_s) has the expectation p(x), so its
logarithm is, in expectation, a lower bound of log p(x) that rises with the number of samples. Weights are
never kept: each image has a running maximum and, relative to it, the sums of w and w^2. The normal numbers of
an image depend on the key, its number and the sample's alone, so no batch or chunk changes the estimate.

Two of the proposals are learnt from HMC over all images as one ensemble. Chains start at the encoder's mean and share
one step size, which follows the share of all chains that moved (and so depends on no batch size) until the burn-in
ends; then it rests, and each chain's mean and variance are gathered one sample at a time. Where the two reference
programs differ this follows the paper's authors: the trained step size to begin with, a deviation with n - 1, a floor
that is applied last.

The pieces let a bar move and Ctrl-C be heard and change no number. Of several devices each has a share of every batch
of images and of every group of chains. Products are full float32 here (no TF32), on weights widened to float32,
whatever the run was trained in.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from hotloop.engine import processes
from hotloop.engine.device import REPLICA, platform
from hotloop.engine.drive import Pieces
from hotloop.engine.keys import stream
from hotloop.engine.precision import EVERYWHERE, count_replicas, first_row, sum_replicas
from hotloop.engine.progress import compiling
from hotloop.families.vcd import networks
from hotloop.families.vcd.config import PIXELS
from hotloop.families.vcd.model import State
from hotloop.families.vcd.networks import Network, log_prior
from hotloop.mcmc import hmc

BLOCK = 50  # samples that are drawn together, from one key: the smallest chunk
WIDER = 1.2
"""Proposals are wider than what they are made of: a tail that is too thin ruins an importance sampler."""
SMALLEST = 1e-4
TARGET_ACCEPTANCE, ADAPTATION_RATE = 0.9, 0.01
HEADLINE = "hmc_mean_std"  # the proposal whose estimate is the result, chosen in advance

LogJoint = Callable[[Array], Array]  # z [images, samples, latent] -> log p(x, z) [images, samples]
Target = Callable[[Any], hmc.ValueAndGradient]  # of the data of some chains
MEMORY = {"cpu": 32 << 20}  # bytes of logits at once: on a CPU little more than its caches hold
MEMORY_ELSEWHERE = 256 << 20
CHAINS = {"cpu": 1000}
"""HMC chains at once, where fewer than memory allows are faster (on a CPU by 1.4, logits in its caches)."""

SHARES = PartitionSpec(None, REPLICA)  # type: ignore[no-untyped-call]  # of [batches, rows, ...] on several devices

Advance = Callable[[int], None]


class Proposal(NamedTuple):
    """N(mean, spread^2) for each image, [images, latent]."""

    mean: Array
    spread: Array


class Sums(NamedTuple):
    """What is kept of an image's weights: `total` and `squares` are relative to the largest weight so far."""

    largest: Array  # the largest log w
    total: Array  # the sum of w / exp(largest)
    squares: Array  # the sum of (w / exp(largest))^2
    logs: Array  # the sum of log w: divided by the number of samples, the ELBO of the proposal


def empty_sums(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Sums:
    zero = jnp.zeros(shape, dtype)
    return Sums(zero - jnp.inf, zero, zero, zero)


def add_weights(sums: Sums, log_weights: Array, real: Array) -> Sums:
    """The sums with more log weights [..., samples] in them, those that are `real`.

    A weight of zero (a logarithm of -inf) adds nothing; a NaN makes its image's sums NaN, and only those.
    """
    kept = jnp.where(real, log_weights, -jnp.inf)
    largest = jnp.maximum(sums.largest, kept.max(-1))
    pivot = jnp.where(largest == -jnp.inf, 0.0, largest)
    scale = jnp.exp(sums.largest - pivot)
    weights = jnp.exp(kept - pivot[..., None])
    return Sums(
        largest,
        sums.total * scale + weights.sum(-1),
        sums.squares * scale * scale + jnp.square(weights).sum(-1),
        sums.logs + jnp.where(real, log_weights, 0.0).sum(-1),
    )


class LikelihoodEstimate(NamedTuple):
    log_likelihood: Array
    effective: Array  # (sum w)^2 / sum w^2: so many samples of equal weight would do as well
    variance: Array
    """Of `log_likelihood`, over other draws: (S sum w^2 / (sum w)^2 - 1) / S, by the delta method."""
    elbo: Array  # the mean of log w


def estimate(sums: Sums, samples: Array | int) -> LikelihoodEstimate:
    effective = jnp.where(sums.total == 0, 0.0, jnp.square(sums.total) / sums.squares)
    return LikelihoodEstimate(
        sums.largest + jnp.log(sums.total) - jnp.log(jnp.asarray(samples, sums.total.dtype)),
        effective,
        jnp.maximum(1 / effective - 1 / samples, 0.0),
        sums.logs / samples,
    )


def draw_normals(
    key: Array, images: Array, first: Array | int, blocks: int, latent: int, dtype: Any
) -> Array:
    """N(0, 1) numbers [images, blocks * BLOCK, latent] from block `first` on, for images of these numbers."""

    def one(image: Array, block: Array) -> Array:
        place = jax.random.fold_in(jax.random.fold_in(key, image), block)
        return jax.random.normal(place, (BLOCK, latent), dtype)

    drawn = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(images, first + jnp.arange(blocks))
    return drawn.reshape(len(images), blocks * BLOCK, latent)


def add_chunk(
    sums: Sums,
    log_joint: LogJoint,
    proposal: Proposal,
    key: Array,
    images: Array,
    samples: Array | int,
    chunk: Array | int,
    blocks: int,
) -> Sums:
    """The sums with the `chunk`-th so many blocks of samples in them; samples from number `samples` on do not count."""
    mean, spread = proposal
    first = chunk * blocks
    eta = draw_normals(key, images, first, blocks, mean.shape[-1], mean.dtype)
    log_proposal = log_prior(eta) - jnp.log(spread).sum(-1)[:, None]
    log_weights = log_joint(mean[:, None] + spread[:, None] * eta) - log_proposal
    real = first * BLOCK + jnp.arange(blocks * BLOCK) < samples
    return add_weights(sums, log_weights, real)


def blocks_of(samples: int, chunk: int) -> int:
    """Blocks a chunk, for chunks of about equal size with at most `chunk` samples (or one block)."""
    total = -(-samples // BLOCK)
    chunks = -(-total // max(1, chunk // BLOCK))
    return -(-total // chunks)


def chunks_of(samples: Any, blocks: int) -> Any:
    """Chunks that so many samples take; `samples` may be an array."""
    return -(-samples // (blocks * BLOCK))


class Ensemble(NamedTuple):
    """All chains, in groups that are computed one after the other: arrays are [groups, chains, ...]."""

    chains: hmc.State
    step_size: Array
    mean: Array  # of the samples kept so far
    squares: Array  # their squared distances from the mean, added up
    acceptance: Array  # share of the proposals accepted, over the iterations kept so far


def begin_chains(target: Target, data: Array, start: Array, step_size: Array) -> Ensemble:
    chains = lax.map(lambda group: hmc.init(group[1], target(group[0])), (data, start))
    nothing = jnp.zeros_like(start)
    return Ensemble(chains, step_size, nothing, nothing, jnp.zeros((), step_size.dtype))


def iterate_chains(
    target: Target,
    leapfrogs: int,
    count: int,
    key: Array,
    data: Array,
    burn_in: Array | int,
    number: Array | int,
    ensemble: Ensemble,
    axis: str | None = None,
) -> Ensemble:
    """HMC iteration `number` of all chains; those after the first `count` fill up a group and do not vote.

    A chain's momentum and uniform number depend on the key, the iteration and the chain's number. Of several replicas
    each has a share of every group's chains, and the votes of all count.
    """
    groups, rows, latent = ensemble.mean.shape
    dtype = ensemble.mean.dtype
    places = row_numbers(jnp.arange(groups)[:, None], rows, axis).reshape(-1)

    def draw(key: Array) -> tuple[Array, Array]:
        normal, uniform = jax.random.split(key)
        return jax.random.normal(normal, (latent,), dtype), jax.random.uniform(uniform, (), dtype)

    def group(part: tuple[Any, hmc.State, Array, Array]) -> tuple[hmc.State, hmc.Info]:
        rows, chains, momentum, uniform = part
        return hmc.transition(target(rows), leapfrogs)(chains, momentum, uniform, ensemble.step_size)

    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, number), places)
    momenta, uniforms = jax.vmap(draw)(keys)
    numbers = momenta.reshape(groups, rows, latent), uniforms.reshape(groups, rows)
    chains, info = lax.map(group, (data, ensemble.chains, *numbers))
    votes = info.accepted.reshape(-1) & (places < count)
    accepted = sum_replicas(votes.sum(dtype=dtype), axis) / count
    moved = hmc.adaptation(ensemble.step_size, accepted[None], TARGET_ACCEPTANCE, ADAPTATION_RATE)
    # Welford's update with the `kept`-th sample; before the first, nothing changes.
    kept = number - burn_in + 1
    share = jnp.where(kept > 0, 1 / jnp.maximum(kept, 1).astype(dtype), 0)
    away = chains.position - ensemble.mean
    mean = ensemble.mean + share * away
    return Ensemble(
        chains,
        jnp.where(number < burn_in, moved, ensemble.step_size),
        mean,
        ensemble.squares + jnp.where(kept > 0, away * (chains.position - mean), 0),
        ensemble.acceptance + share * (accepted - ensemble.acceptance),
    )


def row_numbers(batch: Any, rows: int, axis: str | None) -> Array:
    """The numbers of this replica's rows of a batch, or of several in an array [batches, 1], among all rows."""
    numbers: Array = batch * (rows * count_replicas(axis)) + first_row(rows, axis) + jnp.arange(rows)
    return numbers


def make_proposals(encoder: Proposal, mean: Array, squares: Array, kept: int) -> dict[str, Proposal]:
    deviation = jnp.sqrt(squares / max(1, kept - 1))
    return {
        "encoder": Proposal(encoder.mean, WIDER * encoder.spread),
        "hmc_mean": Proposal(mean, WIDER * encoder.spread),
        HEADLINE: Proposal(mean, jnp.maximum(WIDER * deviation, SMALLEST)),
    }


class LikelihoodEstimator:
    """A model's weights and images [N, 784] of zeros and ones, ready to be sampled and weighed.

    `batch_size` images are weighed at once (fewer where memory would not do), with as many of the `samples`
    as then fit. With a `mesh` its devices share them, and the weights lie on all of these.
    """

    def __init__(
        self,
        params: State,
        images: NDArray[np.uint8],
        key: Array,
        *,
        batch_size: int,
        samples: int,
        mesh: Mesh | None = None,
    ):
        rows = MEMORY.get(platform(), MEMORY_ELSEWHERE) // (4 * PIXELS)  # of each device
        self.count, self._replicas = len(images), 1 if mesh is None else mesh.size
        self._key, self._mesh = key, mesh
        self._decoder: Network = networks.widen(params["decoder"])
        at_once = min(batch_size, self._replicas * (rows // BLOCK))
        self._batches = self._cut(images, at_once)
        self._blocks = blocks_of(samples, rows // (self._batches.shape[1] // self._replicas))
        # The batch size never cuts HMC: rounding would follow it, and a chain's decisions follow rounding.
        self._groups = self._cut(images, self._replicas * CHAINS.get(platform(), rows))
        encoded = _encode(mesh, networks.widen(params), self._groups)
        self.encoder = Proposal(*(self._flat(part) for part in self._fetched(encoded)))

    def units(self, samples: int) -> int:
        return len(self._batches) * int(chunks_of(samples, self._blocks))

    def weigh(self, name: str, proposal: Proposal, samples: int, advance: Advance) -> LikelihoodEstimate:
        """The estimates of all images by a proposal; `name` says which random numbers."""
        cut = Proposal(*(self._cut(part, self._batches.shape[1]) for part in proposal))
        key = stream(self._key, name, 0)
        step = partial(_weigh, self._blocks, self._mesh, self._decoder, self._batches, cut, key, samples)
        start = self._placed(empty_sums(self._batches.shape[:2]))
        sums: Sums = self._fetched(run_in_pieces(step, start, self.units(samples), advance))
        return LikelihoodEstimate(*(self._flat(part) for part in estimate(sums, samples)))

    def sample(self, step_size: float, leapfrogs: int, burn_in: int, kept: int, advance: Advance) -> Ensemble:
        """HMC from the encoder's means; the moments are [N, z] in the result."""
        key = stream(self._key, "hmc", 0)
        step = partial(_iterate, leapfrogs, self.count, self._mesh, self._decoder, self._groups, key, burn_in)
        places = self._cut(self.encoder.mean, self._groups.shape[1])
        start = _begin(self._mesh, self._decoder, self._groups, places, jnp.float32(step_size))
        ensemble: Ensemble = self._fetched(run_in_pieces(step, start, burn_in + kept, advance))
        return ensemble._replace(mean=self._flat(ensemble.mean), squares=self._flat(ensemble.squares))

    @property
    def flops(self) -> float:
        """Products of the decoder for one sample of every image; a gradient takes twice as many."""
        return 2.0 * self.count * sum(layer["w"].size for layer in self._decoder)

    def _cut(self, rows: Any, size: int) -> Any:
        return self._placed(split_rows(rows, size, self._replicas))

    def _placed(self, parts: Any) -> Any:
        return processes.place(parts, NamedSharding(self._mesh, SHARES) if self._mesh is not None else None)

    def _fetched(self, parts: Any) -> Any:
        """Of several devices, on one of this process's own."""
        return parts if self._mesh is None else jax.tree.map(jnp.asarray, processes.fetch(parts))

    def _flat(self, cut: Array) -> Array:
        return cut.reshape(-1, *cut.shape[2:])[: self.count]


def split_rows(rows: Any, size: int, shares: int = 1) -> Any:
    """[N, ...] as [batches, size or less, ...], as equal as can be, filled up with copies of the last row.

    The rows of a batch are a multiple of `shares`, and may be as many more than `size` as that needs.
    """
    count = -(-len(rows) // (-(-size // shares) * shares))
    size = -(-len(rows) // (count * shares)) * shares
    return rows[np.minimum(np.arange(count * size), len(rows) - 1)].reshape(count, size, *rows.shape[1:])


def run_in_pieces(step: Callable[[int, int, Any], Any], carry: Any, units: int, advance: Advance) -> Any:
    """step(first, stop, carry) over all units, in dispatches of about half a second.

    `advance` is called for each piece, and of a first one of no units: by then the program is compiled. Of several
    processes the first says how long a piece is.
    """
    pieces, done, count = Pieces(units), 0, 0
    while done < units:
        started = time.perf_counter()
        with nullcontext() if count else compiling():
            carry = jax.block_until_ready(step(done, done + count, carry))  # type: ignore[no-untyped-call]
        pieces.learn(max(1, count), time.perf_counter() - started)
        done += count
        advance(count)
        processes.note("training")
        count = processes.agreed(pieces.next(units - done))
    return carry


def on_shares(fn: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn(axis, ...)` as a function of what follows `axis`, which is the name to reduce over, or None."""
    if mesh is None:
        return partial(fn, None)
    of_share = partial(fn, REPLICA)
    return jax.shard_map(of_share, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@partial(processes.JitTogether, static=(0,))
def _encode(mesh: Mesh | None, params: Any, groups: Array) -> tuple[Array, Array]:
    def encode(axis: str | None, params: Any, groups: Array) -> Any:
        return lax.map(lambda images: networks.encode(params, images.astype(jnp.float32)), groups)

    with jax.default_matmul_precision("highest"):
        encoded: tuple[Array, Array] = on_shares(encode, mesh, (EVERYWHERE, SHARES), SHARES)(params, groups)
    return encoded


@partial(processes.JitTogether, static=(0, 1))
def _weigh(
    blocks: int,
    mesh: Mesh | None,
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

    def weigh(axis: str | None, shares: Any, decoder: Network, key: Array, samples: Any, ends: Any) -> Sums:
        batches, proposals, sums = shares
        chunks, size = chunks_of(samples, blocks), batches.shape[1]

        def unit(number: Array, sums: Sums) -> Sums:
            batch, chunk = number // chunks, number % chunks
            images, proposal, old = jax.tree.map(lambda leaf: leaf[batch], (batches, proposals, sums))
            joint = partial(networks.log_joint, decoder, images[:, None].astype(jnp.float32))
            numbers = row_numbers(batch, size, axis)
            new = add_chunk(old, joint, proposal, key, numbers, samples, chunk, blocks)
            return Sums(*(all_.at[batch].set(one) for all_, one in zip(sums, new, strict=True)))

        done: Sums = lax.fori_loop(ends[0], ends[1], unit, sums)
        return done

    with jax.default_matmul_precision("highest"):
        weigh_shares = on_shares(weigh, mesh, (SHARES, *[EVERYWHERE] * 4), SHARES)
        shares = batches, proposals, sums
        weighed: Sums = weigh_shares(shares, decoder, key, samples, (first, stop))
    return weighed


def _target(decoder: Network) -> Any:
    return lambda images: networks.value_and_gradient(decoder, images.astype(jnp.float32))


ENSEMBLE_SHARES = Ensemble(SHARES, EVERYWHERE, SHARES, SHARES, EVERYWHERE)  # type: ignore[arg-type]


@partial(processes.JitTogether, static=(0,))
def _begin(mesh: Mesh | None, decoder: Network, groups: Array, start: Array, step_size: Array) -> Ensemble:
    def begin(axis: str | None, decoder: Network, groups: Array, start: Array, step_size: Array) -> Ensemble:
        return begin_chains(_target(decoder), groups, start, step_size)

    with jax.default_matmul_precision("highest"):
        specs = EVERYWHERE, SHARES, SHARES, EVERYWHERE
        begun: Ensemble = on_shares(begin, mesh, specs, ENSEMBLE_SHARES)(decoder, groups, start, step_size)
    return begun


@partial(processes.JitTogether, static=(0, 1, 2))
def _iterate(
    leapfrogs: int,
    count: int,
    mesh: Mesh | None,
    decoder: Network,
    groups: Array,
    key: Array,
    burn_in: Array,
    first: Array,
    stop: Array,
    ensemble: Ensemble,
) -> Ensemble:
    def iterate(
        axis: str | None,
        groups: Array,
        ensemble: Ensemble,
        decoder: Network,
        key: Array,
        burn_in: Any,
        ends: Any,
    ) -> Ensemble:
        step = partial(iterate_chains, _target(decoder), leapfrogs, count, key, groups, burn_in, axis=axis)
        done: Ensemble = lax.fori_loop(ends[0], ends[1], step, ensemble)
        return done

    with jax.default_matmul_precision("highest"):
        specs = SHARES, ENSEMBLE_SHARES, *[EVERYWHERE] * 4
        iterate_shares = on_shares(iterate, mesh, specs, ENSEMBLE_SHARES)
        iterated: Ensemble = iterate_shares(groups, ensemble, decoder, key, burn_in, (first, stop))
    return iterated
