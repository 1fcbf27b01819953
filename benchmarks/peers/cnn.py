"""ResNets against torch: python benchmarks/peers/cnn.py [--device gpu] [--cases NAME,...] [--json FILE].

Ours is the update of `hotloop cnn train --synthetic-data device` in its compiled loop (batch norm with running
statistics, momentum, L2, label smoothing, schedule), or its validation. Torch is the same model and recipe, channels
last, on one batch that is ready in memory (cnn_torch.py; no schedule): eagerly, to infer also with its norms folded
into the convolutions (ours always does that), and on a GPU also by torch.compile, under bfloat16 autocast where ours
is 16.32. Before anything is timed, one update from the same weights must be as near
to float64 as torch's (cnn_checks.py), or the program stops. Then all take turns; a round's ratio is torch's time over
ours. On a GPU each case is a process of its own: jax counts the most memory since it started. Memory is what the
timed program needs (ours: as compiled; torch: the most allocated while it ran). A missed floor gives exit status 1.
Give torch a quiet machine: its threads spin, and with other work on the cores its times multiply.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks share a GPU's memory

import cnn_checks
import jax
import torch
from cnn_checks import Case
from common import (
    count_native_calls,
    load_before,
    program_bytes,
    ratios,
    save,
    seconds,
    take_turns,
    torch_bytes,
    torch_peak,
)

from hotloop.engine import measure
from hotloop.engine.device import setup
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.families.cnn import model
from hotloop.families.cnn.speed import FORWARD_AND_BACKWARD, peak_memory

CASES = {
    "cpu": (
        Case("resnet8-b8", "cifar_resnet8", 8, True, "32.32", 10, ratio_floor=1.3),
        Case("resnet8-b64", "cifar_resnet8", 64, True, "32.32", 4, ratio_floor=1.0),
        Case("resnet50-b8", "resnet50", 8, True, "32.32", 1, ratio_floor=1.0),
        Case("resnet50-infer-b8", "resnet50", 8, False, "32.32", 2, ratio_floor=1.0),
    ),
    "gpu": (
        Case("resnet50-b256", "resnet50", 256, True, "16.32", 20, speed_floor=7000),
        Case("resnet50-b512", "resnet50", 512, True, "16.32", 10, speed_floor=7450),
        Case("resnet50-infer-b256", "resnet50", 256, False, "16.32", 40),
        Case("resnet8-b64", "cifar_resnet8", 64, True, "32.32", 500, speed_floor=60_000),
    ),
}
EAGER, FOLDED, COMPILED = "torch", "torch folded", "torch compile"
TINY = 64  # rows and columns of an image


@dataclass(frozen=True)
class Side:
    """A program: how to run so many updates or batches, in multiples of `least`; what it took to get ready."""

    run: Callable[[int], None]
    least: int
    compile_seconds: float
    memory: int | None
    """Bytes; None where they are not counted."""
    process_memory: int | None = None
    native_calls: int | None = None


def ours(case: Case, state: model.State) -> Side:
    run, program = our_updates(case, state) if case.train else our_batches(case, state)
    run(case.per_call)
    needed = program_bytes(program.compiled)
    device = jax.devices()[0]
    peak = None if device.platform == "cpu" else peak_memory()
    compiling = program.lower_seconds + program.compile_seconds
    calls = count_native_calls(program.compiled.as_text())
    return Side(run, case.per_call, compiling, needed, peak, calls)


def our_updates(case: Case, state: model.State) -> tuple[Callable[[int], None], Any]:
    job = case.job
    program = Program(model.update(job), case.source.feed(job), case.per_call, seed_key(0))
    held = {"state": copy_state(state), "done": 0}

    def run(count: int) -> None:
        for _ in range(count // case.per_call):
            held["state"], metrics = program(held["state"], held["done"], case.per_call)
            held["done"] += case.per_call
        metrics.wait()

    return run, program


def our_batches(case: Case, state: model.State) -> tuple[Callable[[int], None], Any]:
    evaluation = case.source.evaluation(model.evaluate(case.job), case.batch)
    weights = {name: state[name] for name in ("params", "statistics")}

    def run(count: int) -> None:
        for _ in range(count // case.per_call):
            evaluation(weights)

    return run, evaluation


def torchs(case: Case, state: model.State, device: str, form: str) -> Side:
    """Torch's side, ready; its memory is counted apart from whatever torch held before."""
    before, compiled = torch_bytes(device), form == COMPILED
    trainer = cnn_checks.peer(case, state, device)
    if form == FOLDED:
        trainer.fold_norms()
    if compiled:
        trainer.compile()
    run = trainer.update if case.train else trainer.infer
    first = seconds(partial(run, 1))
    run(2)
    memory = torch_peak(partial(run, 2), before)
    return Side(run, 2 if device == "cuda" else 1, first if compiled else 0.0, memory)


