"""Orders of items on MovieLens-100K: the preset ml-100k-ranking, popularity, EASE and RecBole's MultiVAE, by seed.

Run `python benchmarks/ranking.py --json FILE`. For each seed the random split follows the seed; ours is the command
`hotloop recommender train --config ml-100k-ranking`, popularity and EASE are `hotloop recommender baselines`, RecBole
(`pip install recbole`) trains its MultiVAE with its own defaults, loader and trainer on the same liked items, batches
of the preset's size. All epochs are chosen by NDCG@10 on the validation part; every figure is NDCG@10 of the test part
by the same program. Then both take turns at whole epochs, which times them. `--epochs` are RecBole's; it is validated
after every fifth. `--skip` leaves parts out.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import numpy as np
from common import load_before, ratios, save, seconds
from ranking_recbole import MultiVae

from hotloop.engine.device import setup
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program, copy_state
from hotloop.engine.progress import Console
from hotloop.families.recommender import batches, model, train
from hotloop.families.recommender.config import KS, PRESETS, TrainOptions
from hotloop.families.recommender.measures import ScoringRules, make_measures
from hotloop.families.recommender.saved_run import Setup
from hotloop.options import build

PRESET = "ml-100k-ranking"
NDCG, EVERY = f"ndcg@{KS[0]}", 5


class Quiet(Console):
    """Listens to nothing."""


def command(*words: str) -> dict[str, Any]:
    """The result of a `hotloop recommender` command."""
    line = [sys.executable, "-m", "hotloop", "recommender", *words, "--json"]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_ours(seed: int, folder: Path) -> dict[str, Any]:
    """Our test figures, and those of popularity and EASE on the same split."""
    place = ("--results-dir", str(folder), "--run-name", f"seed-{seed}")
    found = command("train", "--config", PRESET, "--seed", str(seed), *place)
    models = command("baselines", "--run", found["run"])["models"]
    named = {name.split(" (")[0]: figures for name, figures in models.items()}
    return {
        "validation": found["validation"][NDCG],
        "ours": found["test"],
        "popularity": named["popularity"],
        "ease": named["EASE"],
        "updates": found["updates"],
        "best_step": found["best_step"],
    }


def prepare(seed: int, **others: Any) -> Setup:
    options = {**PRESETS[PRESET], **others, "seed": seed, "results_dir": Path(tempfile.gettempdir()) / "none"}
    return train.prepare(build(TrainOptions, options), Quiet())


def measure_recbole(seed: int, epochs: int, batch_size: int | None, folder: Path) -> dict[str, Any]:
    """RecBole's test figures after the epoch that validated best."""
    made = prepare(seed)
    data, relevant = made.data, made.config.relevant
    assert data.validation is not None and data.test is not None and made.config.batch_size is not None
    rules = ScoringRules(ks=KS, relevant=relevant)

    def by_table(scores: Any, batch: Any) -> Any:
        return scores[batch["users"]]

    validate, test = (
        make_measures(by_table, data.train, part, 943, rules, rates=False)
        for part in (data.validation, data.test)
    )
    peer = MultiVae(data, relevant, folder, seed, batch_size or made.config.batch_size)
    best: dict[str, Any] = {"validation": -math.inf}
    for _ in range(epochs // EVERY):
        for _ in range(EVERY):
            peer.epoch()
        scores = peer.scores()
        if (value := validate(scores)[NDCG]) > best["validation"]:
            best = {"validation": value, "recbole": test(scores), "epoch": peer.epochs}
    return best


# RecBole's network, its code and its random draws, in our terms.
SAME_NETWORK = {"layers": (600, 64), "dropout": None, "kl": 0.2}


def make_epoch(made: Setup) -> Callable[[], None]:
    """One epoch of ours in one call."""
    job, batch, key = made.job, made.config.batch_size, seed_key(0)
    assert batch is not None
    liked = model.choose_training(job, made.data.train)
    feed = batches.make_feed(liked, batch, 0, job.policy.compute, sparse=False)
    per_epoch = -(-liked.users // batch)
    program = Program(model.update(job), feed, per_epoch, key)
    state = [copy_state(model.init(job, stream(key, "init", 0)))]

    def epoch() -> None:
        state[0], metrics = program(state[0], 0, per_epoch)
        metrics.wait()

    return epoch


def time_epochs(rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of an epoch, in turn: the preset, ours with RecBole's network, RecBole; the same users and batches."""
    made = prepare(0)
    assert made.config.batch_size is not None
    peer = MultiVae(made.data, made.config.relevant, folder, 0, made.config.batch_size)
    sides: dict[str, Callable[[], Any]] = {
        "ours": make_epoch(made),
        "same_network": make_epoch(prepare(0, **SAME_NETWORK)),
        "recbole": peer.epoch,
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu_times: dict[str, list[float]] = {
        name: [] for name in sides
    }  # what other work on the machine adds less to
    for warm in sides.values():
        warm()
    for _ in range(rounds):
        for name, epoch in sides.items():
            before = time.process_time()
            times[name].append(seconds(epoch))
            cpu_times[name].append(time.process_time() - before)

    def compare(found: dict[str, list[float]]) -> dict[str, Any]:
        medians = {f"{name}_epoch_s": statistics.median(values) for name, values in found.items()}
        same = ratios(found["same_network"], found["recbole"])
        named = {f"same_network_{name}": value for name, value in same.items()}
        return {**medians, **ratios(found["ours"], found["recbole"]), **named, "rounds": found}

    return {"wall": compare(times), "cpu": compare(cpu_times), "batch_size": made.config.batch_size}


def summarise(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, standard error and range over seeds of each model's NDCG, and of what it is of the others'."""
    names = [name for name in ("popularity", "ease", "recbole", "ours") if name in rows[0]]
    values = {name: np.array([row[name][NDCG] for row in rows]) for name in names}
    for name in names[:-1]:
        values[f"ours / {name}"] = values["ours"] / values[name]
    if "recbole" in names:
        values["ours - recbole"] = values["ours"] - values["recbole"]
    return {
        name: {
            "mean": float(each.mean()),
            "standard_error": float(each.std(ddof=1) / math.sqrt(len(each))) if len(each) > 1 else math.nan,
            "low": float(each.min()),
            "high": float(each.max()),
        }
        for name, each in values.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument(
        "--recbole-batch-size", type=int, help="left out, that of the preset; RecBole's is 2048"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of torch; left out, as many as it likes")
    parser.add_argument("--skip", nargs="*", choices=["ours", "recbole", "time"], default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setup("cpu")
    load = load_before()
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(options.threads or torch.get_num_threads())
    result: dict[str, Any] = {"load": load, "seeds": options.seeds, "epochs": options.epochs, "rows": []}
    # Both RecBole's training and the timing of epochs take it.
    has_recbole = not {"recbole", "time"} <= set(options.skip)
    result["recbole"] = version("recbole") if has_recbole else None
    with tempfile.TemporaryDirectory() as place:
        for seed in options.seeds:
            row: dict[str, Any] = {"seed": seed}
            if "ours" not in options.skip:
                row |= measure_ours(seed, Path(place))
            if "recbole" not in options.skip:
                found = measure_recbole(seed, options.epochs, options.recbole_batch_size, Path(place))
                row |= {"recbole": found["recbole"], "recbole_epoch": found["epoch"]}
            result["rows"].append(row)
            shown = {name: f"{row[name][NDCG]:.4f}" for name in row if isinstance(row[name], dict)}
            print(f"seed {seed}:", shown, flush=True)
        if "ours" not in options.skip:
            result["summary"] = summarise(result["rows"])
            print(json.dumps(result["summary"], indent=1))
        if "time" not in options.skip:
            result["time"] = time_epochs(options.rounds, Path(place))
            for clock in ("wall", "cpu"):
                shown_time = {
                    name: f"{v:.4g}" for name, v in result["time"][clock].items() if name != "rounds"
                }
                print(f"{clock}:", shown_time)
    if options.json:
        save(options.json, {"recbole": result["recbole"] or "", "torch": version("torch")}, [result])


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
