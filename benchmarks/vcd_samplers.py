"""Whether vcd's samplers train alike: python benchmarks/vcd_samplers.py [--device gpu] [--batch-size N] [--json FILE].

Two questions about each sampler beside the plain one. Whole trainings from the same seeds: the ELBO of every sampler
after some updates, and the mean difference from the plain one's over the seeds with its standard error, beside what two
seeds differ by. And one update's chains from the same state and random numbers: how far positions and the decoder's
gradient are from those of full float32 products, beside how far other random numbers bring that gradient. Images are
random, with as many ones as digits have.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "peers"))

import jax
import jax.numpy as jnp
import numpy as np
from common import load_before, save

from hotloop.engine.device import setup
from hotloop.engine.feed import Resident
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.families.vcd import model as vcd
from hotloop.families.vcd import networks
from hotloop.families.vcd.config import VcdModel
from hotloop.mcmc import hmc

REFERENCE = "plain"
LAST = 20  # updates whose mean is a training's ELBO at a point


def some_images(batch_size: int, batches: int) -> dict[str, np.ndarray]:
    count = batches * batch_size
    images = np.random.default_rng(0).random((count, 784), np.float32) < 0.13
    return {"image": images.astype(np.uint8), "index": np.arange(count, dtype=np.int32)}


def make_job(options: argparse.Namespace, sampler: str, images: int) -> vcd.Job:
    return vcd.Job(VcdModel(micro_batch_size=options.batch_size, sampler=sampler), images)


def train(options: argparse.Namespace, sampler: str, data: Any) -> tuple[np.ndarray, list[Any]]:
    """The ELBO of all updates [seeds, updates], and the first seed's states at every mark."""
    job = make_job(options, sampler, len(data["index"]))
    elbos, kept = [], []
    program = Program(vcd.update(job), Resident(data, options.batch_size), options.mark, seed_key(0))
    for seed in range(options.seeds):
        program.key = seed_key(seed)
        state, parts = copy_state(vcd.init(job, seed_key(1000 + seed))), []
        for first in range(0, options.updates, options.mark):
            if seed == 0:
                kept.append(jax.device_get(state))
            state, metrics = program(state, first, options.mark)
            parts.append(metrics["elbo"])
        kept += [jax.device_get(state)] if seed == 0 else []
        elbos.append(np.concatenate(parts))
    return np.stack(elbos), kept


def sides_of_one_update(options: argparse.Namespace, images: jax.Array) -> dict[str, Any]:
    """Name -> (state, key of the noise) -> the chains and the decoder's gradient there."""

    def run(model: VcdModel, state: Any, key: jax.Array) -> Any:
        decoder, noise = state["params"]["decoder"], vcd.draw_noise(model, key, len(images))
        encoder = {name: state["params"][name] for name in ("mean", "spread")}
        mean, spread = networks.encode(encoder, images)
        start = hmc.init(mean + spread * noise.start, networks.value_and_gradient(decoder, images))
        chain = vcd.sample(model, decoder, images, start, noise, state["step_size"])

        def loss(net: Any) -> jax.Array:
            logits = networks.forward(net, chain.end.position)[-1]
            return -networks.log_likelihood(logits, images).sum()

        return chain, jax.grad(loss)(decoder)

    sides = {name: (name, "default") for name in options.samplers}
    found = {}
    for name, (sampler, precision) in {"exact": (REFERENCE, "highest"), **sides}.items():

        def side(state: Any, key: Any, sampler: str = sampler, precision: str = precision) -> Any:
            with jax.default_matmul_precision(precision):
                return run(VcdModel(micro_batch_size=options.batch_size, sampler=sampler), state, key)

        found[name] = jax.jit(side)
    return found


def distance(one: Any, other: Any) -> float:
    """|one - other| / |other|."""

    def norm(tree: Any) -> float:
        return float(
            np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(tree)))
        )

    return norm(
        jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), one, other)
    ) / norm(other)


