"""`cnn train` in several processes, by the launcher, against one process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from changed_runs import WAYS, changed

from hotloop.cli.main import main
from hotloop.engine.checkpoint_folder import read_leaves, read_whole
from hotloop.engine.run import read_events
from same_numbers import assert_close, assert_seen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices"),
    pytest.mark.usefixtures("signals_heard"),
]
TOY = (
    *("--model-name", "toy_model_bn", "--micro-batch-size", "4", "--validation", "False"),
    *("--lr-schedule-params", "{initial_learning_rate: 0.001}"),
)
# At a rate as high as the toy's four updates make 2e-6 of one rounding.
RESNET = (
    *("--model-name", "cifar_resnet8", "--micro-batch-size", "8"),
    *("--lr-schedule-params", "{initial_learning_rate: 0.0002}"),
    *("--norm-layer", "{name: custom_batch_norm, momentum: 0.9}"),
)
UPDATES = 4
WORDS = (
    *("--dataset", "cifar10", "--synthetic-data", "host", "--precision", "32.32", "--seed", "5"),
    *("--weight-updates-per-epoch", str(UPDATES), "--logs-per-epoch", str(UPDATES)),
    *("--optimizer-params", "{momentum: 0.9}"),
)


def command(folder: Path, name: str, words: tuple[str, ...], replicas: int) -> list[str]:
    """Four updates of a global batch of four replicas' micro-batches, however many devices there are."""
    split = ("--num-replicas", str(replicas), "--gradient-accumulation-count", str(4 // replicas))
    run = ("--results-dir", str(folder), "--run-name", name)
    return ["cnn", "train", *words, *WORDS, *split, *run]


def train_here(folder: Path, name: str, words: tuple[str, ...], replicas: int) -> Path:
    """In this process on so many devices."""
    assert main(command(folder, name, words, replicas)) == 0
    return folder / name


def train_launched(devices: int, launch: tuple[str, ...], words: list[str]) -> None:
    """In two processes with so many devices each, by the launcher."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    launch = ("launch", "--num-instances", "2", "--heartbeat", "20", *launch, "--")
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", *launch, *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def outcome(run: Path) -> dict[str, Any]:
    """Losses of the updates; and of the last checkpoint weights, slots and statistics."""
    losses = np.array([record["loss"] for record in read_events(run) if record["event"] == "log"])
    assert len(losses) == UPDATES and (losses != 0).all()
    folder = run / "checkpoints" / f"{UPDATES:08d}"
    parts: dict[str, Any] = {"losses": losses}
    for name, leaf in read_leaves(folder, read_whole(folder, UPDATES)).items():
        parts.setdefault(name.split("/")[0], {})[name] = leaf
    assert {"params", "optimiser", "statistics"} <= parts.keys()
    return parts


def same_as(wanted: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """The comparison with a run, of the parts' largest numbers; slots are made of gradients, whose sums round more."""

    def compare(found: dict[str, Any]) -> None:
        assert found.keys() == wanted.keys()
        for part in ("losses", "params", "statistics"):
            assert_close(found[part], wanted[part], 1e-6)
        assert_close(found["optimiser"], wanted["optimiser"], 1e-5)

    return compare


def controls(folder: Path, words: tuple[str, ...]) -> list[dict[str, Any]]:
    """The run of one device with one label of the second update changed, and with one weight moved at the start."""
    found = []
    for way in WAYS:
        with changed(way):
            found.append(outcome(train_here(folder, way, (*words, "--validation", "False"), 1)))
    return found


@pytest.mark.parametrize("words", [TOY, RESNET], ids=["toy_model_bn", "cifar_resnet8"])
def test_a_network_trains_alike_in_two_processes_and_in_one(words, tmp_path):
    train_launched(2, (), command(tmp_path, "2x2", words, 4))
    runs = [tmp_path / "2x2", *(train_here(tmp_path, f"1x{count}", words, count) for count in (4, 1))]
    compare = same_as(outcome(runs[0]))
    for other in runs[1:]:
        compare(outcome(other))
    assert_seen(compare, *controls(tmp_path, words))
    if words is RESNET:
        found = [[each for each in read_events(run) if each["event"] == "validation"] for run in runs]
        assert len({each[0]["validation_accuracy"] for each in found}) == 1
        assert {each[0]["samples"] for each in found} == {10_000} and found[0][0]["validation_accuracy"] > 0


def test_stages_in_two_processes_train_as_one_device(tmp_path):
    """Each process has one stage."""
    stages = ("--pipeline-splits", "conv2d_1", "--pipeline-schedule", "Interleaved")
    launch = ("--num-replicas", "1", "--ipus-per-replica", "2")
    train_launched(1, launch, command(tmp_path, "stages", (*TOY, *stages), 1))
    compare = same_as(outcome(tmp_path / "stages"))
    compare(outcome(train_here(tmp_path, "one", TOY, 1)))
    assert_seen(compare, *controls(tmp_path, TOY))
