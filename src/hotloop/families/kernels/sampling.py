"""The compiled loop of HMC steps: randomness drawn in blocks outside the innermost loop, sums taken inside it.

The sampler itself is `hotloop.mcmc.hmc` and the densities are in `targets`. Nothing is timed or said here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from hotloop.engine.keys import stream
from hotloop.engine.progress import compiling
from hotloop.families.kernels.config import Hmc
from hotloop.families.kernels.model import matmul_precision
from hotloop.families.kernels.targets import Target
from hotloop.mcmc import hmc

SHORTEST_BLOCK, BLOCKS_A_CALL, NOISE_BYTES = 50, 20, 2**26
UNROLL = {("toy", "gpu"): 25}
"""Steps written out in one turn of the loop, else 1. A GPU starts kernels at each turn, so many tiny steps should
share one; XLA:CPU makes one function of a small loop but many of a large one (93 ns a step at 1, 1,000 at 20)."""


class Blocks(NamedTuple):
    """Means over all chains and over the steps of each block."""

    acceptance: Any
    accepted: Any
    first: Any
    """Of the position."""
    second: Any
    """Of its square."""


@dataclass
class HmcLoop:
    """The compiled call and the state that goes from call to call."""

    compiled: Any
    lowered_text: Callable[[], str]
    compile_seconds: float
    data: Any
    state: hmc.State
    block: Array

    def step(self) -> Blocks:
        """One call of `hmc_steps` steps, finished when this returns."""
        self.state, self.block, blocks = self.compiled(self.state, self.block, self.data)
        return Blocks(*(leaf.block_until_ready() for leaf in blocks))


def prepare(config: Hmc, target: Target, platform: str) -> HmcLoop:
    """The compiled call at its starting state."""
    start = time.perf_counter()
    block = jnp.int32(0)
    with compiling(recorded=True), matmul_precision("float32", False, platform):
        begin = jax.jit(lambda start, data: hmc.init(start, gradient(target, data)))
        state = begin(jnp.copy(target.start), target.data)
        jitted = jax.jit(loop(config, target, platform), donate_argnums=(0, 1))
        lowered = jitted.lower(state, block, target.data)
        compiled = lowered.compile()
    seconds = time.perf_counter() - start
    return HmcLoop(compiled, lowered.as_text, seconds, target.data, state, block)


def gradient(target: Target, data: Any) -> hmc.ValueAndGradient:
    """Value and gradient of the target with its data."""
    return hmc.gradient_of(lambda x: target.log_density(data, x))


def block_length(config: Hmc, size: int) -> int:
    """Steps of a block: a twentieth of a call, long against the chain's memory, its noise bounded in bytes."""
    fitting = NOISE_BYTES // (4 * config.number_of_chains * (size + 1))
    wanted = max(SHORTEST_BLOCK, config.hmc_steps // BLOCKS_A_CALL)
    return max(1, min(config.hmc_steps, fitting, wanted))


def loop(config: Hmc, target: Target, platform: str) -> Callable[..., tuple[hmc.State, Array, Blocks]]:
    """(state, block number, data) -> (state, block number, block means): `hmc_steps` steps.

    Steps that do not fill a block run all the same but are left out of the means.
    """
    length = block_length(config, target.start.shape[1])
    blocks, rest = divmod(config.hmc_steps, length)
    unroll = UNROLL.get((config.target, platform), 1)

    def call(state: hmc.State, block: Array, data: Any) -> tuple[hmc.State, Array, Blocks]:
        run_block = block_of(config, hmc.transition(gradient(target, data), config.leapfrog_steps), unroll)

        def body(carry: tuple[hmc.State, Array], _: None) -> tuple[tuple[hmc.State, Array], Blocks]:
            state, number = carry
            state, means = run_block(state, number, length)
            return (state, number + 1), means

        (state, block), means = lax.scan(body, (state, block), None, length=blocks)
        if rest:
            state, _ = run_block(state, block, rest)
            block += 1
        return state, block, means

    return call


def block_of(config: Hmc, step: hmc.Transition, unroll: int) -> Callable[..., tuple[hmc.State, Blocks]]:
    """(state, block number, steps) -> (state, means): draw the block's randomness, then use it up."""
    key, step_size = jax.random.key(config.seed), config.leapfrog_step_size

    def one_step(carry: tuple[hmc.State, Blocks], noise: tuple[Array, Array]) -> tuple[Any, None]:
        state, sums = carry
        state, info = step(state, *noise, step_size)
        x = state.position
        new = Blocks(info.acceptance.mean(), info.accepted.mean(), x.mean(), jnp.square(x).mean())
        return (state, jax.tree.map(jnp.add, sums, new)), None

    def run_block(state: hmc.State, number: Array, steps: int) -> tuple[hmc.State, Blocks]:
        momentum = jax.random.normal(stream(key, "momentum", number), (steps, *state.position.shape))
        uniform = jax.random.uniform(stream(key, "uniform", number), (steps, *state.log_density.shape))
        carry = state, Blocks(*jnp.zeros(4))
        (state, sums), _ = lax.scan(one_step, carry, (momentum, uniform), unroll=min(unroll, steps))
        return state, jax.tree.map(lambda leaf: leaf / steps, sums)

    return run_block
