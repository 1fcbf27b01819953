"""Our kernels against torch, interleaved in one run: python benchmarks/peers/kernels.py [--quick] [--save FILE].

Ours is the program that `hotloop kernel` times: many iterations in one compiled call, checked against float64 first.
Torch is a loop of calls (kernels_torch.py; on a GPU, of CUDA graphs of cuDNN's kernels, in training too, which is the
strongest form it has). Both sides run in turn for several rounds, fewer where a layer is so large that they would take
longer than --limit; a round's ratio is torch's time over ours, so more is better for us. The table gives the median
and the range of the rounds' ratios beside the floor that we hold ourselves to; a missed floor is said and gives exit
status 1. Compilation and warm-up are not timed. `--cases "B256 T100" grouped` runs the cases that hold one of these.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks share a GPU's memory

import jax
import numpy as np
import torch
from common import (
    count_native_calls,
    enough,
    load_before,
    native_version,
    program_bytes,
    ratios,
    rounds_within,
    save,
    seconds,
)
from kernels_torch import torch_iterations

from hotloop.engine.device import setup
from hotloop.families.kernels import bench as ours
from hotloop.families.kernels import config as configs
from hotloop.families.kernels.bench import CheckResult, LayerBenchmark, make_job, prepare

TARGET_SECONDS = 0.3  # of one side's turn in a round
LIMIT_SECONDS = 45.0  # of all rounds of a case
FEWEST = 2  # iterations of a call of ours: the compiler would make no loop of one
ROUND = 12  # a multiple of all that ours may go round on a GPU, where other lengths cost a copy of each batch
LARGE = 2e10  # operations of an iteration, from which on a trial is as short as may be


@dataclass(frozen=True)
class Case:
    name: str
    config: configs.LayerOptions
    floor: float | None  # None: recorded, not held to anything


def both_modes(
    name: str, config: configs.LayerOptions, inference: float | None, training: float | None
) -> list[Case]:
    return [
        Case(f"{name} inference", config, inference),
        Case(f"{name} training", replace(config, train=True), training),
    ]


WIDE_GROUPS = configs.GroupedConv(batch_size=4, filter_in=128, filter_out=128, group_dim=4, block_repeats=1)


def cpu_cases() -> list[Case]:
    """The old programs' default shapes, and the larger ones that users ask about."""
    gru = configs.Gru(fused=True, batch_size=64, timesteps=25, hidden_size=512, input_size=512)
    return [
        *both_modes("rnn B1 T5 H128", configs.Rnn(), 8, 5),
        *both_modes("gru B1 T5 H128", configs.Gru(fused=True), 8, 5),
        *both_modes("gru B1 T5 H128, reset after", configs.Gru(fused=True, reset_after=True), 8, 5),
        *both_modes("lstm B1 T5 H128", configs.Lstm(fused=True), 8, 5),
        *both_modes("lstm-multi B1 T200 I16 H256 L2", configs.LstmMulti(), 1, 1),
        *both_modes("grouped-conv 1x56x56x64, 64 groups, 10 blocks", configs.GroupedConv(), 1, 1),
        *both_modes("grouped-conv 4x56x56x128, 32 groups", WIDE_GROUPS, 1, 1),
        *both_modes("dense B32 N1024", configs.Dense(), 1, 1),
        *wide_recurrent(64, 25, 512),
        *both_modes("gru B64 T25 H512, reset before", gru, 1, 1),
        *wide_recurrent(256, 100, 512),
    ]


def wide_recurrent(batch: int, timesteps: int, hidden: int) -> list[Case]:
    """The three recurrent layers in torch's own form: its GRU resets after the product."""
    shape = {"batch_size": batch, "timesteps": timesteps, "hidden_size": hidden}
    name = f"B{batch} T{timesteps} H{hidden}"
    gru = configs.Gru(**shape, input_size=hidden, fused=True, reset_after=True)
    return [
        *both_modes(f"rnn {name}", configs.Rnn(**shape), 1, 1),
        *both_modes(f"gru {name}, reset after", gru, 1, 1),
        *both_modes(f"lstm {name}", configs.Lstm(**shape, fused=True), 1, 1),
    ]


GPU_SHAPES = ((1, 5, 128), (64, 25, 512), (256, 25, 1024), (128, 50, 1536), (1024, 150, 256), (128, 50, 512))


