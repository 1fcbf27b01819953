"""A layer benchmark made ready: devices, number type, parameters, data and the compiled loop.

It decides where and in what type; nothing is checked or timed here.

How long one batch takes when it comes alone: calls of one iteration, each timed by itself.
One layer benchmark from beginning to end: build, compile, check, warm up, time, report.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine.device import REPLICA, describe_environment, pick_device, replica_mesh
from hotloop.engine.keys import stream
from hotloop.engine.measure import ceilings, describe_device
from hotloop.engine.progress import Console
from hotloop.errors import OptionError
from hotloop.families.kernels import check, model, timing
from hotloop.families.kernels.catalogue import build
from hotloop.families.kernels.config import LayerOptions, LstmMulti, explain_idle_options
from hotloop.families.kernels.data import Place, PoolFromHost, PoolOnDevice, make_pool
from hotloop.families.kernels.kernel import Kernel
from hotloop.families.kernels.model import CompiledCall
from hotloop.options import to_jsonable
from hotloop.rehearsal import begin_work

AUTO_DTYPE = {"gpu": "float16", "tpu": "bfloat16", "cpu": "float32"}


@dataclass
class LayerBenchmark:
    """A benchmark ready to run: what stays the same, and the state that goes from call to call."""

    config: LayerOptions
    kernel: Kernel
    place: Place
    dtype: str
    key: Array
    feed: PoolOnDevice | PoolFromHost
    params: Any
    count: Array
    program: CompiledCall
    losses: list[Array] = field(default_factory=list)
    """Of every update so far, call by call, when it trains."""

    def step(self) -> Sequence[Array]:
        """One step of `batches_per_step` iterations, finished when this returns."""
        self.params, self.count, results = self.feed.step(self.program, self.params, self.count)
        for result in results:
            result.block_until_ready()
        if self.config.train:
            self.losses += results
        return results


def find_place(config: LayerOptions, device: jax.Device) -> Place:
    """The devices that the options ask for, or an error before anything is compiled."""
    if config.replicas > 1:
        return Place(device, replica_mesh(config.replicas, device.platform))
    return Place(pick_device(config.device_id, device.platform), None)


def choose_dtype(config: LayerOptions, device: jax.Device) -> str:
    """The number type: as given, or what suits the platform."""
    dtype = AUTO_DTYPE.get(device.platform, "float32") if config.dtype == "auto" else config.dtype
    if config.enable_half_partials and dtype == "float32":
        raise OptionError("--enable-half-partials: needs 16-bit numbers; use --dtype float16 or bfloat16")
    return dtype


def prepare(config: LayerOptions, kernel: Kernel, place: Place, dtype: str) -> LayerBenchmark:
    """Parameters, data and the compiled loop, all in their places."""
    key = jax.random.key(config.seed)
    params = jax.device_put(kernel.init(stream(key, "init", 0), dtype), place.everywhere())
    count = jax.device_put(jnp.uint32(0), place.everywhere())
    pool = make_pool(kernel, config, dtype)
    source = PoolFromHost if config.use_generated_data else PoolOnDevice
    feed = source(pool, config.batches_per_step, place.pool(kernel, pool))
    compiled = compile_loop(
        config, kernel, place, dtype, key, (params, count, feed.pool), feed.iterations_a_call
    )
    return LayerBenchmark(config, kernel, place, dtype, key, feed, params, count, compiled)


def compile_loop(
    config: LayerOptions,
    kernel: Kernel,
    place: Place,
    dtype: str,
    key: Array,
    arguments: Any,
    iterations: int,
) -> CompiledCall:
    """The timed call with so many iterations."""
    if config.train:
        axis = REPLICA if place.mesh else None
        call = model.training(kernel, iterations, config.learning_rate, stream(key, "rounding", 0), axis)
        spec = model.P0
    else:
        call, spec = model.inference(kernel, iterations), model.rows_on(kernel.row_axes["y"])
    with model.matmul_precision(dtype, config.enable_half_partials, place.device.platform):
        return model.compile_call(call, arguments, kernel, place.mesh, spec)


MOST_CALLS, MOST_SECONDS = 200, 2.0


def measure_latency(bench: LayerBenchmark) -> dict[str, float]:
    """Milliseconds from handing over one batch to its finished answer: percentiles over calls of one iteration."""
    config, kernel, place = bench.config, bench.kernel, bench.place
    pool = make_pool(kernel, config, bench.dtype)
    batches = PoolOnDevice(pool, 1, place.pool(kernel, pool))
    params, count = jax.tree.map(jnp.copy, (bench.params, bench.count))
    single = compile_loop(config, kernel, place, bench.dtype, bench.key, (params, count, batches.pool), 1)
    times: list[float] = []
    while len(times) < MOST_CALLS and sum(times) < MOST_SECONDS:
        start = time.perf_counter()
        params, count, (result,) = batches.step(single, params, count)
        result.block_until_ready()
        times.append(time.perf_counter() - start)
    p50, p90, p99 = (float(1e3 * value) for value in np.percentile(times[1:] or times, [50, 90, 99]))
    return {"p50": p50, "p90": p90, "p99": p99, "calls": len(times[1:] or times)}


def run(config: LayerOptions, device: jax.Device, console: Console) -> dict[str, Any]:
    """Check, then time one layer; the result is what `--json` prints."""
    place = find_place(config, device)
    dtype = choose_dtype(config, device)
    mode = "training" if config.train else "inference"
    folder = timing.report_folder(config, mode, console)
    kernel = build(config)
    for line in announcement_lines(config, kernel, dtype, device):
        console.say(line)
    begin_work("compiling the layer")
    with console.progress(kernel.title):
        bench = prepare(config, kernel, place, dtype)
    if config.save_graph:
        timing.save_graph(config, bench.program.lowered_text(), bench.program.compiled, console)
    with console.progress("checking against float64"):
        checked = check_training(bench) if config.train else None
        start = time.perf_counter()
        first = bench.step()
        warm_up = time.perf_counter() - start
        checked = checked or check_inference(bench, first)
    console.say(str(checked))
    console.say(f"compiled in {bench.program.compile_seconds:.3f} s, warm-up {warm_up:.3f} s")
    repeats = time_steps(bench, console)
    work = timing.TimedWork(
        config.batches_per_step,
        kernel.items * config.batches_per_step * config.replicas,
        kernel.cost(jnp.dtype(dtype).itemsize),
        config.replicas,
        dtype,
    )
    with console.progress("measuring the device"):
        limits = ceilings(device)
    result = {
        **timing.figures(repeats, work, limits),
        **({"latency_ms": measure_latency(bench)} if isinstance(config, LstmMulti) else {}),
        **(summarise_losses(bench) if config.train else {}),
    }
    for line in [*timing.figure_lines(result, "items/sec"), *outcome_lines(result)]:
        console.say(line)
    if folder is not None:
        args = bench.program.compiled, bench.program.compile_seconds
        timing.write_report(folder, mode, *args, bench.step, console)
    return result | {
        "checked": to_jsonable(checked),
        "compile_seconds": bench.program.compile_seconds,
        "warm_up_seconds": warm_up,
        "dtype": dtype,
        "mode": mode,
        "device": describe_device(device),
        "config": to_jsonable(config),
        "environment": describe_environment(),
    }


def announcement_lines(config: LayerOptions, kernel: Kernel, dtype: str, device: jax.Device) -> list[str]:
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
        *explain_idle_options(config),
    ]


def find_bounds(bench: LayerBenchmark) -> check.Bounds:
    """How far the results of this type may be off."""
    return check.BOUNDS[bench.dtype + " partials" * bench.config.enable_half_partials]


def all_flops(bench: LayerBenchmark) -> float:
    """Operations of one iteration on all replicas."""
    return bench.kernel.cost(1).flops * bench.config.replicas


def check_inference(bench: LayerBenchmark, results: Sequence[Array]) -> check.CheckResult:
    """The timed program's own last output against the reference."""
    x = bench.feed.batch(int(bench.count) - 1)["x"]
    return check.check_output(
        bench.kernel, bench.params, x, results[-1], all_flops(bench), find_bounds(bench)
    )


