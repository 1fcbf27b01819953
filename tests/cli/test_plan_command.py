"""`hotloop plan`: command lines as people have typed them, and their answers."""

import json
import subprocess
import sys

import pytest

from hotloop.cli.main import main
from hotloop.cli.plan import PlanConfig
from hotloop.engine.plan import PlanOptions
from hotloop.families.cnn.options import TrainConfig
from hotloop.options import options_of

SEED_LINE = ["plan", "--num-epochs", "6", "--micro-batch-size", "8", "--gradient-accumulation", "8"]


def answer(capsys, *words) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("logs_per_epoch", "updates_per_call", "calls"),
    [("1", 781, 6), ("2", 781, 6), ("10", 71, 66), ("1/2", 1562, 3), ("1/3", 2343, 2), ("0", 4686, 1)],
)
def test_json_answers_the_published_examples(capsys, logs_per_epoch, updates_per_call, calls):
    plan = answer(capsys, *SEED_LINE, "--logs-per-epoch", logs_per_epoch)
    assert (plan["updates_per_call"], plan["calls"]) == (updates_per_call, calls)
    assert all(event.keys() == {"event", "update", "epoch", "call"} for event in plan["events"])


def test_a_log_period_that_does_not_divide_the_epochs_is_one_line_and_status_2(capsys):
    words = [*SEED_LINE, "--num-epochs", "5", "--logs-per-epoch", "1/2"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "It is not possible to log 2.0 epochs a time for 5 epochs" in error
    assert len(error.splitlines()) == 1


def test_text_tells_the_batch_the_calls_the_events_and_the_warnings(capsys):
    assert main([*SEED_LINE, "--logs-per-epoch", "10"]) == 0
    said = capsys.readouterr()
    assert "global batch 64" in said.out
    assert "calls: 66 of 71 updates" in said.out
    assert "log: 66, after update 71, 142, 213, 284, 355, ..., 4686" in said.out
    assert "adjusted to 11 an epoch" in said.err


def test_the_set_is_named_or_counted(capsys):
    assert answer(capsys, "plan", "--dataset", "imagenet", "--micro-batch-size", "16")["samples"] == 1_281_167
    assert answer(capsys, "plan", "--samples", "1000", "--micro_batch_size", "10")["updates_per_epoch"] == 100


def test_minus_one_leaves_the_updates_per_epoch_to_the_samples(capsys):
    assert (
        answer(capsys, "plan", "--samples", "50", "--weight-updates-per-epoch", "-1")["total_updates"] == 50
    )
    assert answer(capsys, "plan", "--samples", "50", "--weight-updates-per-epoch", "7")["total_updates"] == 7


def test_first_checkpoint_and_global_batch_size(capsys):
    line = "plan --samples 6 --micro-batch-size 3 --num-replicas 2 --global-batch-size 5 --num-epochs 5"
    plan = answer(capsys, *line.split(), "--ckpts-per-epoch", "1/3", "--first-ckpt-epoch", "2")
    assert [event["epoch"] for event in plan["events"] if event["event"] == "checkpoint"] == [2.0, 5.0]
    assert plan["batch"] == {"micro": 3, "replicas": 2, "accumulation": 1, "global": 6}
    assert len(plan["warnings"]) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--samples", "0"], "--samples 0: must be at least 1"),
        (["--samples", "7", "--micro-batch-size", "8"], "7 samples do not fill one global batch of 8"),
        (["--logs-per-epoch", "-1"], "--logs-per-epoch -1: must be at least 0"),
        (["--gradient-accumulation", "0"], "--gradient-accumulation-count 0: must be at least 1"),
        (["--gradient-accumulation", "2", "--global-batch-size", "2"], "give only one"),
        (["--micro-batch-size", "8", "--global-batch-size", "4"], "ask for at least 8"),
        (["--weight-updates-per-epoch", "0"], "--weight-updates-per-epoch 0: must be at least 1"),
        (["--weight-updates-per-epoch", "-2"], "-2: must be at least 1, or -1 for as many"),
    ],
)
def test_bad_values_are_one_line_and_status_2(capsys, words, text):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1


def test_the_options_that_a_training_has_too_are_the_same_there():
    shared = {each.name for each in options_of(PlanOptions)}
    here, there = (
        {each.name: each for each in options_of(config) if each.name in shared}
        for config in (PlanConfig, TrainConfig)
    )
    assert here == there and len(here) == 9


def test_the_command_imports_no_jax():
    code = "import sys; from hotloop.cli.main import main; main(['plan']); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
