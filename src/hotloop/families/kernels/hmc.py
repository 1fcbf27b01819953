"""HMC steps timed in isolation, from beginning to end: check, compile, warm up, time, report.

The sampler itself is `hotloop.mcmc.hmc`. Each density has a float64 reference, and the toy a theory that its chains
are held against. Errors come from the means of consecutive blocks of steps: blocks much longer than the chain's memory
are nearly independent, so the spread of their means tells the error of the whole mean, correlation included.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.engine.keys import stream
from hotloop.engine.progress import Console, compiling
from hotloop.errors import WrongResult
from hotloop.families.kernels import timing
from hotloop.families.kernels.catalogue import Cost
from hotloop.families.kernels.config import Hmc
from hotloop.families.kernels.model import exact_products
from hotloop.mcmc import hmc
from hotloop.rehearsal import begin_work

SHORTEST_BLOCK, BLOCKS_A_CALL, NOISE_BYTES = 50, 20, 2**26
UNROLL = {("toy", "gpu"): 25}
"""Steps written out in one turn of the loop, else 1. A GPU starts kernels at each turn, so many tiny steps should
share one; XLA:CPU makes one function of a small loop but many of a large one (93 ns a step at 1, 1,000 at 20)."""
BOUNDS = {"position": 1e-4, "energy": 1e-5}
"""Of one float32 trajectory: end point relative to its norm, energy change relative to 1 + |log density|."""
VCD_SIZES = (10, 200, 200, 784)
FEWEST_BLOCKS = 20
NO_TURN = 1e-6
REASONS = {
    "unstable": "the step size is beyond the stability limit sqrt 2: proposals run away",
    "periodic": "a trajectory ends at its start or its mirror image: the chain cannot mix, its moments say nothing",
    "unknown": "too few blocks for standard errors; use more --steps or --hmc-steps",
    "agrees": "all within four standard errors of the exact values",
}


@dataclass(frozen=True)
class Target:
    start: Array  # positions are [chains, z]
    data: Any
    """Arrays that the density needs; an argument of the compiled call, which would else fold them in."""
    log_density: Callable[[Any, Array], Array]  # (data, positions) -> [chains]
    reference: Callable[[Any, Any], tuple[Any, Any]]
    """(data, positions), both float64 -> (log density, gradient), written by hand."""
    cost: Cost


class Blocks(NamedTuple):  # means over all chains and over the steps of each block
    acceptance: Any
    accepted: Any
    first: Any  # of the position
    second: Any  # of its square


def run(config: Hmc, device: jax.Device, console: Console) -> dict[str, Any]:
    """Check, then time HMC; the result is what `--json` prints."""
    folder = timing.report_folder(config, "hmc", console)
    console.say("Hamiltonian Monte Carlo")
    console.say(
        f"Target {config.target}, chains {config.number_of_chains}, leapfrog steps {config.leapfrog_steps}, "
        f"step size {config.leapfrog_step_size:g}, hmc steps {config.hmc_steps}, steps {config.steps}, float32"
    )
    begin_work("compiling the sampler")
    target = toy(config) if config.target == "toy" else vcd(config)
    with console.progress("checking against float64"):
        errors = check(config, target, device.platform)
    said = ", ".join(f"{name} {error:.1e} (limit {BOUNDS[name]:g})" for name, error in errors.items())
    console.say(f"checked against float64, one trajectory: relative error {said}")
    with console.progress("HMC"):
        sampler = prepare(config, target, device.platform)
    if config.save_graph:
        timing.save_graph(config, sampler.lowered_text(), sampler.compiled, console)
    warm_up, _ = timing.time_step(sampler.step)
    steps = config.hmc_steps
    work = timing.TimedWork("HMC", "sampling", "hmc steps/sec", steps, steps, target.cost, 1, "float32")
    seconds = sampler.compile_seconds, warm_up
    result, calls = timing.measure(sampler.step, work, config, device, console, *seconds)
    console.say(f"mean time of an HMC step: {np.mean(result['seconds']['all']) / steps * 1e6:.4g} us")
    blocks = Blocks(*(np.concatenate(leaves) for leaves in zip(*calls, strict=True)))
    result |= report_statistics(config, blocks, console)
    if folder is not None:
        timing.write_report(folder, "hmc", sampler.compiled, sampler.compile_seconds, sampler.step, console)
    return {
        **result,
        "chain_steps_per_second": result["items_per_second"] * config.number_of_chains,
        "checked": {"rows": config.number_of_chains, "errors": errors, "bounds": BOUNDS},
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
    compiled: Any
    lowered_text: Callable[[], str]
    compile_seconds: float
    data: Any
    state: hmc.State
    block: Array

    def step(self) -> Blocks:
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


def toy(config: Hmc) -> Target:
    """log density -x - x^2: a Gaussian of mean -1/2 and variance 1/2. Every chain starts at 1."""
    chains, leapfrogs = config.number_of_chains, config.leapfrog_steps
    return Target(
        start=jnp.ones((chains, 1)),
        data=(),
        log_density=lambda _, x: (-x - x * x).sum(-1),
        reference=lambda _, x: ((-x - x**2).sum(-1), -1 - 2 * x),
        # About so many operations, and no memory at all: a chain of dependent instructions.
        cost=Cost((6 * leapfrogs + 20) * chains, 0, 0, 0, leapfrogs),
    )


def vcd(config: Hmc) -> Target:
    """log N(z; 0, I) + Bernoulli log likelihood of random images under a random 10-200-200-784 ReLU decoder."""
    generator, chains = np.random.default_rng(config.seed), config.number_of_chains
    weights = [
        (generator.normal(0, (2 / inputs) ** 0.5, (inputs, outputs)), np.zeros(outputs))
        for inputs, outputs in pairwise(VCD_SIZES)
    ]
    images = generator.integers(0, 2, (chains, VCD_SIZES[-1]))
    start = generator.normal(size=(chains, VCD_SIZES[0]))

    def log_density(data: Any, z: Array) -> Array:
        *inner, (kernel, bias) = data["weights"]
        hidden = z
        for inner_kernel, inner_bias in inner:
            hidden = jax.nn.relu(hidden @ inner_kernel + inner_bias)
        logits = hidden @ kernel + bias
        likelihood = (data["images"] * logits - jax.nn.softplus(logits)).sum(-1)
        return jnp.asarray(likelihood - 0.5 * jnp.square(z).sum(-1))

    def reference(data: Any, z: Any) -> tuple[Any, Any]:
        weights, images = data["weights"], data["images"]
        activations = [z]
        for kernel, bias in weights[:-1]:
            activations.append(np.maximum(activations[-1] @ kernel + bias, 0))
        logits = activations[-1] @ weights[-1][0] + weights[-1][1]
        value = (images * logits - np.logaddexp(0, logits)).sum(-1) - 0.5 * (z**2).sum(-1)
        back = images - 1 / (1 + np.exp(-logits))
        for (kernel, _), activation in zip(weights[:0:-1], activations[:0:-1], strict=True):
            back = (back @ kernel.T) * (activation > 0)
        return value, back @ weights[0][0].T - z

    # Decoder forward and back to its input, once a leapfrog: the gradient at the start is kept.
    products, leapfrogs = sum(a * b for a, b in pairwise(VCD_SIZES)), config.leapfrog_steps
    size = products + sum(VCD_SIZES[1:])
    moved = 4 * (chains * (VCD_SIZES[-1] + 2 * VCD_SIZES[0]) + size)
    serial = leapfrogs * 2 * (len(VCD_SIZES) - 1)
    cost = Cost(4 * products * leapfrogs * chains, moved, leapfrogs * moved, 4 * size, serial)
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), {"weights": weights, "images": images})
    return Target(jnp.asarray(start, jnp.float32), arrays, log_density, reference, cost)


TOY_FREQUENCY = math.sqrt(2)  # of the dynamics under -x - x^2: the square root of its curvature


def toy_turn(step_size: float, leapfrog_steps: int) -> float:
    """The sine of the angle by which a trajectory turns; nan where the step (sqrt 2 and more) is unstable.

    On a Gaussian of frequency w one leapfrog of length e is, in suitable coordinates, a rotation by the angle
    whose cosine is 1 - (e w)^2 / 2.
    """
    cosine = 1 - (step_size * TOY_FREQUENCY) ** 2 / 2
    return math.sin(leapfrog_steps * math.acos(cosine)) if abs(cosine) < 1 else math.nan


def toy_acceptance(step_size: float, leapfrog_steps: int) -> float:
    """The exact acceptance on the toy, 1 - (2 / pi) atan(sqrt(m / 2)), with m the mean change of energy.

    The coordinates in which a leapfrog is a rotation stretch one axis by k = (1 - (e w)^2 / 4)^(-1/2), so
    that m = sin^2 (k - 1/k)^2 / 2. At e = 1 and odd L this is (4 / pi) atan(1 / sqrt 2) = 0.7837.
    """
    stretch = (1 - (step_size * TOY_FREQUENCY) ** 2 / 4) ** -0.5
    mean_change = 0.5 * (toy_turn(step_size, leapfrog_steps) * (stretch - 1 / stretch)) ** 2
    return 1 - 2 / math.pi * math.atan(math.sqrt(mean_change / 2))


class MeanWithError(NamedTuple):
    value: float
    error: float  # standard; nan where there are too few blocks to tell

    def __str__(self) -> str:
        return f"{self.value:.5f} +- {self.error:.5f}"


def mean_of_blocks(blocks: Any) -> MeanWithError:
    values = np.asarray(blocks, np.float64)
    error = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size >= FEWEST_BLOCKS else math.nan
    return MeanWithError(float(values.mean()), error)


def variance_of_blocks(firsts: Any, seconds: Any) -> MeanWithError:
    """The variance E[x^2] - m^2 from block means of x and x^2; its error is that of the mean of x^2 - 2 m x."""
    firsts, seconds = np.asarray(firsts, np.float64), np.asarray(seconds, np.float64)
    centre = float(firsts.mean())
    error = mean_of_blocks(seconds - 2 * centre * firsts).error
    return MeanWithError(float(seconds.mean()) - centre**2, error)


def report_statistics(config: Hmc, blocks: Blocks, console: Console) -> dict[str, Any]:
    acceptance = mean_of_blocks(blocks.acceptance)
    result = {
        "acceptance": acceptance.value,
        "acceptance_error": acceptance.error,
        "accepted": mean_of_blocks(blocks.accepted).value,
    }
    if config.target != "toy":
        console.say(f"acceptance {acceptance}")
        return result
    found = {
        "acceptance": acceptance,
        "mean": mean_of_blocks(blocks.first),
        "variance": variance_of_blocks(blocks.first, blocks.second),
    }
    statistics = {name: each._asdict() for name, each in found.items()}
    return result | {"statistics": statistics, "verdict": judge(config, found, console)}


def judge(config: Hmc, found: Mapping[str, MeanWithError], console: Console) -> str:
    """Say each figure beside its exact value, then the verdict: a key of REASONS, or `disagrees`."""
    trajectory = config.leapfrog_step_size, config.leapfrog_steps
    turn = toy_turn(*trajectory)
    if math.isnan(turn) or abs(turn) < NO_TURN:
        for name, each in found.items():
            console.say(f"{name} {each.value:.5f}")
        verdict = "unstable" if math.isnan(turn) else "periodic"
    else:
        exact = {"acceptance": toy_acceptance(*trajectory), "mean": -0.5, "variance": 0.5}
        away = {
            name: (each.value - exact[name]) / each.error if each.error else math.inf
            for name, each in found.items()
        }
        for name, each in found.items():
            console.say(f"{name} {each}, exactly {exact[name]:.5f}: {away[name]:+.1f} standard errors")
        verdict = "agrees" if all(abs(errors) <= 4 for errors in away.values()) else "disagrees"
        if any(math.isnan(each.error) for each in found.values()):
            verdict = "unknown"
    if verdict in REASONS:
        console.say(REASONS[verdict])
    else:
        console.warn("acceptance or moments are more than four standard errors from the exact values")
    return verdict
