"""`hotloop demo`: every family, small but really measured, and a page of results at the end. jax waits."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotloop.cli.command import Command, Context, Result
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
    output: Path = option(Path("results/demo"), "Folder for index.html and results.json.", metavar="DIR")


class SilentContext(Context):
    """Only warnings pass: the demo has lines and a bar of its own."""

    def say(self, text: str) -> None:
        pass

    def progress(self, description: str, total: float | None = None) -> AbstractContextManager[Progress]:
        return hide(description, total)


def run(config: Demo, context: Context) -> Result:
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


LINES: dict[str, Callable[[Any], str]] = {
    "hot_loop": lambda found: (
        f"RNN training: {found[0][1]:,.0f} updates/s one a call, {found[-1][1]:,.0f} 1000 a call"
    ),
    "losses": lambda found: (
        f"RNN training: loss {found[0]:.3f} -> {found[-1]:.3f}, means of the first and the last of {len(found)} "
        "rounds of its batches"
    ),
    "hmc": lambda found: (
        f"hmc: {found['items_per_second']:,.0f} steps/s, acceptance {found['acceptance']:.4f} (0.7837 is exact)"
    ),
    "vcd": lambda found: (
        f"vcd on drawn digits: ELBO {found['elbo'][0]:,.0f} -> {found['elbo'][-1]:,.0f} nats; log p(x, z) "
        f"{found['log_joint_z0'][-1]:.0f} at the encoder's samples, {found['log_joint_zt'][-1]:.0f} after HMC; "
        f"{found['updates_per_second']:,.0f} updates/s"
    ),
    "recommender": lambda found: (
        f"recommender on drawn tastes: RMSE {found['rmse'][0]:.2f} -> {min(found['rmse']):.3f} stars (biases "
        f"{found['biases']:.3f}), {found['users_per_second']:,.0f} users/s"
    ),
    "cnn": lambda found: (
        f"cnn on drawn digits: accuracy {100 * found['validation'][0]:.0f} % -> "
        f"{100 * found['validation'][-1]:.0f} % on digits not seen, {found['images_per_second']:,.0f} images/s"
    ),
    "estimator": lambda found: (
        f"estimator on drawn objects: accuracy {100 * found['test_accuracy']:.0f} % after {found['updates']} "
        f"updates (chance 10 %), {found['images_per_second']:,.0f} images/s"
    ),
}
"""What is said of each part's figures, which have the same name in the results."""


def measure(device: Any, context: Context) -> dict[str, Any]:
    from hotloop.families.cnn import demo as cnn
    from hotloop.families.estimator.cifar import program as estimator
    from hotloop.families.kernels import bench, hmc
    from hotloop.families.recommender import demo as recommender
    from hotloop.families.vcd import demo as vcd

    console = SilentContext(**vars(context))
    parts: dict[str, Callable[[], Any]] = {
        "losses": lambda: loss_curve(device),
        "hmc": lambda: hmc.run(HMC, device, console),
        "histogram": lambda: sample_histogram(device),
        "vcd": vcd.demo_run,
        "recommender": lambda: recommender.demo_run(console),
        "cnn": cnn.demo_run,
        "estimator": estimator.demo_run,
    }
    results: dict[str, Any] = {"kernels": {}, "hot_loop": []}
    with context.progress("kernels", 2 * len(LAYERS) + len(UPDATES_PER_CALL) + len(parts)) as bar:
        for name, layer in LAYERS.items():
            for mode, chosen in {name: layer, f"{name} training": replace(layer, train=True)}.items():
                bar.update(mode)
                found = results["kernels"][mode] = bench.run(chosen, device, console)
                microseconds, share = found["microseconds_per_iteration"], 100 * found["roofline"]
                context.say(
                    f"{mode:22} {found['items_per_second']:>12,.0f} items/s "
                    f"{microseconds:>10,.1f} us {share:>6.1f} % of the roofline"
                )
                bar.advance()
        # of the same training: updates in one call, updates a second, and those at the time's 90th and 10th percentile
        bar.update("the hot loop")
        for updates in UPDATES_PER_CALL:
            chosen = replace(HOT_LOOP, batches_per_step=updates, steps=max(3, 100 // updates))
            timed = bench.run(chosen, device, console)
            rate, seconds = timed["items_per_second"], timed["seconds"]
            ends = (rate * seconds["median"] / seconds[end] for end in ("p90", "p10"))
            results["hot_loop"].append((updates, rate, *ends))
            bar.advance()
        context.say(LINES["hot_loop"](results["hot_loop"]))
        for name, part in parts.items():
            bar.update(name)
            results[name] = part()
            if name in LINES:
                context.say(LINES[name](results[name]))
            bar.advance()
    return results


def loss_curve(device: Any) -> list[float]:
    """The loss of a training run, averaged over each round of its batches."""
    from hotloop.families.kernels.bench import make_job, prepare

    benchmark = prepare(make_job(LEARNING, device))
    benchmark.step()
    rounds: list[float] = benchmark.losses().reshape(-1, benchmark.feed.batches).mean(1).tolist()
    return rounds


def sample_histogram(device: Any) -> dict[str, Any]:
    """Where many HMC chains of the toy target stand after a few steps."""
    import numpy as np

    from hotloop.families.kernels.hmc import prepare, toy

    sampler = prepare(SAMPLES, toy(SAMPLES), device.platform)
    sampler.step()
    counts, edges = np.histogram(sampler.state.position, BINS, RANGE)
    return {"counts": counts.tolist(), "edges": edges.tolist(), "chains": SAMPLES.chains}


COMMAND = Command(config=Demo, run=run)
