"""Large networks in stages, and the old configurations in their own precision: slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
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


def test_a_step_of_eight_replicas_is_restored_by_one_device_and_by_stages():
    """Its test by itself, where there are eight devices."""
    test = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "slow", "-k", "every_topology"]
    assert "1 passed" in run([*test, str(HERE / "test_cnn_stages.py")], devices=8)


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
    one, other = (np.load(tmp_path / f"{way}.npz") for way in ("staged", "whole"))
    far = {way: how_far(one, other[way]) for way in ("same", "label", "weight")}
    assert far["same"] < bound < min(far["label"], far["weight"]), far


def how_far(weights, other):
    """The root of the mean square between two runs' weights, as a share of that between the first and its start."""
    one, start = weights["same"], weights["start"]
    assert np.isfinite(one).all() and np.isfinite(other).all() and np.any(one != start)
    return np.linalg.norm(one - other) / np.linalg.norm(one - start)
