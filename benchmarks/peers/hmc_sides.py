"""The samplers that are compared, each compiled before it is timed: run(seed) -> seconds, draws, divergences.

All chains start at the same position, warm up for the same number of iterations toward an acceptance of 0.8 with a
diagonal mass, and keep the same number of draws. Ours shares what it adapts between the chains; the peers adapt each
chain by itself, as they do by default: BlackJAX by its window adaptation, mapped, numpyro as its chain method
"vectorized" does. Peers' HMC has as many leapfrogs a draw, or as long a trajectory, as ours had found: they have no
rule of their own for it.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from common import program_bytes
from hmc_targets import Target

from hotloop import hmc

ACCEPTANCE = 0.8


class Run(NamedTuple):
    warmup: float
    sampling: float
    samples: dict[str, np.ndarray]
    """Leaf -> [chains, draws, ...]."""
    divergences: int


class Lengths(NamedTuple):
    chains: int
    warmup: int
    samples: int


class Side(NamedTuple):
    """A sampler: one run of a seed, and the bytes that the neediest of its compiled programs needs."""

    run: Callable[[int], Run]
    memory: int


def ours(target: Target, lengths: Lengths) -> tuple[Side, hmc.Result]:
    """Ours, and the result of a run more that is not timed, from which peers' HMC has its leapfrogs."""
    sampler = hmc.Sampler(
        target.log_density, target.start, **lengths._asdict(), target_acceptance=ACCEPTANCE, quiet=True
    )

    def run(seed: int) -> Run:
        result = sampler.run(jax.random.key(seed))
        return Run(result.seconds.warmup, result.seconds.sampling, named(result.samples), result.divergences)

    memory = program_bytes(sampler._warm, sampler._draw, sampler._arranged)
    return Side(run, memory), sampler.run(jax.random.key(0))


def named(samples: Any) -> dict[str, np.ndarray]:
    leaves = samples if isinstance(samples, dict) else {"x": samples}
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = jax.block_until_ready(function())
    return time.perf_counter() - began, found


def blackjax_side(target: Target, lengths: Lengths, leapfrogs: int | None) -> Side:
    """NUTS, or HMC of so many leapfrogs."""
    import blackjax
    from blackjax.adaptation.base import get_filter_adapt_info_fn

    algorithm = blackjax.nuts if leapfrogs is None else blackjax.hmc
    fixed = {} if leapfrogs is None else {"num_integration_steps": leapfrogs}
    adaptation = blackjax.window_adaptation(
        algorithm,
        target.log_density,
        target_acceptance_rate=ACCEPTANCE,
        adaptation_info_fn=get_filter_adapt_info_fn(),
        **fixed,
    )
    kernel = algorithm.build_kernel()

    def warm(key: Any) -> Any:
        (state, parameters), _ = adaptation.run(key, target.start, lengths.warmup)
        return state, parameters["step_size"], parameters["inverse_mass_matrix"]

    def draw(key: Any, warmed: Any) -> Any:
        state, step_size, mass = warmed
        extra = (leapfrogs,) if leapfrogs is not None else ()

        def once(state: Any, key: Any) -> Any:
            state, info = kernel(key, state, target.log_density, step_size, mass, *extra)
            return state, (state.position, info.is_divergent)

        return jax.lax.scan(once, state, jax.random.split(key, lengths.samples))[1]

    keys = jax.random.split(jax.random.key(0), lengths.chains)
    compiled_warm = jax.jit(jax.vmap(warm)).lower(keys).compile()
    compiled_draw = jax.jit(jax.vmap(draw)).lower(keys, jax.eval_shape(jax.vmap(warm), keys)).compile()

    def run(seed: int) -> Run:
        first, second = jax.random.split(jax.random.key(seed))
        warmup, warmed = timed(lambda: compiled_warm(jax.random.split(first, lengths.chains)))
        sampling, (samples, diverged) = timed(
            lambda: compiled_draw(jax.random.split(second, lengths.chains), warmed)
        )
        return Run(warmup, sampling, named(samples), int(diverged.sum()))

    return Side(run, program_bytes(compiled_warm, compiled_draw))


def numpyro_side(target: Target, lengths: Lengths, trajectory: float | None) -> Side:
    """NUTS, or HMC of such a trajectory, in one compiled loop each for warm-up and draws, chains vectorized.

    `MCMC.run` compiles anew whenever it is called; these are the two functions that it loops over.
    """
    from numpyro.infer import HMC, NUTS

    def potential(position: Any) -> Any:
        return -target.log_density(position)

    settings: dict[str, Any] = {"potential_fn": potential, "target_accept_prob": ACCEPTANCE}
    kernel = NUTS(**settings) if trajectory is None else HMC(**settings, trajectory_length=trajectory)
    many = lengths.chains > 1
    start = target.start
    if many:
        start = jax.tree.map(lambda leaf: np.tile(leaf, (lengths.chains, *[1] * np.ndim(leaf))), start)

    def warm(keys: Any) -> Any:
        state = kernel.init(keys if many else keys[0], lengths.warmup, start, (), {})
        return jax.lax.fori_loop(0, lengths.warmup, lambda _, state: kernel.sample(state, (), {}), state)

    def draw(state: Any) -> Any:
        def once(state: Any, _: Any) -> Any:
            state = kernel.sample(state, (), {})
            return state, (state.z, state.diverging)

        samples, diverged = jax.lax.scan(once, state, length=lengths.samples)[1]
        return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1) if many else leaf[None], samples), diverged

    keys = jax.random.split(jax.random.key(0), lengths.chains)
    compiled_warm = jax.jit(warm).lower(keys).compile()
    compiled_draw = jax.jit(draw).lower(jax.eval_shape(warm, keys)).compile()

    def run(seed: int) -> Run:
        keys = jax.random.split(jax.random.key(seed), lengths.chains)
        warmup, warmed = timed(lambda: compiled_warm(keys))
        sampling, (samples, diverged) = timed(lambda: compiled_draw(warmed))
        return Run(warmup, sampling, named(samples), int(diverged.sum()))

    return Side(run, program_bytes(compiled_warm, compiled_draw))
