"""Large networks in stages, the old configurations in their own precision, and stages in several processes: slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hotloop.engine.checkpoint_folder import read_leaves, read_whole

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
VIRTUAL = "--xla_force_host_platform_device_count"
BOUNDS = {  # -> how far weights may be from the merged run's after two updates, as a share of how far they have moved
    "resnet50_16k_bn_pipeline": ("float32", 0.1),
    "resnet50_8k_bn_pipeline": ("bfloat16", 0.1),
    "resnet50_8k_gn_pipeline": ("bfloat16", 0.1),
    # 56 layers in 16 bits, whose weights move by few rounding steps in two updates: one of them either way shows.
    "resnet56_8k_bn_pipeline": ("bfloat16", 0.4),
}


def run(command, devices, **more):
    """The last line that a command of its own, with so many devices, has printed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{VIRTUAL}={devices}", **more}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def large(*words, devices, **more):
    return json.loads(run([str(HERE / "large_stages.py"), *map(str, words)], devices, **more))


def test_a_resnet50_of_four_stages_and_two_replicas_makes_two_updates_on_eight_devices():
    found = large("resnet50_16k_bn_pipeline", 64, 2, devices=8)
    assert (found["stages"], found["replicas"], found["devices"]) == (4, 2, 8)
    assert np.isfinite(found["losses"]).all() and found["losses"][1] < found["losses"][0] < 10


@pytest.mark.parametrize("name", BOUNDS)
def test_an_old_pipeline_configuration_trains_in_stages_in_its_own_precision(name, tmp_path):
    kind, bound = BOUNDS[name]
    ways = {"staged": (), "whole": ("whole",)}
    found = {
        way: large(name, 32, 1, *words, devices=4, WEIGHTS=str(tmp_path / f"{way}.npz"))
        for way, words in ways.items()
    }
    assert (found["staged"]["stages"], found["whole"]["stages"]) == (4, 1)
    assert found["staged"]["kinds"] == found["whole"]["kinds"] == [kind]
    assert found["staged"]["losses"] == pytest.approx(found["whole"]["losses"], rel=0.02)
    one, other = (dict(np.load(tmp_path / f"{way}.npz")) for way in ("whole", "staged"))
    assert how_far(one, other) < bound < how_far(one, {**one, **starts(one)})


def starts(weights):
    return {
        name.removeprefix("start/"): value for name, value in weights.items() if name.startswith("start/")
    }


def how_far(one, other):
    """The root of the mean square between two runs' weights, as a share of that between the first and its start."""

    def squares(left, right):
        return sum(float(np.square(left[name] - right[name]).sum()) for name in starts(one))

    assert all(np.isfinite(values).all() for values in (*one.values(), *other.values()))
    moved = squares(one, starts(one))
    assert moved > 0
    return (squares(one, other) / moved) ** 0.5


def test_stages_in_two_processes_train_as_one_device(tmp_path):
    """Each process has one stage; the same words in one process run merged on its only device."""
    words = (
        "--model-name toy_model_bn --synthetic-data host --precision 32.32 --micro-batch-size 4 --seed 5 "
        "--gradient-accumulation-count 4 --weight-updates-per-epoch 4 --pipeline-splits conv2d_1 --validation False "
        f"--pipeline-schedule Interleaved --results-dir {tmp_path}"
    ).split()
    launch = ["launch", "--num-instances", "2", "--num-replicas", "1", "--ipus-per-replica", "2", "--"]
    for name, before in (("one", []), ("two", launch)):
        run(["-m", "hotloop", *before, "cnn", "train", *words, "--run-name", name], devices=1)
    folders = [tmp_path / name / "checkpoints" / "00000004" for name in ("one", "two")]
    one, other = (read_leaves(folder, read_whole(folder, 4)) for folder in folders)
    assert one.keys() == other.keys() and any(np.any(leaf) for leaf in one.values())
    for name, leaf in one.items():
        assert np.isfinite(leaf).all() and np.abs(leaf - other[name]).max(initial=0) < 1e-6, name