def compare_one_update(options: argparse.Namespace, data: Any, states: list[Any]) -> list[dict[str, Any]]:
    images = jnp.asarray(data["image"][: options.batch_size], jnp.float32)
    rows = []
    for number, state in enumerate(states):
        sides = sides_of_one_update(options, images) if number == 0 else sides
        exact, gradient = sides["exact"](state, seed_key(7))
        elsewhere = sides["exact"](state, seed_key(8))[1]
        for name, side in sides.items():
            chain, own = side(state, seed_key(7))
            apart = np.abs(np.asarray(chain.end.position) - np.asarray(exact.end.position)).max(1)
            change = np.asarray(chain.end.log_density, np.float64) - np.asarray(exact.end.log_density)
            rows.append(
                {
                    "after_updates": number * options.mark,
                    "sampler": name,
                    "chains_that_agree": float((apart < 0.1).mean()),
                    "median_distance": float(np.median(apart)),
                    "log_density": float(np.mean(chain.end.log_density)),
                    "log_density_change": float(change.mean()),
                    "log_density_change_error": float(change.std() / np.sqrt(len(change))),
                    "acceptance": float(chain.acceptance),
                    "step_size": float(chain.step_size),
                    "gradient_distance": distance(own, gradient),
                    "gradient_noise": distance(elsewhere, gradient),
                }
            )
            print({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
    return rows


def compare_trainings(options: argparse.Namespace, elbos: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    rows = []
    for end in range(options.mark, options.updates + 1, options.mark):
        values = {name: each[:, end - LAST : end].mean(1) for name, each in elbos.items()}
        for name, each in values.items():
            change = each - values[REFERENCE]
            rows.append(
                {
                    "updates": end,
                    "sampler": name,
                    "elbo": float(each.mean()),
                    "elbo_deviation": float(each.std(ddof=1)),
                    "change": float(change.mean()),
                    "change_error": float(change.std(ddof=1) / np.sqrt(len(change))),
                    "change_each": [float(value) for value in change],
                    "slope": float((each_slope(elbos[name], end)).mean()),
                }
            )
            print(
                f"{end:6} {name:8} ELBO {rows[-1]['elbo']:9.3f} (of seeds {rows[-1]['elbo_deviation']:.3f}), "
                f"from {REFERENCE}'s {rows[-1]['change']:+.3f} +- {rows[-1]['change_error']:.3f}, "
                f"{rows[-1]['slope']:.3f} an update",
                flush=True,
            )
    return rows


def each_slope(elbos: np.ndarray, end: int) -> np.ndarray:
    return (elbos[:, end - LAST // 2 : end].mean(1) - elbos[:, end - LAST : end - LAST // 2].mean(1)) / (
        LAST // 2
    )


def main() -> int:
    options, load = arguments(), load_before()
    setup(options.device)
    data = some_images(options.batch_size, options.batches)
    trained = {name: train(options, name, data) for name in options.samplers}
    for name, (elbo, _) in trained.items():
        print(name, "seed by seed, at the end:", np.round(elbo[:, -LAST:].mean(1), 2), flush=True)
    results = compare_trainings(options, {name: elbo for name, (elbo, _) in trained.items()})
    single = compare_one_update(options, data, trained[REFERENCE][1])
    if options.json:
        save(
            options.json,
            {"batch_size": str(options.batch_size), "load_before": f"{load:.2f}"},
            results + single,
        )
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--batch-size", type=int, default=3072)
    parser.add_argument("--batches", type=int, default=20, help="of a pass over the images")
    parser.add_argument("--samplers", nargs="+", default=["plain", "hopper"])
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--mark", type=int, default=100, help="updates between looks")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    if REFERENCE not in options.samplers:
        parser.error(f"--samplers must have {REFERENCE}")
    return options


if __name__ == "__main__":
    sys.exit(main())
