"""Two processes with a device each train, validate and evaluate as one process with two, and as one device."""

import gzip
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hotloop.cli.main import main
from hotloop.engine.run import read_events
from hotloop.families.recommender import model as recommender_model
from hotloop.families.recommender import saved_run
from hotloop.families.vcd import model as vcd_model
from same_numbers import assert_same_numbers, assert_seen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices"),
    pytest.mark.usefixtures("signals_heard"),
]
UPDATES, LIMIT_SECONDS = 4, 300


def write_idx(path: Path, values: Any) -> None:
    header = struct.pack(f">{1 + values.ndim}I", 2048 + values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


def vcd_words(folder: Path, *, changed: bool) -> list[str]:
    """Options of a training on random images; `changed`: with one pixel of one of them inverted."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, count in (("train", 24), ("t10k", 7)):
        images = 255 * generator.integers(0, 2, (count, 28, 28), np.uint8)
        images[5, 14, 14] ^= 255 * changed
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", generator.integers(0, 10, count, np.uint8))
    small = "--z-dim 2 --hidden 8 8 --hmc-steps 2 --leapfrog-steps 2 -b 8 --shared-updates 2 -l 1e-4 --log-every 1"
    quick = "--iwae-samples 60 --burn-in 4 --kept 4 --test-batch-size 4"
    return ["vcd", "train", "--data", str(folder), *small.split(), *quick.split(), "--updates", str(UPDATES)]


def recommender_words(folder: Path, *, changed: bool) -> list[str]:
    """The same for ratings; users have rated very differently many items. `changed`: with one other rating."""
    folder.mkdir()
    generator = np.random.default_rng(1)
    share = np.linspace(0.1, 0.9, 16)[:, None]
    users, items = np.nonzero(generator.random((16, 20)) < share)
    values = generator.integers(1, 6, len(users))
    values[3] = 6 - values[3] if changed else values[3]
    part = generator.choice(3, len(users), p=(0.7, 0.2, 0.1))
    for number, name in enumerate(("training", "validation", "test")):
        rows = [f"{u}\t{i}\t{v}\n" for u, i, v in zip(users, items, values, strict=True)]
        own = [row for row, which in zip(rows, part, strict=True) if which == number]
        (folder / f"{name}.txt").write_text("".join(own))
    files = [
        word
        for name in ("training", "validation", "test")
        for word in (f"--{name}-data-file", str(folder / f"{name}.txt"))
    ]
    small = "--size 128 --batch-size 8 --validation-batch-size 5 --epochs 2 --device-iterations 1 --precision 32.32"
    return ["recommender", "train", *files, *small.split(), "--base-learning-rate", "-10"]


FAMILIES = {"vcd": vcd_words, "recommender": recommender_words}
MODELS = {"vcd": vcd_model, "recommender": recommender_model}


def in_processes(words: list[str], cache: Path) -> None:
    """The command in two processes with a device each."""
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=1"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "HOTLOOP_CACHE": str(cache)}
    line = [sys.executable, "-m", "hotloop", "launch", "--num-instances", "2", "--", *words]
    ended = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr


def outcome(family: str, run: Path) -> tuple[Any, Any, Any]:
    """Losses of all updates, the last state, and the figures of validation, test and evaluation."""
    events = list(read_events(run))
    losses = np.array([event["loss"] for event in events if event["event"] == "log"])
    assert len(losses) == UPDATES
    loaded = vcd_model.load_run(run) if family == "vcd" else saved_run.load_run(run)
    figures: dict[str, Any] = {}
    for event in events:
        if event["event"] in ("validation", "evaluation"):
            names = [name for name in event if name.endswith(("rmse", "mae", "ratings", "users", "elbo"))]
            kind = f"{event['event']} {event.get('split', '')} {event['update']}"
            figures[kind] = {name: event[name] for name in [*names, *{"log_likelihood"}.intersection(event)]}
    for path in sorted((run / "evaluations").glob("*.json")):
        figures[path.stem] = {
            name: json.loads(path.read_text()).get(name)
            for name in (
                "log_likelihood",
                "elbo",
                "rmse",
                "mae",
                "ndcg@10",
                "users",
                "ratings",
                "ranked_users",
            )
        }
    return losses, jax.tree.map(np.asarray, loaded.state), figures


def assert_same_outcome(found: Any, wanted: Any) -> None:
    """Losses, weights and figures to 1e-6; what an optimiser remembers is made of gradients, whose sums round more."""
    assert found[2].keys() == wanted[2].keys() and len(wanted[2]) >= 3
    weights = [(losses, state["params"], figures) for losses, state, figures in (found, wanted)]
    assert_same_numbers(*weights, 1e-6)
    assert_same_numbers(found[1], wanted[1], 1e-5)


@contextmanager
def one_moved_weight(family: str) -> Iterator[None]:
    """Trainings inside it start with another first weight."""
    module = MODELS[family]
    init = module.init

    def moved(job: Any, key: Any) -> Any:
        state = init(job, key)
        first, *others = jax.tree.leaves(state["params"])
        leaves = [first.at[(0,) * first.ndim].add(1e-2), *others]
        return {**state, "params": jax.tree.unflatten(jax.tree.structure(state["params"]), leaves)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "init", moved)
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_are_one(family: str, tmp_path: Path) -> None:
    words = FAMILIES[family](tmp_path / "data", changed=False)
    other = FAMILIES[family](tmp_path / "other", changed=True)
    place = ["--results-dir", str(tmp_path), "--run-name"]
    assert main([*words, *place, "one"]) == 0
    assert main([*words, *place, "two", "--replicas", "2"]) == 0
    assert main([*other, *place, "changed"]) == 0
    with one_moved_weight(family):
        assert main([*words, *place, "moved"]) == 0
    in_processes([*words, *place, "processes"], tmp_path / "cache")
    for run in ("one", "two", "changed", "moved"):
        assert main([family, "evaluate", str(tmp_path / run)]) == 0
    in_processes([family, "evaluate", str(tmp_path / "processes")], tmp_path / "cache")
    runs = ("one", "two", "changed", "moved", "processes")
    one, two, *controls, processes = (outcome(family, tmp_path / run) for run in runs)
    assert_same_outcome(two, one)
    assert_same_outcome(processes, one)
    assert_seen(partial(assert_same_outcome, processes), *controls)
