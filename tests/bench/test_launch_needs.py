"""Devices that a program would see, as far as the system tells without jax."""

from pathlib import Path

import pytest

from hotloop.bench import launch
from hotloop.bench.benchmark import Benchmark


@pytest.mark.parametrize(
    ("env", "gpus", "count"),
    [
        ({}, 0, 1),
        ({}, 4, 4),
        ({"JAX_PLATFORMS": "cpu"}, 4, 1),
        ({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--x --xla_force_host_platform_device_count=8"}, 4, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 4, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 4, 1),
        ({"JAX_PLATFORMS": "cuda"}, 2, 2),
        ({"JAX_PLATFORMS": "tpu"}, 0, None),
    ],
)
def test_devices_are_counted_as_the_variables_show_them(monkeypatch, env, gpus, count):
    monkeypatch.setattr(launch, "list_gpus", lambda: [{}] * gpus)
    said = launch.find_missing(Benchmark("b", Path("b.yml"), 1, "x", needs_dataset=False, devices=99), env)
    here = "there is 1" if count == 1 else f"there are {count}"
    assert said == (None if count is None else f"is for 99 devices, and {here}")
    enough = Benchmark("b", Path("b.yml"), 1, "x", needs_dataset=False, devices=count)
    assert launch.find_missing(enough, env) is None
