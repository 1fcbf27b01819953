"""The toy family as a program with a command line, for tests of several processes: it trains, validates, saves, stops.

Not a test: `two_processes` starts it.
"""

import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import toy_family as toy
from jax.sharding import NamedSharding, PartitionSpec

from hotloop import Evaluation, Plan, Program, Resident, Streamed
from hotloop.cli import Command, Context, option, run_program
from hotloop.engine import processes
from hotloop.engine.blocks import Form
from hotloop.engine.device import REPLICA, device_mesh
from hotloop.engine.interrupt import listen, print_to_stderr
from hotloop.engine.progress import Console
from hotloop.engine.training import open_training
from hotloop.errors import DataError

SAMPLES, BATCH = 203, 12  # of which one, two, three or four replicas have equal shares


@dataclass(frozen=True)
class Config:
    run: str = option("run", "Folder of the run.")
    resume: bool = option(False, "Go on.")
    updates: int = option(4, "Updates.")
    log_every: int = option(1, "Updates between logs.")
    checkpoint_every: int = option(2, "Updates between checkpoints.")
    replicas: int = option(1, "Devices.")
    block: int = option(0, "Updates of a block, as accelerators have them; 0: as a CPU has them.")
    streamed: bool = option(False, "Read batches from the host.")
    moved: float = option(0.0, "What the first weight is moved by.")
    label: int = option(-1, "What the label of sample 5 is changed to; -1: it stays.")
    failing: int = option(-1, "The process whose data are broken.")
    fails_at: int = option(3, "The update whose batch is broken.")
    lazy: int = option(-1, "The process that is slow.")
    laziness: float = option(0.0, "Seconds that it takes longer for a batch.")
    loading: float = option(0.0, "Seconds that the data take.")
    evaluations: int = option(0, "How often the result is evaluated.")
    each_saves: bool = option(False, "Each process saves.")
    seconds: float = option(0.0, "Seconds that every batch takes.")
    dying: int = option(-1, "The process that is killed, once, when the run is open and has made no update.")


def run(config: Config, context: Context) -> dict[str, Any]:
    context.open_device()
    train(config, context)
    return {"processes": processes.count()}


def train(config: Config, console: Console | None = None) -> None:
    """A run from beginning to end, in the process or processes that call it."""
    options = toy.Config()
    data = toy.data(SAMPLES)
    if config.loading:
        print_to_stderr("loading")
        time.sleep(config.loading)
    if config.label >= 0:
        data["y"][5] = config.label
    sharding = None
    state = toy.init(options, jax.random.key(1))
    state["params"]["first"] = state["params"]["first"].at[0, 0].add(config.moved)
    if config.replicas > 1:
        mesh = device_mesh(config.replicas)
        sharding = NamedSharding(mesh, PartitionSpec(REPLICA))
        state = processes.place(state, NamedSharding(mesh, PartitionSpec()))

    def read(indices: "np.ndarray[Any, Any]") -> dict[str, Any]:
        read.count += 1  # type: ignore[attr-defined]
        if processes.index() == config.failing and read.count > config.fails_at:  # type: ignore[attr-defined]
            raise DataError("image 17 is broken")
        time.sleep(config.seconds + (config.laziness if processes.index() == config.lazy else 0.0))
        return {name: rows[indices] for name, rows in data.items()}

    read.count = 0  # type: ignore[attr-defined]
    feed: Any = Resident(data, BATCH, seed=3, sharding=sharding)
    if config.streamed:
        feed = Streamed(read, BATCH, seed=3, sharding=sharding, samples=SAMPLES)
    plan = Plan.for_updates(
        config.updates,
        log_every=config.log_every,
        checkpoint_every=config.checkpoint_every,
        validate_every=config.updates,
    )
    loop: Any = "blocks" if config.block else None
    program = Program(toy.update(options), feed, plan.updates_per_call, jax.random.key(7), loop=loop)
    if config.block:
        program.form = Form(config.block, config.block)
    tests = toy.data(101, seed=5)
    evaluation = Evaluation(toy.evaluate(options), tests, batch_size=40, sharding=sharding)
    settings = {name: value for name, value in asdict(config).items() if name not in ("run", "resume")}
    with open_training(
        config.run,
        settings,
        command="toy",
        resume=config.resume,
        may_differ=settings,
        console=console,
        sinks=None if console else [],
        each_process_saves=config.each_saves,
    ) as training:
        if console:
            print_to_stderr(f"this is process {processes.index()}")
        if config.dying >= 0 and not config.resume:
            if processes.index() == config.dying:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # as if it compiled
        state = training.train(program, plan, state, validate=evaluation.means, guard="loss")
        for _ in range(config.evaluations):
            training.record.event("evaluation", **evaluation.means(state))
            time.sleep(config.seconds)
    if config.streamed:
        feed.close()


if __name__ == "__main__":
    listen()
    sys.exit(run_program(Command("toy", "Train the toy.", Config, run)))
