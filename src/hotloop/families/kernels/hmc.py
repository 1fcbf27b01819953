"""HMC steps timed in isolation, from beginning to end: check, compile, warm up, time, report.

The sampler itself is `hotloop.mcmc.hmc`; densities, and what the chains are held against, are in `targets`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.engine.keys import stream
from hotloop.engine.progress import Console, compiling
from hotloop.errors import WrongResult
from hotloop.families.kernels import targets, timing
from hotloop.families.kernels.config import Hmc
from hotloop.families.kernels.model import exact_products
from hotloop.families.kernels.targets import Blocks, Target
from hotloop.mcmc import hmc
from hotloop.rehearsal import begin_work

SHORTEST_BLOCK, BLOCKS_A_CALL, NOISE_BYTES = 50, 20, 2**26
UNROLL = {("toy", "gpu"): 25}
"""Steps written out in one turn of the loop, else 1. A GPU starts kernels at each turn, so many tiny steps should
share one; XLA:CPU makes one function of a small loop but many of a large one (93 ns a step at 1, 1,000 at 20)."""
BOUNDS = {"position": 1e-4, "energy": 1e-5}
"""Of one float32 trajectory: end point relative to its norm, energy change relative to 1 + |log density|."""


def run(config: Hmc, device: jax.Device, console: Console) -> dict[str, Any]:
    """Check, then time HMC; the result is what `--json` prints."""
    folder = timing.report_folder(config, "hmc", console)
    console.say("Hamiltonian Monte Carlo")
    console.say(
        f"Target {config.target}, chains {config.number_of_chains}, leapfrog steps {config.leapfrog_steps}, "
        f"step size {config.leapfrog_step_size:g}, hmc steps {config.hmc_steps}, steps {config.steps}, float32"
    )
    begin_work("compiling the sampler")
    target = targets.build(config)
    with console.progress("checking against float64"):
        errors = check(config, target, device.platform)
    said = ", ".join(f"{name} {error:.1e} (limit {BOUNDS[name]:g})" for name, error in errors.items())
    console.say(f"checked against float64, one trajectory: relative error {said}")
    with console.progress("HMC"):
        sampler = prepare(config, target, device.platform)
    if config.save_graph:
        timing.save_graph(config, sampler.lowered_text(), sampler.compiled, console)
    warm_up, _ = timing.time_step(sampler.step)
    console.say(f"compiled in {sampler.compile_seconds:.3f} s, warm-up {warm_up:.3f} s")
    steps = config.hmc_steps
    work = timing.TimedWork("HMC", "hmc steps/sec", steps, steps, target.cost, 1, "float32")
    result, calls = timing.measure(sampler.step, work, config, device, console)
    console.say(f"mean time of an HMC step: {np.mean(result['seconds']['all']) / steps * 1e6:.4g} us")
    blocks = Blocks(*(np.concatenate(leaves) for leaves in zip(*calls, strict=True)))
    result |= targets.report_statistics(config, blocks, console)
    if folder is not None:
        timing.write_report(folder, "hmc", sampler.compiled, sampler.compile_seconds, sampler.step, console)
    return {
        **result,
        "chain_steps_per_second": result["items_per_second"] * config.number_of_chains,
        "checked": {"rows": config.number_of_chains, "errors": errors, "bounds": BOUNDS},
        "compile_seconds": sampler.compile_seconds,
        "warm_up_seconds": warm_up,
        "dtype": "float32",
        "mode": "sampling",
        **timing.circumstances(config, device),
    }


def check(config: Hmc, target: Target, platform: str) -> dict[str, float]:
    """One trajectory of every chain against a textbook leapfrog in float64."""
    momentum = jax.random.normal(stream(jax.random.key(config.seed), "check", 0), target.start.shape)

    def trajectory(start: Array, momentum: Array, data: Any) -> tuple[Array, Array]:
        density = gradient(target, data)
        state = hmc.init(start, density)
        steps = config.leapfrog_step_size, config.leapfrog_steps
        end, last = hmc.leapfrog(density, state, momentum, *steps)
        return end.position, hmc.energy(end, last) - hmc.energy(state, momentum)

    with exact_products(platform):
        position, change = jax.jit(trajectory)(target.start, momentum, target.data)
    start, data, begun = jax.tree.map(np.float64, (target.start, target.data, momentum))
    size, q, p = config.leapfrog_step_size, start, begun
    for _ in range(config.leapfrog_steps):  # kick, drift, kick: two gradients a leapfrog
        p = p + size / 2 * target.reference(data, q)[1]
        q = q + size * p
        p = p + size / 2 * target.reference(data, q)[1]
    before, after = target.reference(data, start)[0], target.reference(data, q)[0]
    expected_change = (p**2).sum(-1) / 2 - after - (begun**2).sum(-1) / 2 + before
    scale = 1 + np.maximum(np.abs(before), np.abs(after))
    errors = {
        "position": float(np.linalg.norm(position - q) / np.linalg.norm(q)),
        "energy": float(np.max(np.abs(change - expected_change) / scale)),
    }
    for name, error in errors.items():
        if not error <= BOUNDS[name]:
            raise WrongResult(
                f"HMC: wrong result, not timed: the {name} after one trajectory is off by {error:.3g} against "
                f"float64, the limit is {BOUNDS[name]:g}"
            )
    return errors


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
    start = time.perf_counter()
    block = jnp.int32(0)
    with compiling(recorded=True), exact_products(platform):
        begin = jax.jit(lambda start, data: hmc.init(start, gradient(target, data)))
        state = begin(jnp.copy(target.start), target.data)
        jitted = jax.jit(loop(config, target, platform), donate_argnums=(0, 1))
        lowered = jitted.lower(state, block, target.data)
        compiled = lowered.compile()
    seconds = time.perf_counter() - start
    return HmcLoop(compiled, lowered.as_text, seconds, target.data, state, block)


def gradient(target: Target, data: Any) -> hmc.ValueAndGradient:
    return hmc.gradient_of(lambda x: target.log_density(data, x))


def loop(config: Hmc, target: Target, platform: str) -> Callable[..., tuple[hmc.State, Array, Blocks]]:
    """(state, block number, data) -> (state, block number, block means): `hmc_steps` steps.

    Randomness is drawn in blocks, outside the innermost loop. Steps that do not fill a block run all the same but are
    left out of the means.
    """
    # A block is a twentieth of a call: long against the chain's memory, and its noise is bounded in bytes.
    fitting = NOISE_BYTES // (4 * config.number_of_chains * (target.start.shape[1] + 1))
    wanted = max(SHORTEST_BLOCK, config.hmc_steps // BLOCKS_A_CALL)
    length = max(1, min(config.hmc_steps, fitting, wanted))
    blocks, rest = divmod(config.hmc_steps, length)
    key, unroll = jax.random.key(config.seed), UNROLL.get((config.target, platform), 1)

    def call(state: hmc.State, block: Array, data: Any) -> tuple[hmc.State, Array, Blocks]:
        step = hmc.transition(gradient(target, data), config.leapfrog_steps)

        def one_step(carry: tuple[hmc.State, Blocks], noise: tuple[Array, Array]) -> tuple[Any, None]:
            state, sums = carry
            state, info = step(state, *noise, config.leapfrog_step_size)
            x = state.position
            new = Blocks(info.acceptance.mean(), info.accepted.mean(), x.mean(), jnp.square(x).mean())
            return (state, jax.tree.map(jnp.add, sums, new)), None

        def run_block(state: hmc.State, number: Array, steps: int) -> tuple[hmc.State, Blocks]:
            momentum = jax.random.normal(stream(key, "momentum", number), (steps, *state.position.shape))
            uniform = jax.random.uniform(stream(key, "uniform", number), (steps, *state.log_density.shape))
            carry = state, Blocks(*jnp.zeros(4))
            (state, sums), _ = lax.scan(one_step, carry, (momentum, uniform), unroll=min(unroll, steps))
            return state, jax.tree.map(lambda leaf: leaf / steps, sums)

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
