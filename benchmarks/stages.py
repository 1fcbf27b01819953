"""What stages cost on one machine: memory a device as the compiler counts it, and time in turns beside one device.

Run `python benchmarks/stages.py memory --models cifar_resnet20 resnet50`, `python benchmarks/stages.py time` or
`python benchmarks/stages.py gap`. Devices are virtual ones that share the machine's cores: where there are fewer cores
than stages, time shows what stages cost and never what they gain; the load average stands beside it. `gap` is for a
core a stage: it says where the time of an update in stages goes. Tables are printed as docs/results.md has them.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

STAGES = (1, 2, 4)
VIRTUAL = "--xla_force_host_platform_device_count"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if VIRTUAL not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {VIRTUAL}={max(STAGES)}".strip()

import jax  # noqa: E402 - the devices are counted when it is imported
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from hotloop.engine.feed import Resident  # noqa: E402
from hotloop.engine.keys import seed_key  # noqa: E402
from hotloop.engine.loop import Program  # noqa: E402
from hotloop.engine.pipeline_table import BACKWARD, FORWARD, IDLE, SCHEDULES, Table, make_table  # noqa: E402
from hotloop.families.cnn import model  # noqa: E402
from hotloop.families.cnn.job import Job, resolve  # noqa: E402
from hotloop.families.cnn.network import DEPTHS, build  # noqa: E402
from hotloop.families.cnn.options import DatasetSize, TrainConfig  # noqa: E402
from hotloop.families.cnn.split_advice import advise  # noqa: E402
from hotloop.families.cnn.stages import layers_by_stage  # noqa: E402

IMAGES = 64


def make_job(name: str, stages: int, schedule: str, micro: int, count: int, side: int) -> Job:
    """A training in float32 with momentum; stages by FLOPs, on a device each."""
    large = name in DEPTHS
    size = DatasetSize(micro * count, IMAGES, (side, side, 3), 1000 if large else 10)
    network = build(name, size.shape, size.classes)
    splits = advise(network, stages, [node.flops for node in network.nodes], "FLOPs").splits
    config = TrainConfig(
        model_name=name,
        dataset="imagenet" if large else "cifar10",
        precision="32.32",
        micro_batch_size=micro,
        gradient_accumulation_count=count,
        optimizer_params={"momentum": 0.9},
        pipeline_splits=splits,
        pipeline_schedule=schedule,
        validation=False,
    )
    return replace(resolve(config, size, stages), size=size)


def make_program(job: Job) -> tuple[Program, Any]:
    """A program of one update a call, and the state before its first."""
    draws = np.random.default_rng(0)
    data = {
        "image": draws.integers(0, 256, (job.size.train, *job.size.shape)).astype(np.uint8),
        "label": draws.integers(0, job.size.classes, job.size.train).astype(np.int32),
    }
    feed = Resident(data, job.batch.global_, seed=0, shuffled=False, sharding=job.sharding)
    key = seed_key(1)
    return Program(model.update(job), feed, 1, key), model.spread(job, model.init(job, key))


def bytes_on_a_device(tree: Any) -> int:
    """The most that one device holds of a tree."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())


def hollow(stage: Callable[..., Any]) -> Callable[..., Any]:
    """A stage that takes and gives arrays of the same shapes, and computes nothing: its ticks copy and wait alone."""

    def run(params: Any, running: Any, values: Any, samples: Any, keys: Any) -> Any:
        out, (_, figures) = jax.eval_shape(stage, params, running, values, samples, keys)
        number = sum(leaf.ravel()[0].astype(np.float32) for leaf in jax.tree.leaves((params, values)))
        full = jax.tree.map(lambda form: jnp.full(form.shape, number, form.dtype), out)
        return full, (running, jax.tree.map(lambda form: jnp.zeros(form.shape, form.dtype), figures))

    return run


def hollow_program(job: Job) -> tuple[Program, Any]:
    """`make_program` of a network whose stages compute nothing."""
    stages, kept = tuple(map(hollow, model._training_stages(job))), model._training_stages
    model._training_stages = lambda job: stages
    try:
        program, state = make_program(job)
        program.compile(state)
    finally:
        model._training_stages = kept
    return program, state


