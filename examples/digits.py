"""Train a small network on drawn digits, as a program with a command line of its own.

python examples/digits.py --run results/digits             train; Ctrl-C stops, saved
python examples/digits.py --run results/digits --resume    go on where it stopped or was killed
python examples/digits.py --run results/mnist --data mnist --samples 60000
"""

import sys
from dataclasses import asdict, dataclass

import jax
import optax

from hotloop import Evaluation, Plan, Program, Resident, layers, train
from hotloop.cli import Command, Context, option, run_program
from hotloop.data import draw_digits, load


@dataclass(frozen=True)
class Config:
    run: str = option("results/digits", "Folder for records and checkpoints.")
    resume: bool = option(False, "Go on from the newest checkpoint in the folder.")
    epochs: int = option(5, "Passes over the images.")
    batch_size: int = option(50, "Images of a weight update.")
    hidden: int = option(256, "Hidden units.")
    learning_rate: float = option(1e-3, "The rate of Adam.")
    dropout: float = option(0.1, "Share of the hidden units that an update leaves out.")
    logs_per_epoch: int = option(1, "Logs an epoch.")
    checkpoints_per_epoch: int = option(1, "Checkpoints an epoch.")
    data: str = option("drawn", "Where the digits come from.", choices=("drawn", "mnist"))
    samples: int = option(5_000, "Images to train with.")
    seed: int = option(0, "Seed of weights, order and dropout.")


def init(config: Config, key: jax.Array) -> dict:
    first, second = jax.random.split(key)
    params = layers.init_dense(first, 784, config.hidden), layers.init_dense(second, config.hidden, 10)
    return {"params": params, "optimiser": optax.adam(config.learning_rate).init(params)}


def logits(params: tuple, images: jax.Array, keep: jax.Array | float = 1.0) -> jax.Array:
    return layers.dense(params[1], keep * jax.nn.relu(layers.dense(params[0], images.reshape(-1, 784) / 255)))


def run(config: Config, context: Context) -> dict[str, float]:
    def update(state: dict, batch: dict, key: jax.Array) -> tuple[dict, dict]:
        def loss(params: tuple) -> jax.Array:
            kept = jax.random.bernoulli(key, 1 - config.dropout, (config.batch_size, config.hidden))
            scores = logits(params, batch["image"], kept / (1 - config.dropout))
            return layers.cross_entropy(scores, batch["label"]).mean()

        value, slope = jax.value_and_grad(loss)(state["params"])
        change, moments = optax.adam(config.learning_rate).update(slope, state["optimiser"])
        return {"params": optax.apply_updates(state["params"], change), "optimiser": moments}, {"loss": value}

    def evaluate(state: dict, batch: dict) -> dict[str, jax.Array]:
        return {"accuracy": layers.correct(logits(state["params"], batch["image"]), batch["label"])}

    context.open_device()
    seen, new = draw_digits(config.samples, seed=1), draw_digits(1_000, seed=2)
    if config.data == "mnist":
        mnist = load("mnist")
        seen, new = (mnist.train.images, mnist.train.labels), (mnist.test.images, mnist.test.labels)
    data = {"image": seen[0][: config.samples], "label": seen[1][: config.samples]}
    feed, key = Resident(data, config.batch_size, seed=config.seed), jax.random.key(config.seed)
    events = {"logs_per_epoch": config.logs_per_epoch, "ckpts_per_epoch": config.checkpoints_per_epoch}
    plan = Plan.for_epochs(feed.samples, config.epochs, config.batch_size, validations_per_epoch=1, **events)
    program = Program(update, feed, plan.updates_per_call, key)
    evaluation = Evaluation(evaluate, {"image": new[0], "label": new[1]}, batch_size=200)
    kept = {name: value for name, value in asdict(config).items() if name not in ("run", "resume")}
    again = " ".join(["python", *sys.argv, *([] if config.resume else ["--resume"])])
    calls = {"validate": evaluation.means, "guard": "loss", "how_to_resume": again}
    state = train(program, plan, init(config, key), config.run, settings=kept, resume=config.resume, **calls)
    accuracy = evaluation.means(state)["accuracy"]
    context.say(f"accuracy on new digits: {100 * accuracy:.2f} %")
    return {"accuracy": accuracy}


if __name__ == "__main__":
    sys.exit(run_program(Command("digits.py", "Train a small network on drawn digits.", Config, run)))
