"""Whether a call now and then takes much longer than the others, and whether memory grows:
python benchmarks/outliers.py [--calls 200] [--many 100000] [--json FILE].

Programs that spend their time in the native package where it is installed (`pip install 'hotloop[native]'`), each
called 200 times in a row and every call timed: no call may take more than twice the median. Threads of another library
that spin or fight with XLA's show here. On a virtual machine whose host gives a core away now and then, what
was counted of that during a call (`steal` in /proc/stat) is taken off its time, and shown. Then a convolution
of the package is called 100,000 times within compiled loops, and what the process holds before and after is compared:
it may not grow by more than a hundredth, or a megabyte. What is missed gives exit status 1. Without the package the
programs take their usual paths, and memory is not looked at. Needs a quiet machine: another process on the cores is an
outlier, too. How quiet it is the first row shows, which is nothing of ours and has no bound.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent / "peers"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from common import count_native_calls, load_before, native_version, save, seconds

from hotloop.engine.device import setup
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program
from hotloop.families.cnn import model
from hotloop.families.cnn.job import resolve
from hotloop.families.cnn.options import DATASET_SIZES, TrainConfig
from hotloop.families.cnn.sources import synthetic_images
from hotloop.families.kernels import config as kernels
from hotloop.families.kernels.bench import make_job, prepare
from hotloop.layers import native, native_conv
from hotloop.layers.conv import conv2d
from hotloop.machine import usable_cores

MOST_TIMES = 2.0  # the median, that a call may take
MOST_GROWTH, LEAST_GROWTH = 0.01, 2**20  # a share of the memory, or bytes, by which it may grow
WARM_UP = 10  # calls
STEAL = 8  # the place of a processor's stolen ticks in its line of /proc/stat
LOOP = 1000  # handler calls in a compiled loop


class Called(NamedTuple):
    """A program: one call of it to its end, and its text."""

    call: Callable[[], object]
    text: str


def nothing_of_ours() -> Called:
    """Each core takes some logarithms, and waits for no other."""
    cores = usable_cores()
    pool = ThreadPoolExecutor(cores)
    numbers = np.ones((cores, 2**23), np.float32)
    return Called(lambda: list(pool.map(np.log, numbers)), "")


def convolution() -> Called:
    """Forward and both gradients of 8x56x56x64, 3x3."""
    x, kernel = jnp.ones((8, 56, 56, 64)), jnp.ones((3, 3, 64, 64))

    def squares(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.square(conv2d(x, kernel)).mean()

    program = jax.jit(jax.grad(squares, (0, 1))).lower(x, kernel).compile()
    return Called(lambda: jax.block_until_ready(program(x, kernel)), program.as_text())


def layer(config: kernels.LayerOptions) -> Called:
    bench = prepare(make_job(config, jax.devices()[0]))
    return Called(bench.call, bench.program.compiled.as_text())


def resnet8() -> Called:
    """An update of cifar_resnet8 at batch 8, as `hotloop cnn train` makes it."""
    size, source = DATASET_SIZES["cifar10"], synthetic_images(DATASET_SIZES["cifar10"], 0, on_device=True)
    config = TrainConfig(
        model_name="cifar_resnet8",
        synthetic_data="device",
        micro_batch_size=8,
        num_epochs=1,
        precision="32.32",
    )
    job = resolve(config, size, 1, repeated=True)
    program = Program(model.update(job), source.feed(job), 1, seed_key(0))
    held = {"state": model.init(job, seed_key(0)), "done": 0}
    program.compile(held["state"])

    def call() -> None:
        held["state"], metrics = program(held["state"], held["done"], 1)
        held["done"] += 1
        metrics.wait()

    return Called(call, program.compiled.as_text())


WIDE = {"batch_size": 4, "filter_in": 128, "filter_out": 128, "group_dim": 4, "block_repeats": 1}
LONG = {"batch_size": 64, "timesteps": 25, "hidden_size": 512, "batches_per_step": 1}
MACHINE = "the machine itself: a core's own work on each"
PROGRAMS: dict[str, Callable[[], Called]] = {
    MACHINE: nothing_of_ours,
    "convolution 8x56x56x64 and its gradients": convolution,
    "grouped convolution 4x56x56x128, 32 groups, training": lambda: layer(
        kernels.GroupedConv(**WIDE, train=True, batches_per_step=1)
    ),
    "depthwise convolutions 1x56x56x64, 10 blocks": lambda: layer(kernels.GroupedConv(batches_per_step=4)),
    "cifar_resnet8 update, batch 8": resnet8,
    "dense B32 N1024, 10 updates": lambda: layer(kernels.Dense(train=True, batches_per_step=10)),
    "lstm B64 T25 H512": lambda: layer(kernels.Lstm(**LONG, fused=True)),
}


class Timed(NamedTuple):
    """Seconds of a call, and of them those that the machine's host gave to somebody else."""

    took: float
    stolen: float


