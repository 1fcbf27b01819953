"""`hotloop demo`: every family, small but really measured, and a page of results at the end. jax waits."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotloop.cli.command import Command, Context
from hotloop.engine.progress import Progress, hide
from hotloop.families.kernels import config as kernels
from hotloop.options import option, to_jsonable

STEPS = 7
LAYERS: dict[str, kernels.LayerOptions] = {
    "dense": kernels.Dense(steps=STEPS, batches_per_step=50),
    "grouped-conv": kernels.GroupedConv(steps=STEPS, batches_per_step=5),
    "rnn": kernels.Rnn(steps=STEPS, batches_per_step=400),
    "gru": kernels.Gru(steps=STEPS, batches_per_step=400, fused=True),
    "lstm": kernels.Lstm(steps=STEPS, batches_per_step=400, fused=True),
    "lstm-multi": kernels.LstmMulti(steps=STEPS, batches_per_step=10),
}
"""The seeds' default shapes with fewer iterations."""

UPDATES_PER_CALL = (1, 3, 10, 30, 100, 300, 1000)
HOT_LOOP = kernels.Rnn(train=True, learning_rate=0.5)
LEARNING = replace(HOT_LOOP, batches_per_step=600)
HMC = kernels.Hmc(steps=10)
SAMPLES = kernels.Hmc(chains=50_000, hmc_steps=20)
BINS, RANGE = 60, (-3.0, 2.0)


@dataclass(frozen=True)
class Demo:
    """Where the demo writes."""

    output: Path = option(Path("results/demo"), "Folder for index.html and results.json.", metavar="DIR")


class SilentConsole:
    """A console for benchmarks whose lines nobody needs: only warnings pass."""

    def __init__(self, context: Context):
        self.warn = context.warn

    def say(self, text: str) -> None:
        """Nothing: the demo has its own lines."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Nothing either."""

    def progress(self, description: str, total: float | None = None) -> AbstractContextManager[Progress]:
        """No bar of its own."""
        return hide(description, total)


def run(config: Demo, context: Context) -> Mapping[str, Any]:
    """Measure, tell, and write the page."""
    from hotloop.bench.page import write_text

    page_path = config.output / "index.html"
    write_text(page_path, "")  # an unwritable folder is found out now, not after the work
    device = context.open_device()

    from hotloop.bench.demo_page import build_demo_page
    from hotloop.engine.device import describe_environment
    from hotloop.engine.measure import describe_device

    context.say(f"hotloop demo on {describe_device(device)}: no data set and no network needed")
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "device": describe_device(device),
        **measure(device, context),
        "environment": describe_environment(),
    }
    write_text(config.output / "results.json", json.dumps(to_jsonable(results), allow_nan=False))
    path = build_demo_page(results).write(page_path)
    context.say(f"page: {path}")
    return {"page": str(path), **results}


def measure(device: Any, context: Context) -> dict[str, Any]:
    """All figures of the demo, each told as it comes."""
    from hotloop.families.cnn import demo as cnn
    from hotloop.families.estimator.cifar import program
    from hotloop.families.kernels import bench, hmc
    from hotloop.families.recommender import demo as recommender
    from hotloop.families.vcd.demo import demo_run

    quiet = SilentConsole(context)
    tasks = 2 * len(LAYERS) + len(UPDATES_PER_CALL) + 7
    results: dict[str, Any] = {}
    with context.progress("kernels", tasks) as bar:
        for name, layer in LAYERS.items():
            for mode, chosen in {"": layer, " training": replace(layer, train=True)}.items():
                bar.update(f"{name}{mode}")
                results[name + mode] = bench.run(chosen, device, quiet)
                context.say(kernel_line(name + mode, results[name + mode]))
                bar.advance()
        bar.update("the hot loop")
        curve = []
        for updates in UPDATES_PER_CALL:
            chosen = replace(HOT_LOOP, batches_per_step=updates, steps=max(3, 100 // updates))
            curve.append((updates, bench.run(chosen, device, quiet)["items_per_second"]))
            bar.advance()
        context.say(f"RNN training: {curve[0][1]:,.0f} updates/s one a call, {curve[-1][1]:,.0f} 1000 a call")
        losses = loss_curve(device)
        context.say(f"RNN training: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} updates")
        bar.advance()
        bar.update("hmc")
        chain = hmc.run(HMC, device, quiet)
        context.say(
            f"hmc: {chain['items_per_second']:,.0f} steps/s, acceptance {chain['acceptance']:.4f} (0.7837 is exact)"
        )
        bar.advance()
        histogram = sample_histogram(device)
        bar.advance()
        bar.update("vcd")
        vae = demo_run()
        context.say(
            f"vcd on drawn digits: ELBO {vae['elbo'][0]:,.0f} -> {vae['elbo'][-1]:,.0f} nats; log p(x, z) "
            f"{vae['log_joint_z0'][-1]:.0f} at the encoder's samples, {vae['log_joint_zt'][-1]:.0f} after HMC; "
            f"{vae['updates_per_second']:,.0f} updates/s"
        )
        bar.advance()
        bar.update("recommender")
        tastes = recommender.demo_run(quiet)
        context.say(
            f"recommender on drawn tastes: RMSE {tastes['rmse'][0]:.2f} -> {min(tastes['rmse']):.3f} stars (biases "
            f"{tastes['biases']:.3f}), {tastes['users_per_second']:,.0f} users/s"
        )
        bar.advance()
        bar.update("cnn")
        resnet = cnn.demo_run()
        context.say(
            f"cnn on drawn digits: accuracy {100 * resnet['validation'][0]:.0f} % -> "
            f"{100 * resnet['validation'][-1]:.0f} % on digits not seen, {resnet['images_per_second']:,.0f} images/s"
        )
        bar.advance()
        bar.update("estimator")
        shapes = program.demo_run()
        context.say(
            f"estimator on drawn objects: accuracy {100 * shapes['test_accuracy']:.0f} % after {shapes['updates']} "
            f"updates (chance 10 %), {shapes['images_per_second']:,.0f} images/s"
        )
        bar.advance()
    figures = {"hot_loop": curve, "losses": losses, "hmc": chain, "histogram": histogram, "vcd": vae,
               "recommender": tastes, "cnn": resnet, "estimator": shapes}  # fmt: skip
    return {"kernels": results, **figures}


def loss_curve(device: Any) -> list[float]:
    """The loss of a training run, averaged over each round of its batches."""
    from hotloop.families.kernels.bench import make_job, prepare

    benchmark = prepare(make_job(LEARNING, device))
    benchmark.step()
    rounds: list[float] = benchmark.losses().reshape(-1, benchmark.feed.batches).mean(1).tolist()
    return rounds


def sample_histogram(device: Any) -> dict[str, list[float]]:
    """Where many HMC chains of the toy target stand after a few steps."""
    import numpy as np

    from hotloop.families.kernels import targets
    from hotloop.families.kernels.hmc import prepare

    sampler = prepare(SAMPLES, targets.build(SAMPLES), device.platform)
    sampler.step()
    counts, edges = np.histogram(sampler.state.position, BINS, RANGE)
    return {"counts": counts.tolist(), "edges": edges.tolist()}


def kernel_line(name: str, result: Mapping[str, Any]) -> str:
    """One kernel in one line."""
    return (
        f"{name:22} {result['items_per_second']:>12,.0f} items/s {result['microseconds_per_iteration']:>10,.1f} us "
        f"{100 * result['roofline']:>6.1f} % of the roofline"
    )


COMMAND = Command(
    "demo", "See everything work in a few minutes, with a page of results at the end.", Demo, run
)
