"""One layer benchmark from beginning to end: build, compile, check, warm up, time, report.

What a kernel computes, how its batches arrive and how figures are made is elsewhere; this is the order of
things.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine import mesh
from hotloop.engine.ceilings import ceilings, describe
from hotloop.engine.environment import environment
from hotloop.engine.keys import stream
from hotloop.errors import OptionError
from hotloop.families.kernels import check, program, records, timing
from hotloop.families.kernels.catalogue import build
from hotloop.families.kernels.config import Layer, LstmMulti
from hotloop.families.kernels.console import Console
from hotloop.families.kernels.data import FromHost, OnDevice, Place, make_pool
from hotloop.families.kernels.explain import explanations
from hotloop.families.kernels.kernel import Kernel
from hotloop.options import plain

AUTO_DTYPE = {"gpu": "float16", "tpu": "bfloat16", "cpu": "float32"}
LATENCY_CALLS, LATENCY_SECONDS = 200, 2.0


@dataclass
class Bench:
    """A benchmark ready to run: what stays the same, and the state that goes from call to call."""

    config: Layer
    kernel: Kernel
    place: Place
    dtype: str
    key: Array
    feed: OnDevice | FromHost
    params: Any
    count: Array
    program: program.Program

    def step(self) -> Sequence[Array]:
        """One step of `batches_per_step` iterations, finished when this returns."""
        self.params, self.count, results = self.feed.step(self.program, self.params, self.count)
        jax.block_until_ready(results)
        return results


def run(config: Layer, device: jax.Device, console: Console) -> dict[str, Any]:
    """Check, then time one layer; the result is what `--json` prints."""
    place = find_place(config, device)
    dtype = choose_dtype(config, device)
    mode = "training" if config.train else "inference"
    folder = records.report_folder(config, mode, console)
    kernel = build(config)
    for line in announcement(config, kernel, dtype, device):
        console.say(line)
    bench = prepare(config, kernel, place, dtype)
    if config.save_graph:
        records.save_graph(bench.program.lowered_text(), bench.program.compiled, console)
    checked = check_training(bench) if config.train else None
    start = time.perf_counter()
    first = bench.step()
    warm_up = time.perf_counter() - start
    checked = checked or check_inference(bench, first)
    console.say(str(checked))
    console.say(f"compiled in {bench.program.compile_seconds:.3f} s, warm-up {warm_up:.3f} s")
    repeats, last = time_steps(bench, console)
    work = timing.Work(
        config.batches_per_step,
        kernel.items * config.batches_per_step * config.replicas,
        kernel.cost(jnp.dtype(dtype).itemsize),
        config.replicas,
        dtype,
    )
    result = {
        **timing.figures(repeats, work, ceilings(device)),
        **({"latency_ms": latency(bench)} if isinstance(config, LstmMulti) else {}),
        **(losses(bench, first, last) if config.train else {}),
    }
    for line in [*timing.lines(result, "items/sec"), *outcome(result)]:
        console.say(line)
    if folder is not None:
        args = bench.program.compiled, bench.program.compile_seconds
        records.write_report(folder, mode, *args, bench.step, console)
    return result | {
        "checked": plain(checked),
        "compile_seconds": bench.program.compile_seconds,
        "warm_up_seconds": warm_up,
        "dtype": dtype,
        "mode": mode,
        "device": describe(device),
        "config": plain(config),
        "environment": environment(),
    }


def find_place(config: Layer, device: jax.Device) -> Place:
    """The devices that the options ask for, or an error before anything is compiled."""
    if config.replicas > 1:
        return Place(device, mesh.replicas(config.replicas, device.platform))
    return Place(mesh.device(config.device_id, device.platform), None)


def choose_dtype(config: Layer, device: jax.Device) -> str:
    """The number type: as given, or what suits the platform."""
    dtype = AUTO_DTYPE.get(device.platform, "float32") if config.dtype == "auto" else config.dtype
    if config.enable_half_partials and dtype == "float32":
        raise OptionError("--enable-half-partials: needs 16-bit numbers; use --dtype float16 or bfloat16")
    return dtype


def announcement(config: Layer, kernel: Kernel, dtype: str, device: jax.Device) -> list[str]:
    """The banner, and a line for each option that needs a word."""
    sizes = ", ".join(f"{name} {value}" for name, value in kernel.sizes.items())
    source = "sent from the host" if config.use_generated_data else "made on the device"
    chosen = f"{dtype} (auto on {device.platform})" if config.dtype == "auto" else dtype
    return [
        kernel.title,
        "Training" if config.train else "Inference",
        f"Batch size: {config.batch_size}, batches per step: {config.batches_per_step}, steps: {config.steps}",
        f"{sizes[0].upper()}{sizes[1:]}",
        f"{chosen}, {config.replicas} replica{'s' * (config.replicas > 1)}, "
        f"{'zeros' if config.use_zero_values else 'data'} {source}",
        *([kernel.note] if kernel.note else []),
        *explanations(config),
    ]


def prepare(config: Layer, kernel: Kernel, place: Place, dtype: str) -> Bench:
    """Parameters, data and the compiled loop, all in their places."""
    key = jax.random.key(config.seed)
    params = jax.device_put(kernel.init(stream(key, "init", 0), dtype), place.everywhere())
    count = jax.device_put(jnp.int32(0), place.everywhere())
    pool = make_pool(kernel, config, dtype, key, place)
    feed: OnDevice | FromHost = OnDevice(pool, config.batches_per_step)
    if config.use_generated_data:
        feed = FromHost(pool, config.batches_per_step, place.pool(kernel, pool))
    compiled = compile_loop(
        config, kernel, place, dtype, key, (params, count, feed.pool), feed.iterations_a_call
    )
    return Bench(config, kernel, place, dtype, key, feed, params, count, compiled)


def compile_loop(
    config: Layer, kernel: Kernel, place: Place, dtype: str, key: Array, arguments: Any, iterations: int
) -> program.Program:
    """The timed call with so many iterations."""
    if config.train:
        axis = mesh.REPLICA if place.mesh else None
        call = program.training(kernel, iterations, config.learning_rate, stream(key, "rounding", 0), axis)
        spec = program.P0
    else:
        call, spec = program.inference(kernel, iterations), program.rows_on(kernel.row_axes["y"])
    with program.arithmetic(dtype, config.enable_half_partials, place.device.platform):
        return program.compile_call(call, arguments, kernel, place.mesh, spec)


def bounds(bench: Bench) -> check.Bounds:
    """How far the results of this type may be off."""
    return check.BOUNDS[bench.dtype + " partials" * bench.config.enable_half_partials]


def all_flops(bench: Bench) -> float:
    """Operations of one iteration on all replicas."""
    return bench.kernel.cost(1).flops * bench.config.replicas


def check_inference(bench: Bench, results: Sequence[Array]) -> check.Checked:
    """The timed program's own last output against the reference."""
    x = bench.feed.batch(int(bench.count) - 1)["x"]
    return check.check_output(bench.kernel, bench.params, x, results[-1], all_flops(bench), bounds(bench))


