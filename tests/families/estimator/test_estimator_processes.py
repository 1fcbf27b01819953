"""Two processes with a device each train, evaluate and predict as one process with two devices, and as one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from together import everything, in_stages

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
LIMIT = 150.0
"""Seconds after which a process counts as hanging."""


def run_together(count: int, devices: int, *words: Any) -> Any:
    """What process 0 printed; each process has so many devices and must end well."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        place = f"localhost:{probe.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    common = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if count > 1:
        common |= {"HOTLOOP_COORDINATOR": place, "HOTLOOP_PROCESSES": str(count)}
    children = [
        subprocess.Popen(
            [sys.executable, str(HERE / "together.py"), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=common | ({"HOTLOOP_PROCESS": str(number)} if count > 1 else {}),
        )
        for number in range(count)
    ]
    try:
        said = [child.communicate(timeout=LIMIT) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * count, said
    return json.loads(said[0][0].splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> Any:
    return everything(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Any:
    return run_together(2, 1, tmp_path_factory.mktemp("two"), 2, -1, 0)


def furthest(some: Any, others: Any) -> float:
    return max(float(abs(np.array(some[name]) - np.array(others[name])).max()) for name in others)


@pytest.mark.parametrize("source", ["arrays", "batches"])
def test_two_processes_compute_what_one_does(
    source: str, alone: Any, two: Any, tmp_path_factory: Any
) -> None:
    assert (alone["processes"], two["processes"]) == (1, 2)
    one_by_two = everything(tmp_path_factory.mktemp("devices"), 2)
    for other in (one_by_two, two):
        found, expected = other[source], alone[source]
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=1e-6)
        assert furthest(found["weights"], expected["weights"]) < 1e-6
        assert found["result"] == pytest.approx(expected["result"], rel=1e-6)
        np.testing.assert_allclose(found["rows"], expected["rows"], rtol=0, atol=1e-6)
    assert np.isfinite(alone[source]["rows"]).all() and len(alone[source]["rows"]) == 30
    assert min(alone[source]["losses"]) > 0.1 and np.ptp(alone[source]["rows"]) > 0.1


def test_the_stages_of_a_replica_may_lie_in_two_processes(two: Any, tmp_path: Path) -> None:
    expected = in_stages(tmp_path)
    assert furthest(two["stages"]["weights"], expected["weights"]) < 1e-6
    assert two["stages"]["result"] == pytest.approx(expected["result"], rel=1e-6)


@pytest.mark.parametrize("change", [(7, 0.0), (-1, 1e-3)], ids=["label", "weight"])
def test_a_changed_label_and_a_moved_weight_are_seen(change: Any, alone: Any, tmp_path: Path) -> None:
    other = run_together(2, 1, tmp_path, 2, *change)
    for source in ("arrays", "batches"):
        assert furthest(other[source]["weights"], alone[source]["weights"]) > 1e-5
        losses = np.array(other[source]["losses"]) - np.array(alone[source]["losses"])
        assert abs(losses).max() > 1e-5
