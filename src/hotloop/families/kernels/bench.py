"""One layer benchmark from beginning to end: devices, number type, compile, check, warm up, time, report.

What a kernel computes is in `catalogue`, a step of the loop in `model`, how figures are made in `timing`.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.engine.device import pick_device, replica_mesh
from hotloop.engine.keys import stream
from hotloop.engine.loop import CallMetrics, Program, copy_state
from hotloop.engine.progress import Console
from hotloop.errors import OptionError
from hotloop.families.kernels import model, timing
from hotloop.families.kernels.check import check_inference, check_training
from hotloop.families.kernels.config import LayerOptions, LstmMulti, explain_idle_options
from hotloop.families.kernels.data import PoolFromHost, PoolOnDevice
from hotloop.families.kernels.model import Job
from hotloop.options import to_jsonable
from hotloop.rehearsal import begin_work

AUTO_DTYPE = {"gpu": "float16", "tpu": "bfloat16", "cpu": "float32"}
MOST_CALLS, MOST_SECONDS = 200, 2.0
"""Calls of one iteration that a latency is taken from, and how long they may last."""


@dataclass
class LayerBenchmark:
    """A benchmark ready to run: what stays the same, and the state that goes from call to call."""

    job: Job
    feed: PoolOnDevice
    program: Program
    state: model.State
    iterations: int = 0  # made so far
    metrics: list[CallMetrics] = field(default_factory=list)  # of every call so far

    def step(self) -> None:
        """`batches_per_step` iterations, finished when this returns."""
        for _ in range(self.job.config.batches_per_step // self.program.updates_per_call):
            self.call()

    def call(self) -> None:
        """One call of the program, finished when this returns; what the next one needs is sent meanwhile."""
        count = self.program.updates_per_call
        self.state, metrics = self.program(self.state, self.iterations, count)
        self.metrics.append(metrics)
        self.iterations += count
        self.feed.prepare(self.iterations)
        jax.block_until_ready(self.state)  # type: ignore[no-untyped-call]

    def losses(self) -> np.ndarray[Any, Any]:
        """Of every update so far, when it trains."""
        return np.concatenate([metrics["loss"] for metrics in self.metrics])


def run(config: LayerOptions, device: jax.Device, console: Console) -> dict[str, Any]:
    """Check, then time one layer; the result is what `--json` prints."""
    job = make_job(config, device)
    kernel, mode = job.kernel, "training" if config.train else "inference"
    folder = timing.report_folder(config, mode, console)
    _announce(job, device, console)
    begin_work("compiling the layer")
    with console.progress(kernel.title):
        benchmark = prepare(job)
    program = benchmark.program
    if config.save_graph:
        with job.matmul_precision():
            text = program.lower(benchmark.state).as_text()
        timing.save_graph(config, text, program.compiled, console)
    with console.progress("checking against float64"):
        checked = check_training(job, benchmark.state, benchmark.feed) if config.train else None
        warm_up, _ = timing.time_step(benchmark.step)
        checked = checked or check_inference(job, benchmark.state, benchmark.feed)
    console.say(str(checked))
    compile_seconds = program.lower_seconds + program.compile_seconds
    console.say(f"compiled in {compile_seconds:.3f} s, warm-up {warm_up:.3f} s")
    work = timing.TimedWork(
        title=kernel.title,
        unit="items/sec",
        iterations=config.batches_per_step,
        items=kernel.items * config.batches_per_step * config.replicas,
        cost=kernel.cost(jnp.dtype(job.dtype).itemsize),
        replicas=config.replicas,
        dtype=job.dtype,
    )
    result, _ = timing.measure(benchmark.step, work, config, device, console)
    if isinstance(config, LstmMulti):
        result["latency_ms"] = ms = measure_latency(benchmark)
        console.say(
            f"latency of one batch: p50 {ms['p50']:.4g} ms, p90 {ms['p90']:.4g} ms, p99 {ms['p99']:.4g} ms"
        )
    if config.train:
        # Means over the first and over the last round of the pool: the same batches both times.
        every, batches = benchmark.losses(), benchmark.feed.batches
        result["loss_first"], result["loss_last"] = (
            float(part.mean()) for part in (every[:batches], every[-batches:])
        )
        console.say(f"loss: first {result['loss_first']:.6g}, last {result['loss_last']:.6g}")
    if folder is not None:
        timing.write_report(folder, mode, program.compiled, compile_seconds, benchmark.step, console)
    return {
        **result,
        "checked": to_jsonable(checked),
        "compile_seconds": compile_seconds,
        "warm_up_seconds": warm_up,
        "dtype": job.dtype,
        "mode": mode,
        **timing.circumstances(config, device),
    }


def _announce(job: Job, device: jax.Device, console: Console) -> None:
    """The banner, and a line for each option that needs a word."""
    config, kernel = job.config, job.kernel
    sizes = ", ".join(f"{name} {value}" for name, value in kernel.sizes.items())
    source = "sent from the host" if config.use_generated_data else "made on the device"
    chosen = f"{job.dtype} (auto on {device.platform})" if config.dtype == "auto" else job.dtype
    console.say(kernel.title)
    console.say("Training" if config.train else "Inference")
    console.say(
        f"Batch size: {config.batch_size}, batches per step: {config.batches_per_step}, steps: {config.steps}"
    )
    console.say(f"{sizes[0].upper()}{sizes[1:]}")
    console.say(
        f"{chosen}, {config.replicas} replica{'s' * (config.replicas > 1)}, "
        f"{'zeros' if config.use_zero_values else 'data'} {source}"
    )
    if kernel.note:
        console.say(kernel.note)
    if config.train and config.optimizer != "sgd":
        console.say(
            f"optimiser {config.optimizer}: the cost below counts sgd's update, and no state of others"
        )
    for line in explain_idle_options(config):
        console.say(line)


def make_job(config: LayerOptions, device: jax.Device) -> Job:
    """The options with the devices and the number type that they come to, or an error before anything is compiled."""
    replicas = replica_mesh(config.replicas, device.platform) if config.replicas > 1 else None
    dtype = AUTO_DTYPE.get(device.platform, "float32") if config.dtype == "auto" else config.dtype
    if config.enable_half_partials and dtype == "float32":
        raise OptionError("--enable-half-partials: needs 16-bit numbers; use --dtype float16 or bfloat16")
    return Job(config, dtype, pick_device(config.device_id, device.platform), replicas)


def prepare(job: Job) -> LayerBenchmark:
    """Parameters, data and the compiled loop, all in their places."""
    feed = PoolFromHost(job) if job.config.use_generated_data else PoolOnDevice(job)
    key = stream(jax.random.key(job.config.seed), "init", 0)
    state = model.begin(job, key, feed.at(0)["x"])
    return _compile(job, feed, min(job.config.batches_per_step, feed.longest_call), state)


def _compile(job: Job, feed: PoolOnDevice, count: int, state: model.State) -> LayerBenchmark:
    step = model.train_on_pool(job) if job.config.train else model.infer_on_pool(job)
    # Every call has the same length. Built in, as it is elsewhere, it makes the loop on a CPU the one that was always
    # timed, and its number of turns stands in the program's text.
    program = Program(step, feed, count, jax.random.key(job.config.seed), loop="scan")
    try:
        with job.matmul_precision():
            program.compile(state)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        # What jax and XLA say of a way of summing (F16_F16_F16) that the device has not.
        if "not supported by dot_general" in str(error) or "ALG_DOT_" in str(error):
            reason = "this device cannot sum in 16 bits; leave it out"
            raise OptionError(f"--enable-half-partials: {reason}") from error
        raise
    return LayerBenchmark(job, feed, program, state)


def measure_latency(benchmark: LayerBenchmark) -> dict[str, float]:
    """Milliseconds from handing over one batch to its finished answer: percentiles over calls of one iteration.

    The loop's throughput says what a batch costs among many; this is what a caller waits for, dispatch included.
    """
    job = benchmark.job
    single = _compile(job, PoolOnDevice(job), 1, copy_state(benchmark.state))
    times: list[float] = []
    while len(times) < MOST_CALLS and sum(times) < MOST_SECONDS:
        times.append(timing.time_step(single.call)[0])
    counted = times[1:] or times
    p50, p90, p99 = (float(1e3 * value) for value in np.percentile(counted, [50, 90, 99]))
    return {"p50": p50, "p90": p90, "p99": p99, "calls": len(counted)}
