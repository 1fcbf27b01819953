"""`hotloop kernel ...`: one command a layer, one for HMC, and `all`. Options live in the configs; jax waits."""

from collections.abc import Mapping
from typing import Any

from hotloop.cli.command import Command, Context, Result
from hotloop.engine import processes
from hotloop.errors import OptionError
from hotloop.families.kernels import config as configs
from hotloop.options import build

EPILOG = """Each run checks its numbers against float64 first and refuses to time a wrong kernel. docs/kernels.md
says what is computed, how the timing is kept honest and what became of the old programs' options."""


def run_kernel(config: configs.LayerOptions | configs.Hmc, context: Context) -> Result:
    device = context.open_device()
    from hotloop.families.kernels import bench, hmc

    if processes.count() > 1:
        raise OptionError(
            "kernel: times the devices of one process, and here are several; start it by itself"
        )
    if isinstance(config, configs.Hmc):
        return hmc.run(config, device, context)
    return bench.run(config, device, context)


LAYERS: dict[str, tuple[type[configs.LayerOptions], str]] = {
    "dense": (configs.Dense, "One fully connected layer."),
    "grouped-conv": (configs.GroupedConv, "A chain of grouped 2-D convolutions."),
    "rnn": (configs.Rnn, "One tanh RNN layer."),
    "gru": (configs.Gru, "One GRU layer, fused or a cell a step."),
    "lstm": (configs.Lstm, "One LSTM layer, fused or a cell a step."),
    "lstm-multi": (configs.LstmMulti, "Stacked LSTMs with a dense final layer, with latencies."),
}
COLUMNS = ("kernel", "mode", "dtype", "items/sec", "us/iteration", "TFLOP/s", "GB/s", "roofline %", "bound")


def run_all(config: configs.AllKernels, context: Context) -> Result:
    """Every kernel with its defaults, then one table."""
    same = {"repeat": config.repeat, "seed": config.seed}
    same |= {} if config.steps is None else {"steps": config.steps}
    results: dict[str, Mapping[str, Any]] = {}
    for name, (layer, _) in LAYERS.items():
        length = {"batches_per_step": config.batches_per_step} if config.batches_per_step else {}
        trained = {"train": config.train, "optimizer": config.optimizer}
        chosen = build(layer, {**same, **length, **trained, "dtype": config.dtype})
        results[name] = run_kernel(chosen, context)
        context.say("")
    length = {"hmc_steps": config.batches_per_step} if config.batches_per_step else {}
    results["hmc"] = run_kernel(build(configs.Hmc, {**same, **length}), context)
    context.say("")
    rows = []
    for name, result in results.items():
        rounded = [float(f"{result[key]:.4g}") for key in ("microseconds_per_iteration", "tflops", "gbps")]
        figures = (round(result["items_per_second"], 1), *rounded, float(f"{100 * result['roofline']:.3g}"))
        rows.append((name, result["mode"], result["dtype"], *figures, result["limits"]["bound"]))
    context.table(COLUMNS, rows)
    return {"results": results}


COMMAND = Command(
    children=(
        *(
            Command(name, summary, config, run_kernel, epilog=EPILOG, aliases=(name.replace("-", "_"),))
            for name, (config, summary) in LAYERS.items()
        ),
        Command("hmc", "Hamiltonian Monte Carlo steps.", configs.Hmc, run_kernel, epilog=EPILOG),
        Command(
            "all",
            "Every kernel with its defaults, and one table.",
            configs.AllKernels,
            run_all,
            epilog=EPILOG,
        ),
    ),
)
