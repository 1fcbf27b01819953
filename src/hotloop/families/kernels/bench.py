"""One layer benchmark from beginning to end: build, compile, check, warm up, time, report.

What a kernel computes, how it is made ready and how figures are made is elsewhere; this is the order of
things.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine.device import REPLICA, describe_environment
from hotloop.engine.keys import stream
from hotloop.engine.measure import ceilings, describe_device
from hotloop.engine.progress import Console
from hotloop.families.kernels import check, program, records, timing
from hotloop.families.kernels.catalogue import build
from hotloop.families.kernels.config import Layer, LstmMulti
from hotloop.families.kernels.explain import explanations
from hotloop.families.kernels.kernel import Kernel
from hotloop.families.kernels.latency import latency
from hotloop.families.kernels.prepare import Bench, choose_dtype, find_place, prepare
from hotloop.options import to_jsonable
from hotloop.rehearsal import begin_work


def run(config: Layer, device: jax.Device, console: Console) -> dict[str, Any]:
    """Check, then time one layer; the result is what `--json` prints."""
    place = find_place(config, device)
    dtype = choose_dtype(config, device)
    mode = "training" if config.train else "inference"
    folder = records.report_folder(config, mode, console)
    kernel = build(config)
    for line in announcement(config, kernel, dtype, device):
        console.say(line)
    begin_work("compiling the layer")
    with console.progress(kernel.title):
        bench = prepare(config, kernel, place, dtype)
    if config.save_graph:
        records.save_graph(config, bench.program.lowered_text(), bench.program.compiled, console)
    with console.progress("checking against float64"):
        checked = check_training(bench) if config.train else None
        start = time.perf_counter()
        first = bench.step()
        warm_up = time.perf_counter() - start
        checked = checked or check_inference(bench, first)
    console.say(str(checked))
    console.say(f"compiled in {bench.program.compile_seconds:.3f} s, warm-up {warm_up:.3f} s")
    repeats = time_steps(bench, console)
    work = timing.Work(
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
        **({"latency_ms": latency(bench)} if isinstance(config, LstmMulti) else {}),
        **(losses(bench) if config.train else {}),
    }
    for line in [*timing.lines(result, "items/sec"), *outcome(result)]:
        console.say(line)
    if folder is not None:
        args = bench.program.compiled, bench.program.compile_seconds
        records.write_report(folder, mode, *args, bench.step, console)
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
    axis = REPLICA if mesh_ else None
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


def time_steps(bench: Bench, console: Console) -> list[list[float]]:
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


def losses(bench: Bench) -> dict[str, float]:
    """Mean loss over the first and over the last round of the pool: the same batches both times."""
    every = np.concatenate(bench.losses)
    batches = bench.feed.batches
    return {"loss_first": float(every[:batches].mean()), "loss_last": float(every[-batches:].mean())}


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