def sides(case: Case, device: str, with_compile: bool) -> Iterator[tuple[str, Side]]:
    """Ours first, whose process then has made nothing else; a torch.compile that fails is only said."""
    state = cnn_checks.started(case)
    yield "ours", ours(case, state)
    errors = cnn_checks.check(case, device)
    said = "; ".join(f"{kind} {e['ours']:.1e}, torch {e['torch']:.1e}" for kind, e in errors.items())
    print(f"{case.name}: in float32 off float64 by: {said}", flush=True)
    yield EAGER, torchs(case, state, device, EAGER)
    if not case.train:
        yield FOLDED, torchs(case, state, device, FOLDED)
    if with_compile:
        try:
            yield COMPILED, torchs(case, state, device, COMPILED)
        except Exception as error:  # whatever a compiler throws
            print(f"torch.compile failed: {type(error).__name__}: {str(error)[:500]}")


def compared(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each side."""
    device = "cuda" if options.device == "gpu" else "cpu"
    found = dict(sides(case, device, (options.device == "gpu" or options.tiny) and not options.no_compile))
    lengths, times = take_turns(
        {name: (side.run, side.least) for name, side in found.items()}, options.rounds, options.seconds
    )
    peak = peak_flops(case)
    rows = []
    for name, side in found.items():
        middle = statistics.median(times[name])
        speed = case.batch / middle
        row = {
            "case": case.name,
            "side": name,
            "images_per_second": speed,
            "milliseconds": 1e3 * middle,
            **ratios(times["ours"], times[name]),
            "rounds": options.rounds,
            "iterations_a_round": lengths[name],
            "compile_seconds": side.compile_seconds,
            "memory_bytes": side.memory,
            "process_memory_bytes": side.process_memory,
            "native_calls": side.native_calls,
            "mfu": flops(case) * speed / peak if peak else None,
        }
        rows.append(row | floor(case, row))
        show(rows[-1])
    return rows


def floor(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    """The ratio is held against eager torch on a CPU, the speed is ours on a GPU."""
    if row["side"] == EAGER and case.ratio_floor:
        return {"floor": case.ratio_floor, "missed": row["ratio"] < case.ratio_floor}
    if row["side"] == "ours" and case.speed_floor:
        return {"floor": case.speed_floor, "missed": row["images_per_second"] < case.speed_floor}
    return {"floor": None, "missed": False}


def flops(case: Case) -> int:
    """Of one image."""
    return (FORWARD_AND_BACKWARD if case.train else 1) * case.job.network.flops


def peak_flops(case: Case) -> float | None:
    """What the device was measured to do a second in the case's type; measured now on a GPU."""
    device = jax.devices()[0]
    limits = measure.known_ceilings(device) if device.platform == "cpu" else measure.ceilings(device)
    return 1e12 * limits.matmul_tflops[str(case.job.policy.compute)] if limits else None


def show(row: dict[str, Any]) -> None:
    spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
    memory = "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.2f}"
    mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.0f} %"
    print(
        f"{row['case']:20} {row['side']:14} {row['images_per_second']:10,.1f} {row['milliseconds']:10.2f} "
        f"{row['ratio']:6.2f} {spread:>14} {row['compile_seconds']:7.1f} {memory:>7} {mfu:>5} "
        f"{row['floor'] or '':>7}{'  MISSED' if row['missed'] else ''}",
        flush=True,
    )


def header() -> None:
    print(
        f"{'case':20} {'side':14} {'images/s':>10} {'ms':>10} {'ratio':>6} {'range':>14} {'compile':>7} {'GiB':>7} "
        f"{'MFU':>5} {'floor':>7}"
    )


def chosen(options: argparse.Namespace) -> list[Case]:
    """The device's cases, or those named; `--tiny` makes the GPU's small enough for any machine."""
    there = CASES["gpu" if options.tiny else options.device]
    names = options.cases.split(",") if options.cases else [case.name for case in there]
    if unknown := set(names) - {case.name for case in there}:
        raise SystemExit(f"--cases: no {', '.join(unknown)}; there are {', '.join(c.name for c in there)}")
    found = [case for case in there if case.name in names]
    if not options.tiny:
        return found
    return [replace(case, batch=4, per_call=2, side=TINY, speed_floor=None) for case in found]


def in_processes(cases: list[Case], arguments: list[str]) -> list[dict[str, Any]]:
    """Each case by a process of its own."""
    rows = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            command = [sys.executable, __file__, *arguments, "--cases", case.name, "--json", str(file)]
            subprocess.run(command, check=False)
            if not file.exists():
                raise SystemExit(f"{case.name}: its process left no result")
            rows += json.loads(file.read_text())["results"]
    return rows


def main(arguments: list[str]) -> int:
    options, load = parsed(arguments), load_before()
    setup(options.device)
    cases = chosen(options)
    if options.device == "gpu" and len(cases) > 1:
        results = in_processes(cases, arguments)
    else:
        torch.backends.cudnn.benchmark = True
        header()
        results = [row for case in cases for row in compared(case, options)]
    if options.json:
        save(options.json, {"torch": version("torch"), "load_before": f"{load:.2f}"}, results)
    return int(any(row["missed"] for row in results))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--cases", metavar="NAME,...", help="only these")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
