"""Estimator against other loops: python benchmarks/peers/estimator.py [--device gpu] [--cases NAME,...] [--json FILE].

The example's CIFAR network with dropout and SGD at 0.01, on random images that lie in memory as bytes. Ours is what a
user of Estimator.train gets between one log record and another, in calls of 100 updates. It takes turns with the same
update in a loop written by hand (estimator_ours.py: what the Estimator itself costs), torch eagerly, on a GPU also by
torch.compile without and with CUDA graphs (estimator_torch.py), Keras 3 on jax with executions as long as our calls
(estimator_keras.py), and flax.nnx in the loop that its documentation shows (estimator_nnx.py). Compiling, and the
start of a train or a fit, are never timed. Before that, one update from the same weights without dropout must be as
near to float64 as torch's on every side (estimator_checks.py), and a call of the Estimator must give the losses of the
loop by hand, or the program stops. A round's ratio is the other's time over ours; a missed floor gives exit status 1.
Give torch a quiet machine: its threads spin, and with other work on the cores its times multiply.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks share a GPU's memory
os.environ["KERAS_BACKEND"] = "jax"

import estimator_checks
import estimator_torch
import numpy as np
import torch
from common import (
    count_native_calls,
    load_before,
    mebibytes,
    program_bytes,
    ratios,
    save,
    seconds,
    torch_bytes,
    torch_peak,
)
from estimator_ours import ByEstimator, ByHand, Weights

from hotloop.engine.device import setup

RATE = 0.01
OPTIONAL = {"keras": "keras", "nnx": "flax"}  # side: the package that it needs


@dataclass(frozen=True)
class Case:
    """What is compared; floors are of the ratio, by side."""

    name: str
    batch: int
    floors: Mapping[str, float] = field(default_factory=dict)
    per_call: int = 100
    samples: int = 51_200  # an epoch is made of whole executions of Keras for either batch


CASES = {
    "cpu": (Case("cifar-b32", 32, {"by hand": 0.98, "torch": 1.0, "keras": 1.2, "nnx": 1.2}),),
    "gpu": (Case("cifar-b32", 32, {"by hand": 0.98}), Case("cifar-b512", 512, {"by hand": 0.98})),
}


@dataclass(frozen=True)
class Side:
    """How to make so many updates, in multiples of `least`, and the seconds that they took; it has run before."""

    run: Callable[[int], float]
    least: int
    compile_seconds: float | None = None
    native_calls: int | None = None
    memory: int | None = None  # bytes, with the images where these lie on the device; None: not counted


def ours(case: Case, data: tuple[np.ndarray, np.ndarray], weights: Weights, folder: Path) -> dict[str, Side]:
    """The Estimator and the loop by hand, after a call that has to give the same losses."""
    estimator = ByEstimator(folder, weights, *data, case.batch, RATE, case.per_call)
    by_hand = ByHand(weights, *data, case.batch, RATE, case.per_call)
    same(case, estimator.train(case.per_call).losses[0], by_hand.update(case.per_call))
    compiled = estimator.estimator.last_run
    return {
        "ours": Side(
            estimator.update,
            case.per_call,
            compiled["lower_seconds"] + compiled["compile_seconds"],
            memory=program_bytes(estimator.program.compiled),
        ),
        "by hand": Side(
            _timed(by_hand.update),
            case.per_call,
            by_hand.program.lower_seconds + by_hand.program.compile_seconds,
            count_native_calls(by_hand.program.compiled.as_text()),
            program_bytes(by_hand.program.compiled),
        ),
    }


def same(case: Case, some: np.ndarray, others: np.ndarray) -> None:
    """Stop unless both saw the same samples and dropped the same values: 1 % apart is another computation."""
    if not np.allclose(some, others, rtol=1e-2):
        raise SystemExit(
            f"{case.name}: losses by Estimator and by hand are up to {np.abs(some - others).max():.2g} apart: "
            "not the same computation, not timed"
        )


def torchs(
    case: Case, data: tuple[np.ndarray, np.ndarray], weights: Weights, device: str
) -> Iterator[tuple[str, Side]]:
    """Eager, and on a GPU compiled, where a failure is only said."""
    modes = {"torch": None} | (
        {"torch compile": "default", "torch graphs": "reduce-overhead"} if device == "cuda" else {}
    )
    for name, mode in modes.items():
        before = torch_bytes(device)
        network = estimator_torch.Network()
        estimator_torch.load(network, weights)
        trainer = estimator_torch.Trainer(network, *data, case.batch, RATE, device)
        if mode:
            trainer.compile(mode)
        try:
            first = seconds(partial(trainer.update, 3))
        except Exception as error:  # whatever a compiler throws
            if not mode:
                raise
            print(f"{name} failed: {type(error).__name__}: {str(error)[:500]}")
            continue
        memory = None
        if mode != "reduce-overhead":  # its graphs keep their memory to themselves
            memory = torch_peak(partial(trainer.update, 2), before)
        yield name, Side(_timed(trainer.update), 10, first if mode else None, memory=memory)


def _timed(update: Callable[[int], object]) -> Callable[[int], float]:
    return lambda count: seconds(partial(update, count))


def keras_side(case: Case, data: tuple[np.ndarray, np.ndarray], weights: Weights) -> Side:
    import estimator_keras

    model = estimator_keras.network()
    estimator_keras.load(model, weights)
    trainer = estimator_keras.Trainer(model, *data, case.batch, RATE, case.per_call)
    trainer.update(case.per_call)
    return Side(trainer.update, case.per_call)


def nnx_side(case: Case, data: tuple[np.ndarray, np.ndarray], weights: Weights) -> Side:
    import estimator_nnx

    network = estimator_nnx.Network(estimator_nnx.nnx.Rngs(0))
    estimator_nnx.load(network, weights)
    trainer = estimator_nnx.Trainer(network, *data, case.batch, RATE)
    return Side(_timed(trainer.update), 10, seconds(partial(trainer.update, 3)))


OTHERS = {"keras": keras_side, "nnx": nnx_side}


def take_turns(
    sides: Mapping[str, Side], rounds: int, target: float
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Updates of a turn, which takes about `target` seconds, and seconds of one, by round; sides time themselves."""
    lengths = {name: _length(side, target) for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side.run(lengths[name]) / lengths[name])
    return lengths, times