def gpu_cases() -> list[Case]:
    """The recurrent grid in 16 bits: inference has floors against CUDA graphs, the rest is recorded."""
    cases = []
    for batch, timesteps, hidden in GPU_SHAPES:
        shape = {"batch_size": batch, "timesteps": timesteps, "hidden_size": hidden}
        floor = 1.0 if batch == 1 else 0.7
        name = f"B{batch} T{timesteps} H{hidden}"
        gru = configs.Gru(**shape, input_size=hidden, fused=True)
        cases += [
            *both_modes(f"lstm {name}", configs.Lstm(**shape, fused=True), floor, None),
            *both_modes(f"gru {name}, reset after", replace(gru, reset_after=True), floor, None),
            *both_modes(f"gru {name}, reset before", gru, None, None),
            *both_modes(f"rnn {name}", configs.Rnn(**shape), None, None),
        ]
    return [
        *cases,
        *both_modes("lstm-multi B1 T200 I16 H256 L2", configs.LstmMulti(), None, None),
        *both_modes("dense B32 N1024", configs.Dense(), None, None),
        *both_modes("grouped-conv 1x56x56x64, 64 groups, 10 blocks", configs.GroupedConv(), None, None),
        *both_modes("grouped-conv 4x56x56x128, 32 groups", WIDE_GROUPS, None, None),
    ]


def agree(bench: LayerBenchmark, model: torch.nn.Module, limit: float) -> float | None:
    """Relative difference of the two outputs with our weights in torch; None where the formulas differ."""
    weights = _as_torch(bench)
    if weights is None:
        return None
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(name).copy_(torch.from_numpy(value.copy()))
        x = np.asarray(bench.feed.at(0)["x"], np.float32)
        given = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x
        device = next(model.parameters())
        y = model(torch.from_numpy(given.copy()).to(device.device, device.dtype)).float().cpu().numpy()
    kernel, params = bench.job.kernel, bench.state["params"]
    mine = np.asarray(jax.jit(kernel.apply)(params, bench.feed.at(0)["x"]), np.float32)
    y = y.transpose(0, 2, 3, 1) if y.ndim == 4 else y
    difference = float(np.linalg.norm(mine - y) / np.linalg.norm(y))
    if not difference <= limit:
        raise SystemExit(
            f"{kernel.title}: outputs differ by {difference:.2g}: not the same computation, not timed"
        )
    return difference


def _as_torch(bench: LayerBenchmark) -> dict[str, np.ndarray] | None:
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), bench.state["params"])
    config = bench.job.config
    if isinstance(config, configs.Dense):
        return {"weight": params["kernel"].T, "bias": params["bias"]}
    if isinstance(config, configs.GroupedConv):
        kernels = params if isinstance(params, list) else list(jax.tree.leaves(params))
        return {f"{i}.weight": kernel.transpose(3, 2, 0, 1) for i, kernel in enumerate(kernels)}
    if isinstance(config, configs.LstmMulti):
        layers = {}
        for number, layer in enumerate(params["layers"]):
            layers |= {f"layers.{k}": v for k, v in _recurrent(layer, number, forget=1.0).items()}
        readout = params["readout"]
        return layers | {"readout.weight": readout["kernel"].T, "readout.bias": readout["bias"]}
    if isinstance(config, configs.Gru) and not config.reset_after:
        return None  # torch's GRU resets after the product
    forget = 1.0 if isinstance(config, configs.Lstm) else 0.0
    return {f"layer.{k}": v for k, v in _recurrent(params, 0, forget).items()}


def _recurrent(params: dict[str, np.ndarray], number: int, forget: float) -> dict[str, np.ndarray]:
    bias, hidden = params["bias"].copy(), params["recurrent"].shape[0]
    bias[hidden : 2 * hidden] += forget
    return {
        f"weight_ih_l{number}": params["input"].T,
        f"weight_hh_l{number}": params["recurrent"].T,
        f"bias_ih_l{number}": bias,
        f"bias_hh_l{number}": params.get("recurrent_bias", np.zeros_like(bias)),
    }


def check(trial: LayerBenchmark) -> CheckResult:
    """Ours against float64, before anything is timed; the trial has run once then."""
    if trial.job.config.train:
        checked = ours.check_training(trial.job, trial.state, trial.feed)
        trial.step()
        return checked
    trial.step()
    return ours.check_inference(trial.job, trial.state, trial.feed)


