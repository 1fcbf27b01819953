"""Two processes with a device each train, evaluate and predict as one process with two devices, and as one device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from staged_estimator import X, Y, estimator, undivided
from together import everything, in_stages

from started_processes import run_together, start

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("together.py")
LIMIT = 150.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> Any:
    return everything(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Any:
    return run_together(PROGRAM, tmp_path_factory.mktemp("two"), 2, -1, 0, devices=1, limit=LIMIT)


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
    other = run_together(PROGRAM, tmp_path, 2, *change, devices=1, limit=LIMIT)
    for source in ("arrays", "batches"):
        assert furthest(other[source]["weights"], alone[source]["weights"]) > 1e-5
        losses = np.array(other[source]["losses"]) - np.array(alone[source]["losses"])
        assert abs(losses).max() > 1e-5


def test_a_model_dir_that_the_processes_do_not_share_is_refused_new_or_gone_on_with(tmp_path: Path) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    estimator(folders[0] / "old" / "arrays", undivided).train((X, Y), steps=1)  # to go on from
    for place in ("new", "old"):
        with start(PROGRAM, place, 2, -1, 0, devices=1, folders=folders, limit=LIMIT) as started:
            ended = started.finish()
        assert [each.status for each in ended] == [1, 1], (
            ended
        )  # Python's own for an error that nobody handles
        said = [line for line in ended[0].errors.splitlines() if "is not shared: process 1 on" in line]
        assert len(said) == 1 and said[0].endswith("choose a folder that all machines have"), ended[0].errors
        assert not (folders[1] / place).exists()