def seconds_of(call: Callable[[], Any], rounds: int) -> float:
    """The fastest of some calls, after one that compiles."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - began)
    return min(taken)


def times_alone(job: Job, rounds: int) -> dict[tuple[int, int], float]:
    """Seconds of each (kind of tick, stage) for one micro-batch, on a device that does nothing else."""
    whole, draws = model.init(job, seed_key(1)), np.random.default_rng(0)
    samples = {
        "image": draws.integers(0, 256, (job.batch.micro, *job.size.shape)).astype(np.uint8),
        "label": draws.integers(0, job.size.classes, job.batch.micro).astype(np.int32),
    }
    samples = jax.device_put(samples)
    keys = jax.random.split(seed_key(2), job.batch.micro)
    values, found = None, {}
    stages = model._training_stages(job)
    for number, (stage, layers) in enumerate(
        zip(stages, layers_by_stage(job.network, job.splits), strict=True)
    ):
        own = {name: whole["params"][name] for name in layers if name in whole["params"]}
        kept = {name: whole["statistics"][name] for name in layers if name in whole["statistics"]}
        running = model.RunningStatistics(jnp.int32(0), jax.tree.map(jnp.zeros_like, kept))

        def backward(own: Any, running: Any, values: Any, *batch: Any, stage: Any = stage) -> Any:
            out, pull, rest = jax.vjp(
                lambda own, values: stage(own, running, values, *batch), own, values, has_aux=True
            )
            return pull(jax.tree.map(jnp.ones_like, out)), rest

        given = own, running, values, samples, keys
        ahead = jax.jit(stage)
        found[FORWARD, number] = seconds_of(partial(ahead, *given), rounds)
        found[BACKWARD, number] = seconds_of(partial(jax.jit(backward), *given), rounds)
        values = ahead(*given)[0]
    return found


def show_gap(options: argparse.Namespace) -> None:
    """Where the time of an update in stages goes: equal stages by the table, what is uneven, ticks, and the rest."""
    print(f"load before: {os.getloadavg()[0]:.2f} on {len(os.sched_getaffinity(0))} processors")
    print(
        "| model | stages | schedule | one device, ms | equal stages | uneven stages | ticks alone | rest |"
        " measured | rest, ms a tick |"
    )
    print("|---" * 10 + "|")
    for name in options.models:
        for count in options.stages:
            jobs = {
                order: make_job(name, count, order, options.micro, options.count, options.side)
                for order in options.schedules
            }
            alone = times_alone(jobs[options.schedules[0]], 5 * options.rounds)
            programs = {
                "one": [
                    *make_program(make_job(name, 1, "Grouped", options.micro, options.count, options.side))
                ]
            }
            for order, job in jobs.items():
                programs[order] = [*make_program(job)]
                programs[f"hollow {order}"] = [*hollow_program(job)]
            taken = take_turns(programs, options.rounds)
            one = min(taken["one"])
            for order in options.schedules:
                table = make_table(order, count, options.count)
                ideal = time_of(table, {(kind, s): one * (1 if kind == FORWARD else 3) / 3 / count / options.count
                                        for kind, s in alone})  # fmt: skip
                lone = time_of(table, alone)
                ticks, measured = min(taken[f"hollow {order}"]), min(taken[order])
                rest = measured - lone - ticks
                parts = " | ".join(
                    f"{part / one:.2f}" for part in (ideal, lone - ideal, ticks, rest, measured)
                )
                print(
                    f"| {name} | {count} | {order} | {1e3 * one:.0f} | {parts} | {1e3 * rest / table.ticks:.2f} |",
                    flush=True,
                )
    print(f"load after: {os.getloadavg()[0]:.2f}")


def time_of(table: Table, costs: dict[tuple[int, int], float]) -> float:
    """Seconds of a table's ticks, each as long as its slowest step."""
    return sum(
        max(costs[kind, stage] for stage, (kind, _) in enumerate(row) if kind != IDLE) for row in table.rows
    )


def take_turns(programs: dict[Any, list[Any]], rounds: int) -> dict[Any, list[float]]:
    """Seconds of an update of each, in turns; the first turn compiles and does not count."""
    seconds: dict[Any, list[float]] = {}
    for turn in range(rounds + 1):
        for case, held in programs.items():
            program, state = held
            began = time.perf_counter()
            state, metrics = program(state, turn, 1)
            metrics.wait()
            jax.block_until_ready(state)
            held[1] = state
            if turn:
                seconds.setdefault(case, []).append(time.perf_counter() - began)
    return seconds


def cases(options: argparse.Namespace) -> list[tuple[int, str]]:
    return [(1, "")] + [
        (count, order) for count in options.stages if count > 1 for order in options.schedules
    ]


def show_memory(options: argparse.Namespace) -> None:
    print(
        "| model | stages | schedule | weights and slots, MiB | their share | temporary, MiB | compiled in, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        whole = 0
        for stages, order in cases(options):
            job = make_job(name, stages, order or "Grouped", options.micro, options.count, options.side)
            program, state = make_program(job)
            began = time.perf_counter()
            program.compile(state)
            seconds = time.perf_counter() - began
            held = bytes_on_a_device({name: state[name] for name in ("params", "optimiser")})
            whole = whole or held
            temporary = program.compiled.memory_analysis().temp_size_in_bytes
            figures = f"{held / 2**20:.2f} | {held / whole:.0%} | {temporary / 2**20:.1f} | {seconds:.0f}"
            print(f"| {name} | {stages} | {order or 'one device'} | {figures} |", flush=True)


def show_time(options: argparse.Namespace) -> None:
    print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    print(
        "| model | stages | schedule | busy share | ms, best | ms, median | beside one device, best | range |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in options.models:
        programs = {}
        for case in cases(options):
            job = make_job(name, case[0], case[1] or "Grouped", options.micro, options.count, options.side)
            programs[case] = [*make_program(job)]
        seconds = take_turns(programs, options.rounds)
        alone = seconds[1, ""]
        for (stages, order), taken in seconds.items():
            ratios = [own / one for own, one in zip(taken, alone, strict=True)]
            busy = make_table(order or "Grouped", stages, options.count).busy_share
            times = f"{1e3 * min(taken):.0f} | {1e3 * statistics.median(taken):.0f}"
            beside = f"{min(taken) / min(alone):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"| {name} | {stages} | {order or 'one device'} | {busy:.0%} | {times} | {beside} |",
                flush=True,
            )
    print(f"load after: {os.getloadavg()[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("memory", "time", "gap"))
    parser.add_argument("--models", nargs="+", default=["cifar_resnet8", "cifar_resnet20"])
    parser.add_argument(
        "--stages", nargs="+", type=int, default=[2, 4], help="at most as many as there are devices"
    )
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--micro", type=int, default=8, help="images of a micro-batch")
    parser.add_argument("--count", type=int, default=12, help="micro-batches of an update")
    parser.add_argument("--side", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    {"memory": show_memory, "time": show_time, "gap": show_gap}[options.what](options)


if __name__ == "__main__":
    main()