def check_training(bench: LayerBenchmark) -> check.CheckResult:
    """One update, by the function that the timed program repeats, against the reference."""
    config, kernel, mesh_ = bench.config, bench.kernel, bench.place.mesh
    axis = REPLICA if mesh_ else None
    update = model.updater(kernel, config.learning_rate, stream(bench.key, "rounding", 0), axis)
    batch = bench.feed.batch(0)
    if mesh_ is not None:
        specs = {name: model.rows_on(kernel.row_axes[name]) for name in batch}
        update = model.over_replicas(update, mesh_, (model.P0, model.P0, specs), model.P0)

    def once(params: Any, batch: Any) -> Any:
        with model.matmul_precision(bench.dtype, config.enable_half_partials, bench.place.device.platform):
            return jax.jit(update)(params, bench.count, batch)

    return check.check_update(
        kernel, bench.params, once, batch, all_flops(bench), config.learning_rate, find_bounds(bench)
    )


def time_steps(bench: LayerBenchmark, console: Console) -> list[list[float]]:
    """Seconds of every step, repeat by repeat, each said as it comes."""
    config, repeats = bench.config, []
    items = bench.kernel.items * config.batches_per_step * config.replicas
    with console.progress(bench.kernel.title, config.repeat * config.steps) as bar:
        for _ in range(config.repeat):
            seconds = []
            for _ in range(config.steps):
                start = time.perf_counter()
                bench.step()
                seconds.append(time.perf_counter() - start)
                bar.advance()
                console.say(f"{seconds[-1]:.6f} sec/itr. {items / seconds[-1]:.2f} items/sec")
            repeats.append(seconds)
    return repeats


def summarise_losses(bench: LayerBenchmark) -> dict[str, float]:
    """Mean loss over the first and over the last round of the pool: the same batches both times."""
    every = np.concatenate(bench.losses)
    batches = bench.feed.batches
    return {"loss_first": float(every[:batches].mean()), "loss_last": float(every[-batches:].mean())}


def outcome_lines(result: dict[str, Any]) -> list[str]:
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