def check_training(bench: Bench) -> check.Checked:
    """One update, by the function that the timed program repeats, against the reference."""
    config, kernel, mesh_ = bench.config, bench.kernel, bench.place.mesh
    axis = mesh.REPLICA if mesh_ else None
    update = program.updater(kernel, config.learning_rate, stream(bench.key, "rounding", 0), axis)
    batch = bench.feed.batch(0)
    if mesh_ is not None:
        specs = {name: program.rows_on(kernel.row_axes[name]) for name in batch}
        update = program.over_replicas(update, mesh_, (program.P0, program.P0, specs), program.P0)

    def once(params: Any, batch: Any) -> Any:
        with program.arithmetic(bench.dtype, config.enable_half_partials, bench.place.device.platform):
            return jax.jit(update)(params, bench.count, batch)

    return check.check_update(
        kernel, bench.params, once, batch, all_flops(bench), config.learning_rate, bounds(bench)
    )


def time_steps(bench: Bench, console: Console) -> tuple[list[list[float]], Sequence[Array]]:
    """Seconds of every step, repeat by repeat, each said as it comes; and the last step's results."""
    config, repeats = bench.config, []
    items = bench.kernel.items * config.batches_per_step * config.replicas
    results: Sequence[Array] = []
    with console.progress(bench.kernel.title, config.repeat * config.steps) as bar:
        for _ in range(config.repeat):
            seconds = []
            for _ in range(config.steps):
                start = time.perf_counter()
                results = bench.step()
                seconds.append(time.perf_counter() - start)
                bar.advance()
                console.say(f"{seconds[-1]:.6f} sec/itr. {items / seconds[-1]:.2f} items/sec")
            repeats.append(seconds)
    return repeats, results


def latency(bench: Bench) -> dict[str, float]:
    """Milliseconds from handing over one batch to its finished answer, call by call, and amortised over a step's loop."""
    config, place = bench.config, bench.place
    pool = make_pool(bench.kernel, config, bench.dtype, bench.key, place)
    arguments = bench.params, bench.count, pool
    single = compile_loop(config, bench.kernel, place, bench.dtype, bench.key, arguments, 1)
    bench.params, bench.count, result = single(bench.params, bench.count, pool)
    result.block_until_ready()
    times: list[float] = []
    while len(times) < LATENCY_CALLS and sum(times) < LATENCY_SECONDS:
        start = time.perf_counter()
        bench.params, bench.count, result = single(bench.params, bench.count, pool)
        result.block_until_ready()
        times.append(time.perf_counter() - start)
    p50, p90, p99 = (float(1e3 * value) for value in np.percentile(times, [50, 90, 99]))
    return {"p50": p50, "p90": p90, "p99": p99, "calls": len(times)}


def losses(bench: Bench, first: Sequence[Array], last: Sequence[Array]) -> dict[str, float]:
    """Mean loss over the first and over the last round of the pool, the same batches both times."""
    batches = bench.feed.batches
    begin, end = np.concatenate(first)[:batches], np.concatenate(last)[-batches:]
    return {"loss_first": float(begin.mean()), "loss_last": float(end.mean())}


def outcome(result: dict[str, Any]) -> list[str]:
    """Lines for what only some kernels have."""
    text = []
    if "latency_ms" in result:
        ms = result["latency_ms"]
        text.append(
            f"latency of one batch: p50 {ms['p50']:.4g} ms, p90 {ms['p90']:.4g} ms, p99 {ms['p99']:.4g} ms"
        )
    if "loss_first" in result:
        text.append(f"loss: first {result['loss_first']:.6g}, last {result['loss_last']:.6g}")
    return text
