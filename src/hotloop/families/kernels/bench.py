"""One layer benchmark from beginning to end: devices, number type, compile, check, warm up, time, report.

A kernel's numbers are held against the float64 reference before it may be timed. Errors are norms of differences
relative to the reference's norm. Rows are independent, so an output is compared on as many rows as a budget of
operations allows; an update is compared on a batch that repeats a few rows, which has the same mean loss and gradients
as those rows alone while the compiled program keeps its full shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hotloop.engine.device import device_mesh, pick_device
from hotloop.engine.keys import stream
from hotloop.engine.loop import CallMetrics, Program, copy_state
from hotloop.engine.progress import Console
from hotloop.errors import OptionError, WrongResult
from hotloop.families.kernels import model, timing
from hotloop.families.kernels.config import LayerOptions, LstmMulti, explain_idle_options
from hotloop.families.kernels.model import Job, State
from hotloop.families.kernels.pool import BatchesApart, PoolOnDevice, make_feed
from hotloop.families.kernels.reference import in_float64
from hotloop.options import to_jsonable
from hotloop.rehearsal import begin_work

AUTO_DTYPE = {"gpu": "float16", "tpu": "bfloat16", "cpu": "float32"}
MOST_CALLS, MOST_SECONDS = 200, 2.0  # of one iteration, that a latency is taken from


REFERENCE_FLOPS = 4e9  # about a second of float64 on one core
BOUNDS = {
    "float32": {"output": 1e-5, "gradient": 1e-5, "parameters": 1e-6},
    "float16": {"output": 2e-3, "gradient": 5e-3, "parameters": 5e-4},
    "bfloat16": {"output": 1.6e-2, "gradient": 4e-2, "parameters": 4e-3},
    "float16 partials": {"output": 2e-2, "gradient": 5e-2, "parameters": 5e-4},
    "bfloat16 partials": {"output": 1.6e-1, "gradient": 4e-1, "parameters": 4e-3},
}
"""The largest relative error of each result that is still a correct kernel; a loss is held to the output's.
float32 is summed in float32 on every device (never TF32). 16-bit types round each layer's result to 2^-11 or
2^-8; chains of layers and steps add up a few such roundings, and gradients run along the chain twice. With half
partials the sums themselves are rounded at each of up to thousands of terms. Parameters are those after one update,
off by their own stochastic rounding: in the mean square half a gap at most."""


STEP_ERROR = 1e-3
"""What an optimiser that divides by roots or orthogonalises may add, as a share of its step: near a gradient of zero
float32 and float64 part."""


@dataclass
class LayerBenchmark:
    job: Job
    feed: PoolOnDevice
    program: Program
    state: State
    iterations: int = 0  # made so far
    metrics: list[CallMetrics] = field(default_factory=list)  # of every call so far

    @property
    def iterations_a_call(self) -> int:
        return self.program.updates_per_call * self.feed.iterations_a_step

    def step(self) -> None:
        """`batches_per_step` iterations, finished when this returns."""
        for _ in range(self.job.config.batches_per_step // self.iterations_a_call):
            self.call()

    def call(self) -> None:
        """One call of the program, finished when this returns; what the next one needs is sent meanwhile."""
        count = self.program.updates_per_call
        self.state, metrics = self.program(self.state, self.iterations, count)
        self.metrics.append(metrics)
        self.iterations += self.iterations_a_call
        self.feed.prepare(self.iterations)
        jax.block_until_ready(self.state)  # type: ignore[no-untyped-call]

    def losses(self) -> np.ndarray[Any, Any]:
        """Of every iteration."""
        return np.concatenate([metrics["loss"].ravel() for metrics in self.metrics])


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
    work = timing.TimedWork(
        title=kernel.title,
        mode=mode,
        unit="items/sec",
        iterations=config.batches_per_step,
        items=kernel.items * config.batches_per_step * config.replicas,
        cost=kernel.cost(jnp.dtype(job.dtype).itemsize),
        replicas=config.replicas,
        dtype=job.dtype,
    )
    result, _ = timing.measure(benchmark.step, work, config, device, console, compile_seconds, warm_up)
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
    return {**result, "checked": to_jsonable(checked)}


def _announce(job: Job, device: jax.Device, console: Console) -> None:
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
    replicas = device_mesh(config.replicas, platform=device.platform) if config.replicas > 1 else None
    dtype = AUTO_DTYPE.get(device.platform, "float32") if config.dtype == "auto" else config.dtype
    if config.enable_half_partials and dtype == "float32":
        raise OptionError("--enable-half-partials: needs 16-bit numbers; use --dtype float16 or bfloat16")
    return Job(config, dtype, pick_device(config.device_id, device.platform), replicas)


def prepare(job: Job) -> LayerBenchmark:
    feed = make_feed(job, job.config.batches_per_step)
    key = stream(jax.random.key(job.config.seed), "init", 0)
    state = model.begin(job, key, feed.at(0)["x"])
    return _compile(job, feed, min(job.config.batches_per_step, feed.longest_call), state)


def _compile(job: Job, feed: PoolOnDevice, count: int, state: State) -> LayerBenchmark:
    step = _choose_step(job, feed)
    # Every call has the same length. Built in, as it is elsewhere, it makes the loop on a CPU the one that was always
    # timed, and its number of turns stands in the program's text.
    turns = count // feed.iterations_a_step
    program = Program(step, feed, turns, jax.random.key(job.config.seed), loop="scan")
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


def _choose_step(job: Job, feed: PoolOnDevice) -> model.Step:
    if isinstance(feed, BatchesApart):
        return model.train_on_round(job) if job.config.train else model.infer_on_round(job)
    return model.train_on_pool(job) if job.config.train else model.infer_on_pool(job)


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


@dataclass(frozen=True)
class CheckResult:
    rows: int
    of_rows: int
    errors: Mapping[str, float]
    bounds: Mapping[str, float]

    def __str__(self) -> str:
        errors = ", ".join(
            f"{name} {error:.1e} (limit {self.bounds[name]:g})" for name, error in self.errors.items()
        )
        return f"checked against float64 on {self.rows} of {self.of_rows} rows: relative error {errors}"


def check_inference(job: Job, state: State, feed: PoolOnDevice) -> CheckResult:
    """The timed program's own last output against the reference's, on rows spread over the batch."""
    kernel, y = job.kernel, np.asarray(state["y"])
    x = feed.at(int(state["count"]) - 1)["x"]
    total = x.shape[kernel.row_axes["x"]]
    a_row = kernel.cost(1).flops * job.config.replicas / total
    rows = max(1, min(total, int(REFERENCE_FLOPS / a_row)))
    chosen = np.unique(np.linspace(0, total - 1, rows).round().astype(int))
    expected = in_float64(kernel.reference_apply, state["params"], x.take(chosen, kernel.row_axes["x"]))
    error = relative_error(y.take(chosen, kernel.row_axes["y"]), expected)
    return _judge(job, len(chosen), total, {"output": error})


def check_training(job: Job, state: State, feed: PoolOnDevice) -> CheckResult:
    """One update, by the functions that the timed program repeats: loss, gradients and new parameters.

    SGD's parameters are those of a step along the reference's gradients. Other rules may make much of the last bit of a
    gradient: theirs are those of the same optax chain, in float64, on the gradients that were found, which are compared
    by themselves.
    """
    kernel, batch, params = job.kernel, feed.at(0), state["params"]
    total = batch["x"].shape[kernel.row_axes["x"]]
    a_row = kernel.cost(1).flops * job.config.replicas / total
    rows = max((n for n in range(1, total + 1) if total % n == 0 and n * a_row <= REFERENCE_FLOPS), default=1)
    few = {name: np.asarray(leaf).take(range(rows), kernel.row_axes[name]) for name, leaf in batch.items()}
    tiled = {
        name: np.concatenate([leaf] * (total // rows), kernel.row_axes[name]) for name, leaf in few.items()
    }
    differentiate, update = model.gradients(job), model.update(job)

    @jax.jit
    def update_once(state: State, batch: Any) -> Any:
        loss, gradients = differentiate(state["params"], batch)
        return loss, gradients, update(state, batch, jax.random.key(job.config.seed))[0]["params"]

    with job.matmul_precision():
        found = update_once(state, kernel.rows_first(tiled))
    loss, gradients, new = jax.tree.map(np.asarray, found)
    expected_loss, expected = in_float64(jax.value_and_grad(kernel.reference_loss), params, few)

    def step(params: Any, gradients: Any) -> Any:
        chain, rate = job.optimiser, job.config.learning_rate
        steps, _ = chain.update(gradients, chain.init(params), params, rate=rate)
        return optax.apply_updates(params, steps), optax.tree.norm(steps) / optax.tree.norm(params)

    plain = job.config.optimizer == "sgd"
    moved, size = in_float64(step, params, expected if plain else gradients)
    errors = {
        "loss": relative_error(loss, expected_loss),
        "gradient": worst_leaf(gradients, expected),
        "parameters": worst_leaf(new, moved),
    }
    return _judge(job, rows, total, errors, 0.0 if plain else STEP_ERROR * float(size))


def relative_error(found: Any, expected: Any, floor: float = 0.0) -> float:
    """|found - expected| / max(|expected|, floor), in Euclidean norms; nan where anything found is nan."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    difference = float(np.linalg.norm(found - expected))
    size = max(float(np.linalg.norm(expected)), floor)
    return difference / size if size else difference


def worst_leaf(found: Any, expected: Any) -> float:
    """The largest relative error of a tree's leaves; a small leaf is measured against a tenth of the whole."""
    whole = float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(expected))))
    errors = jax.tree.map(lambda f, e: relative_error(f, e, 0.1 * whole), found, expected)
    return float(np.max(jax.tree.leaves(errors)))


def _judge(
    job: Job, rows: int, of_rows: int, errors: Mapping[str, float], step_error: float = 0.0
) -> CheckResult:
    all_bounds = BOUNDS[job.dtype + " partials" * job.config.enable_half_partials]
    bounds = {name: all_bounds["output" if name == "loss" else name] for name in errors}
    if "parameters" in bounds:
        bounds["parameters"] += step_error
    for name, error in errors.items():
        if not error <= bounds[name]:
            raise WrongResult(
                f"{job.kernel.title}: wrong result, not timed: relative error of the {name} against float64 is "
                f"{error:.3g}, the limit is {bounds[name]:g}"
            )
    return CheckResult(rows, of_rows, errors, bounds)
