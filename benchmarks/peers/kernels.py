"""Our kernels against torch, interleaved in one run: python benchmarks/peers/kernels.py [--quick] [--save FILE].

Ours is the program that `hotloop kernel` times: many iterations in one compiled call, checked against float64 first.
Torch is a loop of calls (on a GPU, inference replays a CUDA graph of cuDNN's kernels, which is the strongest form it
has). Both sides run in turn for several rounds; a round's ratio is torch's time over ours, so more is better for us.
The table gives the median and the range of the rounds' ratios beside the floor that we hold ourselves to; a missed
floor is said and gives exit status 1. Compilation and warm-up are not timed.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks share a GPU's memory

import jax
import numpy as np
import torch
from common import enough, ratios, save, seconds

from hotloop.engine.device import setup
from hotloop.families.kernels import bench as ours
from hotloop.families.kernels import config as configs
from hotloop.families.kernels.bench import LayerBenchmark, make_job, prepare

TARGET_SECONDS = 0.3  # of one side's turn in a round


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


def cpu_cases() -> list[Case]:
    """The old programs' default shapes, and the larger ones that users ask about."""
    wide = configs.GroupedConv(batch_size=4, filter_in=128, filter_out=128, group_dim=4, block_repeats=1)
    return [
        *both_modes("rnn B1 T5 H128", configs.Rnn(), 8, 5),
        *both_modes("gru B1 T5 H128", configs.Gru(fused=True), 8, 5),
        *both_modes("gru B1 T5 H128, reset after", configs.Gru(fused=True, reset_after=True), 8, 5),
        *both_modes("lstm B1 T5 H128", configs.Lstm(fused=True), 8, 5),
        *both_modes("lstm-multi B1 T200 I16 H256 L2", configs.LstmMulti(), 1, 1),
        *both_modes("grouped-conv 1x56x56x64, 64 groups, 10 blocks", configs.GroupedConv(), 0.2, 0.12),
        *both_modes("grouped-conv 4x56x56x128, 32 groups", wide, 0.2, 0.12),
        *both_modes("dense B32 N1024", configs.Dense(), 0.45, 0.45),
        *both_modes(
            "lstm B64 T25 H512",
            configs.Lstm(batch_size=64, timesteps=25, hidden_size=512, fused=True),
            0.45,
            0.45,
        ),
    ]


GPU_SHAPES = ((1, 5, 128), (64, 25, 512), (256, 25, 1024), (128, 50, 1536), (1024, 150, 256))


def gpu_cases() -> list[Case]:
    """The recurrent grid in float16: inference has floors against CUDA graphs, the rest is recorded."""
    cases = []
    for batch, timesteps, hidden in GPU_SHAPES:
        shape = {"batch_size": batch, "timesteps": timesteps, "hidden_size": hidden}
        floor = 1.0 if batch == 1 else 0.7
        name = f"B{batch} T{timesteps} H{hidden}"
        gru = configs.Gru(**shape, input_size=hidden, fused=True)
        cases += [
            *both_modes(f"lstm {name}", configs.Lstm(**shape, fused=True), floor, None),
            *both_modes(f"gru {name}, reset after", replace(gru, reset_after=True), floor, None),
            Case(f"gru {name}, reset before", gru, None),
            *both_modes(f"rnn {name}", configs.Rnn(**shape), None, None),
        ]
    return [
        *cases,
        *both_modes("lstm-multi B1 T200 I16 H256 L2", configs.LstmMulti(), None, None),
        *both_modes("dense B32 N1024", configs.Dense(), None, None),
        *both_modes("grouped-conv 1x56x56x64, 64 groups, 10 blocks", configs.GroupedConv(), None, None),
    ]


class Stack(torch.nn.Module):
    """LSTMs in a row and a dense layer of one output on the last hidden state."""

    def __init__(self, config: configs.LstmMulti):
        super().__init__()
        self.layers = torch.nn.LSTM(config.input_size, config.hidden_size, config.num_layers)
        self.readout = torch.nn.Linear(config.hidden_size, 1)

    def forward(self, x):
        return self.readout(self.layers(x)[0][-1])