def judge(calls: list[Timed]) -> dict[str, Any]:
    """What a row of calls came to. A call may be as much longer than twice the median as was stolen of it, no more."""
    middle = statistics.median(call.took for call in calls)
    largest = max(call.took - call.stolen for call in calls)
    return {
        "calls": len(calls),
        "median_ms": 1e3 * middle,
        "largest_ms": 1e3 * largest,
        "largest_over_median": largest / middle,
        "calls_above": sum(call.took - call.stolen > MOST_TIMES * middle for call in calls),
        "stolen_calls": sum(call.stolen > 0 for call in calls),
        "stolen_ms": 1e3 * sum(call.stolen for call in calls),
        "largest_with_stolen_ms": 1e3 * max(call.took for call in calls),
        "missed": largest > MOST_TIMES * middle,
    }


def stolen_seconds() -> float:
    """What this machine's host has given away of its processors by now; always 0 on a machine that has no host."""
    ticks = int(Path("/proc/stat").read_text().partition("\n")[0].split()[STEAL])
    return ticks / os.sysconf("SC_CLK_TCK")


def time_call(call: Callable[[], object]) -> Timed:
    before = stolen_seconds()
    took = seconds(call)
    return Timed(took, stolen_seconds() - before)


def time_calls(name: str, count: int) -> dict[str, Any]:
    called = PROGRAMS[name]()
    for _ in range(WARM_UP):
        called.call()
    found = judge([time_call(called.call) for _ in range(count)])
    found["missed"] &= name != MACHINE
    return {"case": name, "native_calls": count_native_calls(called.text), **found}


HELD = {"resident": "VmRSS", "peak": "VmHWM"}


def held_bytes() -> dict[str, int]:
    """What this process holds now, and the most that it has held."""
    text = Path("/proc/self/status").read_text()
    return {name: 1024 * int(text.partition(f"{key}:")[2].split()[0]) for name, key in HELD.items()}


def native_loop() -> Callable[[], object]:
    """A compiled loop of `LOOP` calls of the package's convolution, each on the result of the one before."""

    @jax.jit
    def loop(x: jax.Array, kernel: jax.Array) -> jax.Array:
        def once(_: int, x: jax.Array) -> jax.Array:
            return native_conv.forward(x, kernel, stride=1, pads=((1, 1), (1, 1)))

        return jax.lax.fori_loop(0, LOOP, once, x)

    x, kernel = jnp.ones((1, 8, 8, 16)), jnp.full((3, 3, 16, 16), 1e-3)
    return lambda: jax.block_until_ready(loop(x, kernel))


def watch_memory(loop: Callable[[], object], count: int) -> dict[str, Any]:
    """What the process holds after the first tenth of `count` handler calls, and after all of them."""
    loops = max(10, count // LOOP)
    for _ in range(loops // 10):
        loop()
    before = held_bytes()
    for _ in range(loops - loops // 10):
        loop()
    after = held_bytes()
    growth = {name: after[name] - before[name] for name in HELD}
    allowed = max(LEAST_GROWTH, MOST_GROWTH * before["resident"])
    return {
        "case": "memory",
        "calls": loops * LOOP,
        **{f"{name}_bytes_before": value for name, value in before.items()},
        **{f"{name}_bytes_growth": value for name, value in growth.items()},
        "missed": max(growth.values()) > allowed,
    }


def show_calls(row: dict[str, Any]) -> None:
    print(
        f"{row['case']:54} {row['native_calls']:6} {row['median_ms']:10.3f} {row['largest_ms']:10.3f} "
        f"{row['largest_over_median']:8.2f} {row['calls_above']:6} "
        f"{row['stolen_calls']:4}, {row['stolen_ms']:.0f}{'  MISSED' if row['missed'] else ''}",
        flush=True,
    )


def show_memory(row: dict[str, Any]) -> None:
    before, grown, peak = (
        row[name] / 2**20 for name in ("resident_bytes_before", "resident_bytes_growth", "peak_bytes_growth")
    )
    print(
        f"{row['calls']:,} calls of a convolution: {before:.1f} MiB held before, {grown:+.2f} after, "
        f"their most {peak:+.2f}{'  MISSED' if row['missed'] else ''}"
    )


def main(arguments: list[str]) -> int:
    options, load = parsed(arguments), load_before()
    setup("cpu")
    print(f"hotloop-native {native_version() or 'is not installed: these are the usual paths'}")
    print(
        f"{'program':54} {'native':>6} {'median ms':>10} {'largest ms':>10} {'over it':>8} "
        f"{'many':>6} {'stolen, ms':>10}"
    )
    results = []
    for name in PROGRAMS:
        if not options.cases or any(word in name for word in options.cases):
            results.append(time_calls(name, options.calls))
            show_calls(results[-1])
    if options.many and native.is_loaded():
        results.append(watch_memory(native_loop(), options.many))
        show_memory(results[-1])
    if options.json:
        save(options.json, {"load_before": f"{load:.2f}"}, results)
    return int(any(row["missed"] for row in results))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="*", default=[], help="only programs whose name holds one of these words"
    )
    parser.add_argument("--calls", type=int, default=200, help="of each program")
    parser.add_argument(
        "--many", type=int, default=100_000, help="calls that memory is watched over; 0: none"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
