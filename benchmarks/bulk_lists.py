"""Lists for everybody: python benchmarks/bulk_lists.py [--shape full] [--top 10] [--json FILE].

Writes a run's folder of the shape (made-up ratings, weights as they are drawn), then calls
`hotloop recommender recommend RUN --all-users --output FILE` on it, as many times as `--repeat` says: users a second
with the writing of the file, without reading the run and compiling, as the command itself says it. Both objectives have
the same network; the shapes are those of `peers/netflix_shape.py`.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from command_line import describe_command
from netflix_shape import SHAPES, made_up

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepLast
from hotloop.engine.device import setup
from hotloop.engine.progress import Console
from hotloop.engine.run import write_json
from hotloop.families.recommender import model, recommend
from hotloop.families.recommender.commands_config import FAMILY, RecommendOptions
from hotloop.families.recommender.config import TrainOptions, make_schedule
from hotloop.options import to_jsonable

SIZES = {"full": 512, "3m": 128, "small": 128}
"""--size by shape."""


class Quiet(Console):
    """Listens to nothing."""


def write_run(folder: Path, train: RatingMatrix, objective: str, size: int) -> Path:
    """A run as it is before its first update."""
    config = TrainOptions(objective=objective, size=size, batch_size=64, data="procedural").resolve()
    drops = make_schedule(config, train.users).drops
    job = model.make_job(config, train.users, train.n_items, drops, 1.0, 5.0)
    extra = {"users": train.users, "items": train.n_items, "drops": drops, "low": 1.0, "high": 5.0}
    settings = to_jsonable({**asdict(config), **extra, "precision": job.net.precision})
    run = folder / objective
    run.mkdir()
    write_json(run / "config.json", settings)
    train.write(run / "ratings.npz")
    ids = {"users": train.user_ids, "items": train.item_ids}
    halves = {name: each.view(np.uint32).reshape(-1, 2) for name, each in ids.items()}
    with Checkpoints(run / "checkpoints", KeepLast(1), family=FAMILY, config=settings) as kept:
        kept.save(0, {**model.init(job, jax.random.key(0)), "ids": halves}, position={})
    return run


def peak_memory() -> int | None:
    found = jax.devices()[0].memory_stats()
    return found.get("peak_bytes_in_use") if found else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SIZES), default="full")
    parser.add_argument("--objectives", nargs="+", default=["ratings", "ranking"])
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setup()
    size, train, lines = SIZES[options.shape], made_up(*SHAPES[options.shape]), []
    with tempfile.TemporaryDirectory() as folder:
        for objective in options.objectives:
            run, output = write_run(Path(folder), train, objective, size), Path(folder) / "lists.txt"
            wish = RecommendOptions(
                run=run, all=True, top=options.top, output=output, batch_size=options.batch_size
            )
            for _ in range(options.repeat):
                began = time.perf_counter()
                found: Any = recommend.run(wish, Quiet())
                line = {
                    "command": describe_command(),
                    "device": jax.devices()[0].device_kind,
                    "objective": objective,
                    "users": train.users,
                    "ratings": train.ratings,
                    "top": options.top,
                    "users_per_second": round(found["users_per_second"]),
                    "seconds": round(found["seconds"], 2),
                    "seconds_of_the_command": round(time.perf_counter() - began, 2),
                    "file_bytes": output.stat().st_size,
                    "peak_device_bytes": peak_memory(),
                }
                lines.append(line)
                print(json.dumps(line), flush=True)
    if options.json:
        options.json.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main()