def of_length(trial: LayerBenchmark, target: float) -> LayerBenchmark:
    """The benchmark in calls of about `target` seconds: the trial itself where that is its length.

    What a call costs is most of a short trial's time: so the length is found in two steps.
    """
    bench = trial
    for _ in range(2):
        length = bench.job.config.batches_per_step
        wanted = target * length / seconds(bench.step)
        wanted = round(wanted / ROUND) * ROUND or max(FEWEST, round(wanted))
        if max(wanted, length) < 1.5 * min(wanted, length):
            return bench
        bench = prepare(replace(bench.job, config=replace(bench.job.config, batches_per_step=wanted)))
        bench.step()
    return bench


def compare(case: Case, device: jax.Device, options: argparse.Namespace) -> dict[str, object]:
    """Both sides in turn, so that a busy moment of the machine meets both."""
    job = make_job(replace(case.config, batches_per_step=2 * FEWEST, dtype=options.dtype), device)
    if job.kernel.cost(1).flops > LARGE:
        job = replace(job, config=replace(job.config, batches_per_step=FEWEST))
    trial, dtype = prepare(job), job.dtype
    checked = check(trial)
    side = "cuda" if device.platform == "gpu" else "cpu"
    model, torch_run, torch_memory = torch_iterations(job.config, dtype, side)
    difference = None if job.config.train else agree(trial, model, 1e-4 if dtype == "float32" else 2e-2)
    bench = of_length(trial, options.seconds)
    length, iterations = bench.job.config.batches_per_step, enough(torch_run, options.seconds)
    turns = {"ours": (bench.step, length), "torch": (partial(torch_run, iterations), iterations)}
    times: dict[str, list[float]] = {name: [] for name in turns}
    rounds = options.rounds
    while len(times["ours"]) < rounds:
        began = time.perf_counter()
        for name, (run, count) in turns.items():
            times[name].append(seconds(run) / count * 1e6)
        rounds = rounds_within(options.limit, time.perf_counter() - began, rounds)
    return {
        "case": case.name,
        "dtype": dtype,
        **{f"{name}_us": statistics.median(values) for name, values in times.items()},
        **ratios(times["ours"], times["torch"]),
        "floor": case.floor,
        "rounds": rounds,
        "iterations_a_round": {"ours": length, "torch": iterations},
        "memory_bytes": {"ours": program_bytes(bench.program.compiled), "torch": torch_memory},
        "native_calls": count_native_calls(bench.program.compiled.as_text()),
        "error_against_float64": max(checked.errors.values()),
        "difference_from_torch": difference,
    }


def chosen(cases: list[Case], words: list[str]) -> Iterator[Case]:
    for case in cases:
        if not words or any(word in case.name for word in words):
            yield case


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="*", default=[], help="only cases whose name holds one of these words"
    )
    parser.add_argument(
        "--quick", action="store_true", help="three short rounds: a smoke test, not a measurement"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float16", "bfloat16", "float32"),
        default="auto",
        help="number type of both sides; auto: float16 on a GPU, float32 on a CPU",
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=TARGET_SECONDS, help="length of a turn")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_SECONDS,
        help="seconds of a case's rounds, of which there are then fewer, but three at least",
    )
    parser.add_argument("--save", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds, options.limit = 3, 0.05, 0.0
    return options


def main(arguments: list[str]) -> int:
    options, load = parsed(arguments), load_before()
    device = setup(options.device)
    versions = f"jax {jax.__version__}, torch {torch.__version__}, hotloop-native {native_version()}"
    print(f"{device.device_kind}, {torch.get_num_threads()} torch threads; {versions}")
    print(f"{'case':48} {'ours us':>10} {'torch us':>10} {'ratio':>7} {'range':>15} {'floor':>6}")
    results = []
    for case in chosen(cpu_cases() if options.device == "cpu" else gpu_cases(), options.cases):
        result = compare(case, device, options)
        results.append(result)
        spread = f"{result['ratio_low']:.2f} to {result['ratio_high']:.2f}"
        missed = case.floor is not None and result["ratio"] < case.floor
        print(
            f"{case.name:48} {result['ours_us']:10.1f} {result['torch_us']:10.1f} {result['ratio']:7.2f} {spread:>15} "
            f"{'' if case.floor is None else case.floor:>6}{'  MISSED' if missed else ''}",
            flush=True,
        )
        if options.save:  # after every case: what ends at a limit keeps what it had
            save(options.save, {"torch": torch.__version__, "load_before": f"{load:.2f}"}, results)
    return int(any(r["floor"] is not None and r["ratio"] < r["floor"] for r in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
