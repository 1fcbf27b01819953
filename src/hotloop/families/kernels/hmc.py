"""HMC steps timed in isolation, from beginning to end: check, compile, warm up, time, report.

The loop is in `sampling`, what the chains are held against in `verdict`; this is the order of things.
"""

import time
from typing import Any

import jax
import numpy as np
from jax import Array

from hotloop.engine.device import describe_environment
from hotloop.engine.keys import stream
from hotloop.engine.measure import ceilings, describe_device
from hotloop.engine.progress import Console
from hotloop.errors import WrongResult
from hotloop.families.kernels import sampling, targets, timing
from hotloop.families.kernels.config import Hmc
from hotloop.families.kernels.model import matmul_precision
from hotloop.families.kernels.verdict import report_statistics
from hotloop.mcmc import hmc
from hotloop.options import to_jsonable
from hotloop.rehearsal import begin_work

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
        sampler = sampling.prepare(config, target, device.platform)
    if config.save_graph:
        timing.save_graph(config, sampler.lowered_text(), sampler.compiled, console)
    start = time.perf_counter()
    sampler.step()
    warm_up = time.perf_counter() - start
    console.say(f"compiled in {sampler.compile_seconds:.3f} s, warm-up {warm_up:.3f} s")
    repeats, blocks = time_steps(config, sampler, console)
    work = timing.TimedWork(config.hmc_steps, config.hmc_steps, target.cost, 1, "float32")
    with console.progress("measuring the device"):
        limits = ceilings(device)
    result = timing.figures(repeats, work, limits)
    for line in timing.figure_lines(result, "hmc steps/sec"):
        console.say(line)
    console.say(f"mean time of an HMC step: {np.mean(repeats) / config.hmc_steps * 1e6:.4g} us")
    result |= report_statistics(config, blocks, console)
    if folder is not None:
        compiled = sampler.compiled, sampler.compile_seconds
        timing.write_report(folder, "hmc", *compiled, sampler.step, console)
    return result | {
        "chain_steps_per_second": result["items_per_second"] * config.number_of_chains,
        "checked": {"rows": config.number_of_chains, "errors": errors, "bounds": BOUNDS},
        "compile_seconds": sampler.compile_seconds,
        "warm_up_seconds": warm_up,
        "dtype": "float32",
        "mode": "sampling",
        "device": describe_device(device),
        "config": to_jsonable(config),
        "environment": describe_environment(),
    }


def check(config: Hmc, target: targets.Target, platform: str) -> dict[str, float]:
    """One trajectory of every chain against a textbook leapfrog in float64."""
    momentum = jax.random.normal(stream(jax.random.key(config.seed), "check", 0), target.start.shape)

    def trajectory(start: Array, momentum: Array, data: Any) -> tuple[Array, Array]:
        gradient = sampling.gradient(target, data)
        state = hmc.init(start, gradient)
        steps = config.leapfrog_step_size, config.leapfrog_steps
        end, turned = hmc.leapfrog(gradient, state, momentum, *steps)
        return end.position, hmc.energy(end, turned) - hmc.energy(state, momentum)

    with matmul_precision("float32", False, platform):
        position, change = jax.jit(trajectory)(target.start, momentum, target.data)
    expected, expected_change, scale = textbook_trajectory(config, target, np.float64(momentum))
    errors = {
        "position": float(np.linalg.norm(position - expected) / np.linalg.norm(expected)),
        "energy": float(np.max(np.abs(change - expected_change) / scale)),
    }
    for name, error in errors.items():
        if not error <= BOUNDS[name]:
            raise WrongResult(
                f"HMC: wrong result, not timed: the {name} after one trajectory is off by {error:.3g} against "
                f"float64, the limit is {BOUNDS[name]:g}"
            )
    return errors


def textbook_trajectory(config: Hmc, target: targets.Target, momentum: Any) -> tuple[Any, Any, Any]:
    """End point, energy change and energy scale of each chain by kick, drift, kick: two gradients a leapfrog."""
    start, data = jax.tree.map(np.float64, (target.start, target.data))
    size, q, p = config.leapfrog_step_size, start, momentum
    for _ in range(config.leapfrog_steps):
        p = p + size / 2 * target.reference(data, q)[1]
        q = q + size * p
        p = p + size / 2 * target.reference(data, q)[1]
    before, after = target.reference(data, start)[0], target.reference(data, q)[0]
    change = (p**2).sum(-1) / 2 - after - (momentum**2).sum(-1) / 2 + before
    return q, change, 1 + np.maximum(np.abs(before), np.abs(after))


def time_steps(
    config: Hmc, sampler: sampling.HmcLoop, console: Console
) -> tuple[list[list[float]], sampling.Blocks]:
    """Seconds of every call, repeat by repeat, each said as it comes; and the means of all blocks."""
    repeats, calls = [], []
    with console.progress("HMC", config.repeat * config.steps) as bar:
        for _ in range(config.repeat):
            seconds = []
            for _ in range(config.steps):
                start = time.perf_counter()
                calls.append(sampler.step())
                seconds.append(time.perf_counter() - start)
                bar.advance()
                console.say(f"{seconds[-1]:.6f} sec/itr. {config.hmc_steps / seconds[-1]:.2f} hmc steps/sec")
            repeats.append(seconds)
    return repeats, sampling.Blocks(*(np.concatenate(leaves) for leaves in zip(*calls, strict=True)))
