"""Where an exported model's weights are from: the best step by the records, and what these say of it."""

import json

import pytest

from hotloop.engine.exportable import best_step, describe_source
from hotloop.errors import CheckpointError

WARNING = "the data set is not there: made-up images"


@pytest.fixture
def run(tmp_path):
    values = {5: 0.5, 10: 0.7, 15: 0.7, 20: 0.9, 25: None}
    records = [{"event": "warning", "update": 0, "message": WARNING}]
    records += [
        {"event": "validation", "update": step, "accuracy": value, "time": 1.0}
        for step, value in values.items()
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "environment.json").write_text(json.dumps({"commit": "abc"}))
    return tmp_path


def test_the_best_is_that_of_the_validations_on_record_that_is_still_there(run):
    assert best_step(run, [5, 10, 15], "accuracy", 1) == 10  # of equals the earliest
    assert best_step(run, [5, 10, 15, 20, 25], "accuracy", 1) == 20
    assert best_step(run, [10, 15, 20], "accuracy", -1) == 10
    for steps, metric in (([25, 30], "accuracy"), ([5], "loss")):
        with pytest.raises(
            CheckpointError, match=r"best=True: no validation of a checkpoint in .*; give step=N"
        ):
            best_step(run, steps, metric, 1)


def test_a_step_has_its_metrics_and_the_runs_commit_and_warnings(run):
    found = describe_source(run, 20, "cifar10")
    assert found == {
        "run": str(run),
        "step": 20,
        "metrics": {"accuracy": 0.9},
        "commit": "abc",
        "data": "cifar10",
        "notices": [WARNING],
    }
    assert describe_source(None, 3, "x")["metrics"] == {}
