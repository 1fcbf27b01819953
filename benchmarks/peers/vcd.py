"""The whole vcd update against torch and BlackJAX: python benchmarks/peers/vcd.py [--device gpu] [--json FILE].

Ours is the update of `hotloop vcd train` in its compiled loop; torch is the same update written plainly (vcd_torch.py;
on a GPU also replayed as a CUDA graph, both with TF32 products as ours); BlackJAX is ours with its HMC as the sampler
(vcd_blackjax.py). Before anything is timed, each peer must compute the same thing from the same weights and random
numbers (vcd_checks.py), and all step sizes must go the same way from the same start, or the program stops. Then all
take turns for several rounds; a round's ratio is a peer's time over ours, so more is better for us. Compilation and
warm-up are not timed. A missed floor is said and gives exit status 1. Give torch a quiet machine: its threads spin,
and with other work on the cores its times multiply.
"""

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks share a GPU's memory

import numpy as np
import torch
import vcd_checks
from common import load_before, mebibytes, program_bytes, ratios, save, seconds, torch_bytes, torch_peak
from vcd_torch import Trainer, graphed

from hotloop.engine.device import setup
from hotloop.engine.feed import Resident
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.families.vcd import model as vcd
from hotloop.families.vcd.config import VcdModel

BATCHES = 500  # of a pass over the images
START = 40  # updates from random weights to those that all sides begin with
WARM_UP = 60  # updates of each side before it is timed, or as many as whole calls have
LIKENESS = 0.1  # how far step sizes may part in them, relative; chance makes 0.01 to 0.02 of it
FLOORS = {"torch": 1.6, "blackjax": 0.95}


@dataclass(frozen=True)
class Side:
    """A program that trains: how to make so many more updates, and what its step size is."""

    advance: Callable[[int], None]
    step_size: Callable[[], float]
    memory: int | None  # bytes, with the images; None where they are not counted
    multiple: int = 1  # updates of a turn must be a multiple of this: one call's


def some_images(batch_size: int) -> dict[str, np.ndarray]:
    """Random images with as many ones as digits have; what is on them does not change the work."""
    count = BATCHES * batch_size
    images = np.random.default_rng(0).random((count, 784), np.float32) < 0.13
    return {"image": images.astype(np.uint8), "index": np.arange(count, dtype=np.int32)}


