"""The recommender's training against torch: python benchmarks/peers/recommender.py [--device gpu] [--json FILE].

Ours is the update of `hotloop recommender train`: ratings stay sparse on the device, batches are made dense inside the
compiled loop. Torch is a DeepRecommender-style loop: a batch's rows are made dense on the host (one numpy assignment
for the batch), sent, and the same joint re-feeding update is made eagerly (tied weights, SELU, dropout on the code,
masked loss, decay, momentum; on a GPU under float16 autocast with float32 weights, which is its fast way). Before
anything is timed both compute the same loss and gradient from the same weights, without dropout, or the program stops.
Then both take turns; a round's ratio is torch's time over ours. `--shape` gives the made-up ratings.
"""

import argparse
import os
import statistics
import sys
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks share a GPU's memory

import jax
import jax.numpy as jnp
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
    take_turns,
    torch_bytes,
    torch_peak,
)
from netflix_shape import SHAPES, made_up

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.device import setup
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.families.recommender import batches, model
from hotloop.families.recommender.batches import make_rating_error
from hotloop.families.recommender.config import TrainOptions, make_schedule

FLOORS = {"cpu": 2.0, "cuda": 5.0}


class Ours:
    """Our update in its compiled loop, which takes whole calls of `per_call` updates."""

    def __init__(self, matrix: RatingMatrix, job: model.Job, batch_size: int, per_call: int):
        sparse = model.takes_sparse(job, matrix)
        feed = batches.make_feed(matrix, batch_size, 0, job.policy.compute, sparse=sparse)
        self.program, self.per_call = Program(model.update(job), feed, per_call, seed_key(0)), per_call
        self.state, self.done = copy_state(model.init(job, seed_key(2))), 0
        self.program.compile(self.state)

    def advance(self, count: int) -> None:
        for _ in range(count // self.per_call):
            self.state, metrics = self.program(self.state, self.done, self.per_call)
            self.done += self.per_call
        metrics.wait()


class Torch:
    """The same update, plainly."""

    def __init__(
        self, matrix: RatingMatrix, layers: tuple[int, ...], dropout: float, rate: float, device: str
    ):
        self.matrix, self.device, self.dropout, self.rate = matrix, device, dropout, rate
        sizes = [matrix.n_items, *layers]
        self.weights = [torch.nn.Parameter(torch.empty(b, a, device=device)) for a, b in pairwise(sizes)]
        for weight in self.weights:
            torch.nn.init.xavier_uniform_(weight)
        down, up = sizes[1:], list(reversed(sizes[:-1]))
        self.biases = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in (*down, *up)]
        self.optimiser = torch.optim.SGD(
            [*self.weights, *self.biases], rate, momentum=0.9, weight_decay=1e-4, fused=True
        )
        self.scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
        self.rng = np.random.default_rng(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depth = len(self.weights)
        for weight, bias in zip(self.weights, self.biases, strict=False):
            x = torch.selu(torch.nn.functional.linear(x, weight, bias))
        x = torch.nn.functional.dropout(x, self.dropout)
        for weight, bias in zip(reversed(self.weights), self.biases[depth:], strict=True):
            x = torch.selu(torch.nn.functional.linear(x, weight.T, bias))
        return x

    def dense(self, users: np.ndarray) -> torch.Tensor:
        first, last = self.matrix.starts[users], self.matrix.starts[users + 1]
        sizes = last - first
        places = np.repeat(first - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(
            sizes.sum()
        )
        batch = np.zeros((len(users), self.matrix.n_items), np.float32)
        batch[np.repeat(np.arange(len(users)), sizes), self.matrix.items[places]] = self.matrix.levels[
            self.matrix.codes[places]
        ]
        return torch.from_numpy(batch).to(self.device)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.float16, enabled=self.device == "cuda"):
            y = self.forward(x)
            z = self.forward(y)
        there = x > 0
        mask = torch.where(there, y.float() - x, 0).square().sum() / there.sum()
        return mask + (z.float() - y.float()).square().mean()

    def update(self, users: np.ndarray) -> torch.Tensor:
        loss = self.loss(self.dense(users))
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return loss.detach()

    def advance(self, batch_size: int, count: int) -> None:
        for _ in range(count):
            loss = self.update(self.rng.integers(0, self.matrix.users, batch_size))
        loss.item()


def job_of(matrix: RatingMatrix, size: int, batch_size: int, precision: str = "auto") -> model.Job:
    config = TrainOptions(size=size, batch_size=batch_size, precision=precision).resolve()
    drops = make_schedule(config, matrix.users).drops
    return model.make_job(config, matrix.users, matrix.n_items, drops, 1, 5)


def check(matrix: RatingMatrix, layers: tuple[int, ...], device: str) -> float:
    """The relative difference of the first weight's gradient, torch against ours, float32, no dropout."""
    peer = Torch(matrix, layers, 0.0, 0.0, device)
    users = np.arange(16)
    x = peer.dense(users)
    with torch.autocast(device, enabled=False):
        y = peer.forward(x)
        there = x > 0
        mask = torch.where(there, y - x, 0).square().sum() / there.sum()
        loss = mask + (peer.forward(y) - y).square().mean()
    loss.backward()
    params = {
        "encoder": tuple(
            {"w": jnp.asarray(w.detach().cpu().numpy().T), "b": jnp.zeros(len(w))} for w in peer.weights
        ),
        "decoder": tuple({"b": jnp.zeros(n)} for n in reversed([matrix.n_items, *layers][:-1])),
    }
    rows = jax.device_put(batches.make_rows(matrix))
    capacity = batches.max_ratings(matrix, len(users))

    def ours(params):
        x = batches.densify(rows, jnp.asarray(users), matrix.n_items, capacity)
        y = model.forward(params, x)
        return model.masked_error(y, x) + jnp.square(model.forward(params, y) - y).mean()

    with jax.default_matmul_precision("highest"):
        gradient = np.asarray(jax.jit(jax.grad(ours))(params)["encoder"][0]["w"])
    theirs = peer.weights[0].grad.cpu().numpy().T
    return float(np.linalg.norm(gradient - theirs) / np.linalg.norm(theirs))


def main() -> int:
    options, load = arguments(), load_before()
    device = "cuda" if setup(options.device).platform == "gpu" else "cpu"
    torch.set_float32_matmul_precision("highest")
    matrix = made_up(*SHAPES[options.shape])
    print(f"{options.shape}: {matrix.users:,} users, {matrix.n_items:,} items, {matrix.ratings:,} ratings")
    job = job_of(matrix, options.size, options.batch_size, options.precision)
    error = check(matrix, job.layers, device)
    print(f"one gradient, torch against ours in float32: relative difference {error:.1e}")
    if error > (1e-4 if device == "cpu" else 2e-3):
        raise SystemExit("they do not compute the same: not timed")
    torch.set_float32_matmul_precision("high")
    ours = Ours(matrix, job, options.batch_size, per_call=10 if device == "cpu" else 250)
    before = torch_bytes(device)
    peer = Torch(matrix, job.layers, job.dropout, job.rates[0], device)
    theirs = partial(peer.advance, options.batch_size)
    ours.advance(ours.per_call)
    theirs(3)
    memory = {"ours": program_bytes(ours.program.compiled), "torch": torch_peak(partial(theirs, 2), before)}
    _, times = take_turns(
        {"ours": (ours.advance, ours.per_call), "torch": (theirs, 1)}, options.rounds, options.seconds
    )
    compared = ratios(times["ours"], times["torch"])
    floor = FLOORS[device]
    row = {"shape": options.shape, "size": options.size, "batch_size": options.batch_size, "precision": str(job.policy),
           **compared, "floor": floor, "rounds": options.rounds,
           "native_calls": count_native_calls(ours.program.compiled.as_text())}  # fmt: skip
    for name in times:
        middle = statistics.median(times[name])
        rate, needed = options.batch_size / middle, memory[name]
        row[name] = {"milliseconds": 1e3 * middle, "users_per_second": rate, "memory_bytes": needed}
        said = f", {mebibytes(needed)} MiB" if needed else ""
        print(f"{name:6} {1e3 * middle:9.3f} ms an update, {rate:12,.0f} users/s{said}")
    print(
        f"ratio {compared['ratio']:.2f} ({compared['ratio_low']:.2f} to {compared['ratio_high']:.2f}), floor {floor}"
    )
    print(f"an epoch of ours: {matrix.users / row['ours']['users_per_second']:.1f} s")
    if options.evaluate:
        row["evaluation_users_per_second"] = evaluation(job, matrix, ours.state, options.evaluate)
    if device == "cuda":
        row["device_memory_bytes"] = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
        print(f"peak of our device memory: {row['device_memory_bytes'] / 2**30:.2f} GiB")
    if options.json:
        save(options.json, {"torch": version("torch"), "load_before": f"{load:.2f}"}, [row])
    return int(compared["ratio"] < floor)


def evaluation(job: model.Job, matrix: RatingMatrix, state: object, batch_size: int) -> float:
    """Users a second of an exact evaluation of every user, compilation not counted."""
    errors = make_rating_error(model.evaluate(job), matrix, matrix, batch_size)
    errors(state)
    rate = matrix.users / seconds(partial(errors, state))
    print(f"evaluation: {rate:,.0f} users/s")
    return rate


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--size", type=int, choices=(128, 256, 512), default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument(
        "--evaluate", type=int, default=0, help="also time an evaluation with so many users at once"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
