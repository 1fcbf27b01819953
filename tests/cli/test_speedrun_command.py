"""`hotloop cnn speedrun`, also as `cnn train --config cifar10_94`: what it prints, records and refuses."""

import json
import re
import signal
import statistics
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from hotloop.cli.main import find_command, main
from hotloop.cli.parser import resolve, scan
from hotloop.engine.run import read_events
from hotloop.families.cnn.presets import PRESETS, SPEEDRUN_PRESETS
from hotloop.families.cnn.speedrun import train
from hotloop.families.cnn.speedrun.config import Recipe, SpeedrunConfig
from hotloop.families.cnn.speedrun.train import in_words, summarise

pytestmark = pytest.mark.usefixtures("signals_heard")


@pytest.fixture(scope="module")
def small_set(tmp_path_factory):
    """A part of CIFAR-10 made of noise: 24 images to train with, 10 to test."""
    folder, generator = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin", np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("data_batch_1.bin", 24), ("test_batch.bin", 10)):
        rows = generator.integers(0, 256, (count, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (folder / name).write_bytes(rows.tobytes())
    return folder.parent


def resolved(*line):
    """The command that a line means, and its options."""
    command, path, rest = find_command(["cnn", *line])
    return path, resolve(command, scan(rest, command.options))


def words(small_set, tmp_path, *more):
    return [
        "cnn",
        "speedrun",
        "--device",
        "cpu",
        "--dataset-path",
        str(small_set),
        "--results-dir",
        str(tmp_path),
        *more,
    ]


@pytest.mark.slow
def test_seeds_are_runs_of_one_program_with_records_and_a_mean(small_set, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "Recipe", partial(Recipe, widths=(4, 6, 6)))
    line = words(
        small_set,
        tmp_path,
        "--run-name=a",
        "--batch-size=8",
        "--epochs=2/3",
        "--repeats=2",
        "--seed=7",
        "--json",
    )
    assert main(line) == 0
    out, said = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    runs = result["runs"]
    assert [each["seed"] for each in runs] == [7, 8]
    assert result["accuracy"] == pytest.approx(statistics.fmean(each["accuracy"] for each in runs))
    assert all(each["seconds"] > 0 and each["accuracy"] in np.float32(np.arange(11) / 10) for each in runs)
    records = list(read_events(tmp_path / "a"))
    assert [each["event"] for each in records if each["event"] != "warning"] == [
        "start", "compile", "validation", "validation", "summary", "end",
    ]  # fmt: skip
    shown = [each for each in records if each["event"] == "validation"]
    assert [(each["update"], len(each["losses"]), each["seed"]) for each in shown] == [(2, 2, 7), (2, 2, 8)]
    percent = [f"{100 * each['accuracy']:.2f}" for each in runs]
    assert re.findall(r"validation at update 2, epoch 0.67: final loss.*?accuracy: *(.*?) %", said) == percent
    assert "2 runs: accuracy: " in said
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert (config["precision"], config["epochs"], config["repeats"]) == ("float32", "2/3", 2)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--batch-size", "25"], "--batch-size 25: there are only 24 training images"),
        (["--repeats", "0"], "--repeats 0"),
        (["--epochs", "0"], "--epochs 0"),
        (["--precision", "float8"], "--precision float8"),
    ],
)
def test_what_cannot_work_is_one_line(small_set, tmp_path, capsys, more, reason):
    assert main(words(small_set, tmp_path / "none", *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert reason in error
    assert not (tmp_path / "none").exists()


def test_a_plan_is_one_call_with_the_test_at_its_end(small_set, tmp_path, capsys):
    line = words(
        small_set, tmp_path / "none", "--plan", "--batch-size=8", "--epochs=7/3", "--repeats=2", "--json"
    )
    assert main(line) == 0
    out, said = capsys.readouterr()
    plan = json.loads(out)
    assert (plan["total_updates"], plan["updates_per_epoch"], plan["calls"]) == (7, 3, 1)
    assert [(each["event"], each["update"]) for each in plan["events"]] == [("validate", 7)]
    assert (plan["batch"]["global"], plan["repeats"], plan["seed"], plan["warnings"]) == (8, 2, 0, [])
    assert "runs of one program: 2, with seeds from 0" in said
    assert not (tmp_path / "none").exists()


def test_the_configuration_has_the_values_of_the_recipe():
    (name,) = SPEEDRUN_PRESETS
    path, found = resolved("train", "--config", name)
    assert (path, name in PRESETS) == ("hotloop cnn speedrun", False)
    assert found.config == SpeedrunConfig(expect=SPEEDRUN_PRESETS[name]["expect"])
    assert (found.config.epochs, found.config.batch_size) == (Recipe().epochs, Recipe().batch_size)
    assert found.configured == {"expect", "epochs", "batch_size"}


def test_options_that_both_have_mean_the_same_by_the_configuration():
    both = (
        "--dataset-path",
        "a folder",
        "--seed=7",
        "--results-dir",
        "r",
        "--run-name=n",
        "--plan",
        "--device",
        "cpu",
    )
    both += ("--json", "--no-native", "--config=cifar10_94")
    assert resolved("train", *both, "--num-epochs", "1/4") == resolved("speedrun", *both, "--epochs", "1/4")


def test_the_configuration_runs_the_speedrun_and_says_what_to_expect(small_set, tmp_path, capsys):
    line = words(small_set, tmp_path / "none", "--config", "cifar10_94")
    line[1] = "train"
    assert main(line) == 2  # a part of the set is smaller than its batch
    out, said = capsys.readouterr()
    assert out.startswith("to expect: 94 % in about a second")
    assert said.strip().endswith("--batch-size 1536: there are only 24 training images")


@pytest.mark.parametrize(
    "more",
    [
        ["--model-name", "cifar_resnet8"],
        ["--micro-batch-size", "8"],
        ["--precision", "32.32"],
        ["--dataset", "cifar10"],
        ["--no-validation"],
        ["--resume"],
    ],
)
def test_the_configuration_refuses_what_only_other_trainings_have(capsys, more):
    assert main(["cnn", "train", "--config", "cifar10_94", *more]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    spelling = more[0].replace("--no-", "--")
    assert f"{spelling}: --config cifar10_94 has no use for it; `hotloop cnn speedrun --help`" in error


def test_a_part_of_a_file_may_have_the_configurations_name(tmp_path):
    file = tmp_path / "own.yml"
    file.write_text("cifar10_94: {model_name: cifar_resnet8}")
    path, found = resolved("train", "--config-path", str(file), "--config", "cifar10_94")
    assert (path, found.config.model_name) == ("hotloop cnn train", "cifar_resnet8")


def test_help_and_errors_name_the_configuration_with_the_others(capsys):
    assert main(["cnn", "train", "--config", "cifar10_94", "--help"]) == 0
    presets = capsys.readouterr().out.rpartition("Presets for --config: ")[2]
    assert {"cifar10_94", "cifar10_wide"} <= set(presets.strip().split(", "))
    assert main(["cnn", "train", "--config", "cifar10_95"]) == 2
    assert "did you mean cifar10_94" in capsys.readouterr().err


def test_the_configuration_is_for_one_process(capsys):
    assert main(["launch", "--num-instances", "2", "cnn", "train", "--config", "cifar10_94"]) == 2
    assert "cnn speedrun: makes no sense in several processes" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_refused(small_set, tmp_path, capsys):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_text("{}")
    (tmp_path / "b/events.jsonl").write_text('{"event": "start"}\n')
    assert main(words(small_set, tmp_path, "--run-name", "b")) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_a_run_that_would_compute_for_hours(small_set, tmp_path):
    line = words(small_set, tmp_path, "--run-name=c", "--batch-size=24", "--epochs=100000")
    command = [sys.executable, "-m", "hotloop", *line]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("compiled") for line in process.stdout)
        time.sleep(1)  # it computes
        process.send_signal(signal.SIGINT)
        try:
            said, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "stopped by Ctrl-C" in said
    assert [each["status"] for each in read_events(tmp_path / "c") if each["event"] == "end"] == [
        "interrupted"
    ]


def test_the_summary_counts_mean_error_and_range():
    runs = [{"accuracy": a, "seconds": s} for a, s in ((0.938, 1.0), (0.94, 0.8), (0.945, 0.9))]
    found = summarise(runs)
    assert found["accuracy"] == pytest.approx(0.941)
    assert found["standard_error"] == pytest.approx(np.std([0.938, 0.94, 0.945], ddof=1) / 3**0.5)
    assert (found["seconds"], found["fastest"], found["slowest"], found["repeats"]) == (0.9, 0.8, 1.0, 3)
    assert in_words(found) == (
        "3 runs: accuracy: 94.100 % in the mean, standard error 0.208; 0.900 s each (0.800 to 1.000)"
    )
    assert summarise(runs[:1])["standard_error"] is None
