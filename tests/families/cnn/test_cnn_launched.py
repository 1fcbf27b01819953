"""`cnn train` in several processes, by the launcher, against one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hotloop.engine.checkpoint_folder import read_leaves, read_whole
from hotloop.engine.run import read_events

TOY = (
    "--model-name",
    "toy_model_bn",
    "--synthetic-data",
    "host",
    "--micro-batch-size",
    "4",
    "--validation",
    "False",
)
RESNET = (
    "--model-name", "cifar_resnet8", "--synthetic-data", "host", "--micro-batch-size", "8", "--norm-layer",
    "{name: custom_batch_norm, momentum: 0.9}",
)  # fmt: skip
UPDATES = 4
RATE = ("--lr-schedule-params", "{initial_learning_rate: 0.001}")


def train(folder: Path, words: tuple[str, ...], processes: int, devices: int, *more: str) -> Path:
    """Four updates of a global batch of four replicas' micro-batches, however many devices there are."""
    replicas = processes * devices
    split = ("--num-replicas", str(replicas), "--gradient-accumulation-count", str(4 // replicas))
    run = ("--results-dir", str(folder), "--run-name", f"{processes}x{devices}", "--seed", "5")
    events = ("--weight-updates-per-epoch", str(UPDATES), "--logs-per-epoch", str(UPDATES))
    command = ["cnn", "train", *words, *split, *run, *events, "--dataset", "cifar10", *RATE, *more]
    if processes > 1:
        command = ["launch", "--num-instances", str(processes), "--heartbeat", "20", "--", *command]
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / f"{processes}x{devices}"


def losses(run: Path) -> "np.ndarray[Any, Any]":
    found = np.array([record["loss"] for record in read_events(run) if record["event"] == "log"])
    assert len(found) == UPDATES and np.isfinite(found).all() and (found != 0).all()
    return found


def leaves(run: Path) -> dict[str, "np.ndarray[Any, Any]"]:
    folder = run / "checkpoints" / f"{UPDATES:08d}"
    found = read_leaves(folder, read_whole(folder, UPDATES))
    assert all(np.isfinite(leaf).all() for leaf in found.values())
    assert any(np.any(leaf) for name, leaf in found.items() if name.startswith("params"))
    return found


def largest_difference(one: Path, other: Path) -> float:
    ours, theirs = leaves(one), leaves(other)
    assert ours.keys() == theirs.keys()
    return max(
        float(np.abs(ours[name].astype(np.float64) - theirs[name]).max()) for name in ours if ours[name].size
    )


@pytest.mark.slow
def test_a_network_with_batch_norm_trains_alike_in_two_processes_and_in_one(tmp_path):
    pairs = train(tmp_path, TOY, 2, 2)
    for other in (train(tmp_path, TOY, 1, 4), train(tmp_path, TOY, 1, 1)):
        np.testing.assert_allclose(losses(pairs), losses(other), rtol=1e-6)
        assert largest_difference(pairs, other) < 1e-6
    other_seed = train(tmp_path / "other", TOY, 1, 1, "--seed", "6")
    assert largest_difference(pairs, other_seed) > 1e-3


@pytest.mark.slow
def test_a_residual_network_trains_alike_in_two_processes_and_in_one(tmp_path):
    pairs, four = train(tmp_path, RESNET, 2, 2), train(tmp_path, RESNET, 1, 4)
    np.testing.assert_allclose(losses(pairs), losses(four), rtol=1e-6)
    assert largest_difference(pairs, four) < 1e-5
    records = [[*read_events(run)] for run in (pairs, four)]
    validated = [[each for each in found if each["event"] == "validation"] for found in records]
    assert validated[0][0]["validation_accuracy"] == validated[1][0]["validation_accuracy"]
    assert validated[0][0]["samples"] == 10_000 and jax.process_count() == 1
