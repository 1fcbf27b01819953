"""Train a small network on drawn digits: one program that uses every part of the engine.

    python examples/digits.py --run results/digits             train; Ctrl-C stops, saved
    python examples/digits.py --run results/digits --resume    go on where it stopped or was killed
    python examples/digits.py --run results/mnist --data mnist --samples 60000

The model is a family in the sense of docs/engine.md: `init`, `update` and `evaluate`, three pure functions
and a frozen config. Everything else (the compiled loop, shuffled batches, logs, checkpoints, Ctrl-C) is the
engine's.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from hotloop.data import load
from hotloop.data.stand_ins import draw_digits
from hotloop.engine.checkpoint import Checkpoints, KeepLast
from hotloop.engine.device import setup
from hotloop.engine.drive import drive, newest
from hotloop.engine.evaluate import Evaluation
from hotloop.engine.feed import Resident
from hotloop.engine.interrupt import Stopped, raise_stops
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program
from hotloop.engine.plan import Batch, Plan
from hotloop.engine.run import Run
from hotloop.engine.sinks import ConsoleSink
from hotloop.errors import HotloopError
from hotloop.layers.initial import constant, draw, he_normal


@dataclass(frozen=True)
class Config:
    """What the run's result depends on."""

    epochs: int = 5
    batch_size: int = 50
    hidden: int = 256
    learning_rate: float = 1e-3
    dropout: float = 0.1
    logs_per_epoch: int = 1
    checkpoints_per_epoch: int = 1
    data: str = "drawn"  # or mnist
    samples: int = 5_000
    seed: int = 0


def init(config: Config, key: Array) -> dict[str, Any]:
    """Random weights, biases of zero, and an optimiser that has seen nothing."""
    sizes = {"hidden": (784, config.hidden), "output": (config.hidden, 10)}
    specs = {name: {"w": he_normal(size), "b": constant(size[1:])} for name, size in sizes.items()}
    params = draw(key, specs)
    return {"params": params, "optimiser": optax.adam(config.learning_rate).init(params)}


def logits(params: Any, images: Array, keep: Array | float = 1.0) -> Array:
    """Two layers; `keep` scales the hidden units."""
    x = images.reshape(len(images), 784).astype(jnp.float32) / 255
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"]) * keep
    scores: Array = hidden @ params["output"]["w"] + params["output"]["b"]
    return scores


def update(config: Config) -> Any:
    """One weight update."""
    optimiser = optax.adam(config.learning_rate)

    def one(state: Any, batch: Any, key: Array) -> tuple[Any, dict[str, Array]]:
        kept = jax.random.bernoulli(key, 1 - config.dropout, (len(batch["label"]), config.hidden))

        def loss(params: Any) -> Array:
            scores = logits(params, batch["image"], kept / (1 - config.dropout))
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean()

        value, gradient = jax.value_and_grad(loss)(state["params"])
        change, moments = optimiser.update(gradient, state["optimiser"])
        return {"params": optax.apply_updates(state["params"], change), "optimiser": moments}, {"loss": value}

    return one


def evaluate(config: Config) -> Any:
    """For each sample: is the answer right?"""

    def values(state: Any, batch: Any) -> dict[str, Array]:
        return {"correct": logits(state["params"], batch["image"]).argmax(-1) == batch["label"]}

    return values


def load_data(config: Config) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Images and labels to train and to test with; they stay bytes until the device needs numbers."""
    if config.data == "mnist":
        found = load("mnist")
        splits = [(found.train.images, found.train.labels), (found.test.images, found.test.labels)]
    else:
        splits = [draw_digits(config.samples, seed=1), draw_digits(1_000, seed=2)]
    train, test = ({"image": image, "label": label.astype(np.uint8)} for image, label in splits)
    return {name: array[: config.samples] for name, array in train.items()}, test


def train(config: Config, folder: Path, resume: bool) -> dict[str, Any]:
    """Plan, feed, program, run: the whole of it."""
    setup()
    images, new_images = load_data(config)
    plan = Plan.for_epochs(
        len(images["label"]),
        config.epochs,
        Batch.of(config.batch_size),
        logs_per_epoch=config.logs_per_epoch,
        ckpts_per_epoch=config.checkpoints_per_epoch,
        validations_per_epoch=1,
    )
    key = seed_key(config.seed)
    feed = Resident(images, config.batch_size, seed=config.seed)
    evaluation = Evaluation(evaluate(config), new_images, batch_size=200)

    def validate(state: Any) -> dict[str, float]:
        sums = evaluation(state)
        return {"accuracy": sums["correct"] / sums["samples"]}

    command = " ".join(["python", *sys.argv])
    state = init(config, stream(key, "init", 0))
    with (
        Run.create(folder, asdict(config), command=command, resume=resume, sinks=[ConsoleSink(print)]) as run,
        Checkpoints(run.checkpoints, KeepLast(3), family="digits", config=asdict(config)) as checkpoints,
    ):
        state = drive(
            Program(update(config), feed, plan.updates_per_call, key),
            plan,
            state,
            run,
            checkpoints,
            resumed=newest(checkpoints, state) if resume else None,
            validate=validate,
            guard="loss",
            how_to_resume=command if resume else f"{command} --resume",
        )
        return validate(state)


def main() -> int:
    """Options in, exit status out: 2 for a mistake, 130 for Ctrl-C, 143 for SIGTERM."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder for records and checkpoints")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in the folder"
    )
    for name, default in asdict(Config()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"default {default}")
    options = vars(parser.parse_args())
    folder, resume = options.pop("run"), options.pop("resume")
    try:
        with raise_stops():
            result = train(Config(**options), folder, resume)
    except HotloopError as error:
        print(error, file=sys.stderr)
        return 2
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return stop.exit_status
    print(f"accuracy on new digits: {100 * result['accuracy']:.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