class Every(torch.nn.Module):
    """All outputs of a recurrent layer, without its last state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def torch_model(config: configs.LayerOptions) -> tuple[torch.nn.Module, tuple[int, ...]]:
    """The same layer in torch, and the shape of its input."""
    if isinstance(config, configs.Dense):
        return torch.nn.Linear(config.size, config.size), (config.batch_size, config.size)
    if isinstance(config, configs.GroupedConv):
        side, k = config.input_size, config.kernel_size
        blocks = [
            torch.nn.Conv2d(
                config.filter_in,
                config.filter_out,
                k,
                config.stride,
                k // 2,
                groups=config.groups,
                bias=False,
            )
            for _ in range(config.block_repeats)
        ]
        return torch.nn.Sequential(*blocks), (config.batch_size, config.filter_in, side, side)
    if isinstance(config, configs.LstmMulti):
        return Stack(config), (config.timesteps, config.batch_size, config.input_size)
    kind = {configs.Rnn: torch.nn.RNN, configs.Gru: torch.nn.GRU, configs.Lstm: torch.nn.LSTM}[type(config)]
    inputs = getattr(config, "input_size", config.hidden_size)
    return Every(kind(inputs, config.hidden_size)), (config.timesteps, config.batch_size, inputs)


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


def torch_loss(
    config: configs.LayerOptions, shape: tuple[int, ...], device: str
) -> Callable[..., torch.Tensor]:
    """The loss that our kernel trains with."""
    if isinstance(config, configs.Rnn | configs.Gru | configs.Lstm):
        classes = min(shape[-1], config.hidden_size)
        labels = torch.randint(classes, (shape[0] * shape[1],), device=device)
        return lambda y: torch.nn.functional.cross_entropy(y.flatten(0, 1).float(), labels)
    return lambda y: y.float().square().mean()


def torch_iterations(
    config: configs.LayerOptions, dtype: str, device: str
) -> tuple[torch.nn.Module, Callable[[int], None]]:
    """The model, and a function that runs so many iterations to their end."""
    model, shape = torch_model(config)
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    model = model.to(device, kind)
    x = torch.randn(shape, device=device, dtype=kind)
    if x.ndim == 4:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    one = _training(config, model, x, shape, device) if config.train else _inference(model, x, device)

    def run(count: int) -> None:
        with torch.inference_mode(not config.train):
            for _ in range(count):
                one()
            if device == "cuda":
                torch.cuda.synchronize()

    return model, run


def _training(config, model, x, shape, device) -> Callable[[], object]:
    loss, optimiser = torch_loss(config, shape, device), torch.optim.SGD(model.parameters(), lr=1e-4)

    def update() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss(model(x)).backward()
        optimiser.step()

    return update


def _inference(model, x, device) -> Callable[[], object]:
    if device == "cpu":
        return lambda: model(x)
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
    return graph.replay


def compare(case: Case, device: jax.Device, rounds: int, target: float) -> dict[str, object]:
    """Both sides in turn, so that a busy moment of the machine meets both."""
    config = replace(case.config, batches_per_step=4)
    job = make_job(config, device)
    trial, dtype = prepare(job), job.dtype
    if config.train:
        checked = ours.check_training(trial.job, trial.state, trial.feed)
    else:
        trial.step()
        checked = ours.check_inference(trial.job, trial.state, trial.feed)
    model, torch_run = torch_iterations(config, dtype, "cuda" if device.platform == "gpu" else "cpu")
    difference = None if config.train else agree(trial, model, 1e-4 if dtype == "float32" else 2e-2)
    trial.step()
    each = seconds(trial.step) / config.batches_per_step
    timed = replace(config, batches_per_step=max(1, round(target / each)))
    bench = prepare(replace(job, config=timed))
    bench.step()
    iterations = enough(torch_run, target)
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(seconds(bench.step) / timed.batches_per_step * 1e6)
        theirs.append(seconds(partial(torch_run, iterations)) / iterations * 1e6)
    return {
        "case": case.name,
        "dtype": dtype,
        "ours_us": statistics.median(mine),
        "torch_us": statistics.median(theirs),
        **ratios(mine, theirs),
        "floor": case.floor,
        "rounds": rounds,
        "error_against_float64": max(checked.errors.values()),
        "difference_from_torch": difference,
    }


def chosen(cases: list[Case], words: list[str]) -> Iterator[Case]:
    for case in cases:
        if not words or any(word in case.name for word in words):
            yield case


def main() -> int:
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
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=TARGET_SECONDS, help="length of a turn")
    parser.add_argument("--save", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    device = setup(options.device)
    rounds, target = (3, 0.05) if options.quick else (options.rounds, options.seconds)
    versions = f"jax {jax.__version__}, torch {torch.__version__}"
    print(f"{device.device_kind}, {torch.get_num_threads()} torch threads; {versions}")
    print(f"{'case':48} {'ours us':>10} {'torch us':>10} {'ratio':>7} {'range':>15} {'floor':>6}")
    results = []
    for case in chosen(cpu_cases() if options.device == "cpu" else gpu_cases(), options.cases):
        result = compare(case, device, rounds, target)
        results.append(result)
        spread = f"{result['ratio_low']:.2f} to {result['ratio_high']:.2f}"
        missed = case.floor is not None and result["ratio"] < case.floor
        print(
            f"{case.name:48} {result['ours_us']:10.1f} {result['torch_us']:10.1f} {result['ratio']:7.2f} {spread:>15} "
            f"{'' if case.floor is None else case.floor:>6}{'  MISSED' if missed else ''}",
            flush=True,
        )
    if options.save:
        save(options.save, {"torch": torch.__version__}, results)
    return int(any(r["floor"] is not None and r["ratio"] < r["floor"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