def _length(side: Side, target: float) -> int:
    """Updates of about `target` seconds, by the second of two trials: the first may be off by what a start costs."""
    count = side.least
    for _ in range(2):
        count = side.least * max(1, round(target * count / side.run(count) / side.least))
    return count


def compared(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each side."""
    data, weights = estimator_checks.drawn(case.samples), estimator_checks.started()
    with tempfile.TemporaryDirectory() as folder:
        sides = ours(case, data, weights, Path(folder))
        sides |= torchs(case, data, weights, "cuda" if options.device == "gpu" else "cpu")
        sides |= {name: OTHERS[name](case, data, weights) for name in options.others}
        lengths, times = take_turns(sides, options.rounds, options.seconds)
    rows = []
    for name, side in sides.items():
        middle = statistics.median(times[name])
        row = {
            "case": case.name,
            "side": name,
            "images_per_second": case.batch / middle,
            "milliseconds": 1e3 * middle,
            **ratios(times["ours"], times[name]),
            "rounds": options.rounds,
            "updates_a_round": lengths[name],
            "compile_seconds": side.compile_seconds,
            "memory_bytes": side.memory,
            "native_calls": side.native_calls,
            "floor": case.floors.get(name),
        }
        rows.append(row | {"missed": row["floor"] is not None and row["ratio"] < row["floor"]})
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    spread = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
    compiled = "" if row["compile_seconds"] is None else f"{row['compile_seconds']:.1f}"
    print(
        f"{row['case']:12} {row['side']:14} {row['images_per_second']:11,.1f} {row['milliseconds']:9.3f} "
        f"{row['ratio']:7.3f} {spread:>18} {compiled:>8} {mebibytes(row['memory_bytes']):>7} {row['floor'] or '':>6}"
        f"{'  MISSED' if row['missed'] else ''}",
        flush=True,
    )


def header() -> None:
    print(
        f"{'case':12} {'side':14} {'images/s':>11} {'ms':>9} {'ratio':>7} {'range':>18} {'compile':>8} {'MiB':>7} "
        f"{'floor':>6}"
    )


def chosen(options: argparse.Namespace) -> list[Case]:
    """The device's cases, or those named."""
    there = CASES[options.device]
    names = options.cases.split(",") if options.cases else [case.name for case in there]
    if unknown := set(names) - {case.name for case in there}:
        raise SystemExit(f"--cases: no {', '.join(unknown)}; there are {', '.join(c.name for c in there)}")
    return [case for case in there if case.name in names]


def main(arguments: list[str]) -> int:
    options, load = parsed(arguments), load_before()
    for name in [name for name in options.others if find_spec(OPTIONAL[name]) is None]:
        print(f"{OPTIONAL[name]} is not installed (pip install {OPTIONAL[name]}): left out")
        options.others.remove(name)
    cases = chosen(options)
    setup(options.device)
    torch.backends.cudnn.benchmark = True
    errors = estimator_checks.check("cuda" if options.device == "gpu" else "cpu", options.others)
    print("an update in float32 is off float64 by: " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    peers = {package: version(package) for package in ("torch", *(OPTIONAL[name] for name in options.others))}
    if "keras" in options.others:
        import estimator_keras

        peers["keras_execution"] = estimator_keras.describe_execution()
        print(f"Keras {peers['keras']}: an execution of many steps is {peers['keras_execution']}")
    header()
    results = [row for case in cases for row in compared(case, options)]
    if options.json:
        save(options.json, peers | {"load_before": f"{load:.2f}"}, results)
    return int(any(row["missed"] for row in results))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--cases", metavar="NAME,...", help="only these")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    for name in OPTIONAL:
        parser.add_argument(f"--no-{name}", action="store_true", help=f"without {OPTIONAL[name]}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(arguments)
    options.others = [name for name in OPTIONAL if not getattr(options, f"no_{name}")]
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