def looped(job: vcd.Job, data: dict[str, np.ndarray], state: Any, per_call: int, traced_in: Any) -> Side:
    """The update in the engine's loop, so many updates a call; compiled within `traced_in`."""
    program = Program(vcd.update(job), Resident(data, job.model.micro_batch_size), per_call, seed_key(0))
    held = {"state": copy_state(state), "done": 0}
    with traced_in:
        program.compile(held["state"])

    def advance(count: int) -> None:
        for _ in range(count // per_call):
            held["state"], metrics = program(held["state"], held["done"], per_call)
            held["done"] += per_call
        metrics.wait()

    return Side(advance, lambda: float(held["state"]["step_size"]), program_bytes(program.compiled), per_call)


def plain_torch(job: vcd.Job, data: dict[str, np.ndarray], state: Any, device: str) -> Side:
    before = torch_bytes(device)
    trainer = Trainer(job.model, data["image"], device)

    def one() -> None:
        trainer.update(trainer.next_batch(), trainer.draw())

    one()
    memory = torch_peak(one, before)
    trainer.load(vcd_checks.numbers_of(state))  # after these updates, which are none of the training's
    return stepped(trainer, one, memory)


def graphed_torch(job: vcd.Job, data: dict[str, np.ndarray], state: Any, device: str) -> Side:
    before = torch_bytes(device)
    trainer = Trainer(job.model, data["image"], device)
    trainer.load(vcd_checks.numbers_of(state))
    captured: list[Callable[[], None]] = []
    memory = torch_peak(lambda: captured.append(graphed(trainer)), before)
    return stepped(trainer, captured[0], memory)


def stepped(trainer: Trainer, one: Callable[[], object], memory: int | None) -> Side:
    def advance(count: int) -> None:
        for _ in range(count):
            one()
        trainer.step_size.item()  # waits for a GPU

    return Side(advance, lambda: trainer.step_size.item(), memory)


def sides(options: argparse.Namespace, device: str) -> Iterator[tuple[str, Side]]:
    """Ours, then every peer that is asked for and computes the same."""
    data, per_call = some_images(options.batch_size), 20 if device == "cpu" else 200
    job = vcd.Job(VcdModel(micro_batch_size=options.batch_size, shared_updates=0), len(data["index"]))
    state = started(job, data)
    yield "ours", looped(job, data, state, per_call, nullcontext())
    if "torch" not in options.skip:
        torch.set_float32_matmul_precision("highest")
        print(f"torch, one update: relative error {said(vcd_checks.against_torch(job, data, device))}")
        torch.set_float32_matmul_precision("high")
        yield "torch", plain_torch(job, data, state, device)
        if device == "cuda":
            yield "torch graph", graphed_torch(job, data, state, device)
    if "blackjax" not in options.skip:
        import vcd_blackjax

        print(f"blackjax, one iteration: relative error {said(vcd_checks.against_blackjax(job, data))}")
        yield "blackjax", looped(job, data, state, per_call, vcd_blackjax.replaced())


def started(job: vcd.Job, data: dict[str, np.ndarray]) -> Any:
    """The weights that all sides begin with: the first updates are unlike any later one."""
    program = Program(vcd.update(job), Resident(data, job.model.micro_batch_size), START, seed_key(1))
    return program(copy_state(vcd.init(job, seed_key(2))), 0, START)[0]


def said(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in errors.items())


def warmed_up(all_sides: dict[str, Side]) -> None:
    """As many updates of each; whose step size parts from ours samples something else."""
    shared = math.lcm(*(side.multiple for side in all_sides.values()))
    for name, side in all_sides.items():
        side.advance(-(-WARM_UP // shared) * shared)
        size, ours = side.step_size(), all_sides["ours"].step_size()
        if not abs(size / ours - 1) <= LIKENESS:
            raise SystemExit(
                f"{name}: step size {size:.4f}, ours {ours:.4f}: not the same sampler, not timed"
            )


def turn_length(side: Side, updates: int | None, target: float) -> int:
    """Updates of one turn: as asked, or about `target` seconds of them, in whole calls."""
    calls = max(1, round(10 / side.multiple))
    wanted = updates or target * calls * side.multiple / seconds(partial(side.advance, calls * side.multiple))
    return max(1, math.ceil(wanted / side.multiple)) * side.multiple


def main() -> int:
    options, load = arguments(), load_before()
    device = "cuda" if setup(options.device).platform == "gpu" else "cpu"
    all_sides = dict(sides(options, device))
    warmed_up(all_sides)
    lengths = {name: turn_length(side, options.updates, options.seconds) for name, side in all_sides.items()}
    times: dict[str, list[float]] = {name: [] for name in all_sides}
    for _ in range(options.rounds):
        for name, side in all_sides.items():
            times[name].append(seconds(partial(side.advance, lengths[name])) / lengths[name])
    results = [result(name, side.memory, times, lengths[name], options) for name, side in all_sides.items()]
    print(f"{'side':12} {'updates/s':>10} {'ms':>8} {'ratio':>7} {'range':>15} {'MiB':>7} {'floor':>6}")
    for row in results:
        show(row)
    if options.json:
        peers = {name: version(name) for name in ("torch", "blackjax") if name not in options.skip}
        save(options.json, {**peers, "load_before": f"{load:.2f}"}, results)
    return int(any(row["missed"] for row in results))


def result(
    name: str, memory: int | None, times: dict[str, list[float]], length: int, options: argparse.Namespace
) -> dict[str, Any]:
    median, compared = statistics.median(times[name]), ratios(times["ours"], times[name])
    floor = FLOORS.get(name)
    return {
        "side": name,
        "batch_size": options.batch_size,
        "updates_per_second": 1 / median,
        "milliseconds": 1e3 * median,
        "milliseconds_low": 1e3 * min(times[name]),
        "milliseconds_high": 1e3 * max(times[name]),
        **compared,
        "memory_bytes": memory,
        "floor": floor,
        "missed": floor is not None and compared["ratio"] < floor,
        "rounds": options.rounds,
        "updates_a_round": length,
    }


def show(row: dict[str, Any]) -> None:
    spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
    print(
        f"{row['side']:12} {row['updates_per_second']:10.1f} {row['milliseconds']:8.2f} {row['ratio']:7.2f} "
        f"{spread:>15} {mebibytes(row['memory_bytes']):>7} {row['floor'] or '':>6}{'  MISSED' if row['missed'] else ''}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--batch-size", type=int, default=100, help="images an update")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=2.5, help="length of a turn")
    parser.add_argument("--updates", type=int, help="updates of a turn, instead of --seconds")
    parser.add_argument(
        "--skip", nargs="*", default=[], choices=("torch", "blackjax"), help="peers to leave out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
