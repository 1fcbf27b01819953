"""Two processes with a device each train, evaluate and predict as one process with two devices, and as one device."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from staged_estimator import X, Y, estimator, undivided
from together import everything, in_stages

from same_numbers import assert_close, assert_seen
from started_processes import run_together, start

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("together.py")
LIMIT = 150.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> Any:
    return everything(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def on_two_devices(tmp_path_factory: Any) -> Any:
    return everything(tmp_path_factory.mktemp("devices"), 2)


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Any:
    return run_together(PROGRAM, tmp_path_factory.mktemp("two"), 2, -1, 0, devices=1, limit=LIMIT)


def same_outcome(found: Any, wanted: Any) -> None:
    """Of a training: losses and weights, and where both have them what they evaluate and predict, to 1e-6."""
    for name in ("losses", "weights", "rows", "result"):
        if name in wanted:
            assert_close(*(arrays(each[name]) for each in (found, wanted)), 1e-6)


def arrays(values: Any) -> Any:
    """A list of numbers, or a dict of such, as it came from JSON."""
    return (
        {name: np.array(each) for name, each in values.items()}
        if isinstance(values, dict)
        else np.array(values)
    )


@pytest.mark.parametrize("source", ["arrays", "batches"])
def test_two_processes_compute_what_one_does(source: str, alone: Any, on_two_devices: Any, two: Any) -> None:
    assert (alone["processes"], two["processes"]) == (1, 2)
    for other in (on_two_devices, two):
        same_outcome(other[source], alone[source])
    assert len(alone[source]["rows"]) == 30
    assert min(alone[source]["losses"]) > 0.1 and np.ptp(alone[source]["rows"]) > 0.1


def test_all_processes_stop_early_at_the_same_update_with_the_best_weights(alone: Any, two: Any) -> None:
    same_outcome(two["early"], alone["early"])
    assert two["early"]["result"]["global_step"] == 4


def test_the_stages_of_a_replica_may_lie_in_two_processes(two: Any, tmp_path: Path) -> None:
    same_outcome(two["stages"], in_stages(tmp_path))


@pytest.mark.parametrize("change", [(7, 0.0), (-1, 1e-2)], ids=["label", "weight"])
def test_a_changed_label_and_a_moved_weight_are_seen(change: Any, two: Any, tmp_path: Path) -> None:
    """By the comparison with what two processes have, stages included."""
    changed = {**everything(tmp_path, 1, *change), "stages": in_stages(tmp_path, *change)}
    for source in ("arrays", "batches", "stages"):
        assert_seen(partial(same_outcome, wanted=two[source]), changed[source])


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
