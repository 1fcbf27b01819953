"""`hotloop cnn train` and `validate` from the command line: the old lines, the flow, what is kept, one-line errors."""

import gzip
import io
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import jax
import numpy as np
import pytest

from hotloop.cli.main import find_command, main
from hotloop.cli.parser import resolve, scan
from hotloop.data.catalogue import known_set
from hotloop.data.local_files import find_set
from hotloop.engine import progress
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepAll
from hotloop.engine.device import setup
from hotloop.engine.drive import Interrupted
from hotloop.engine.run import current_records, read_events
from hotloop.families.cnn import train
from hotloop.options import options_of
from listener import Listener
from old_benchmarks import read as read_old
from undisturbed import records

pytestmark = pytest.mark.usefixtures("signals_heard")

ROOT = Path(
    os.environ.get("HOTLOOP_DATA") or Path(__file__).resolve().parents[2] / "../shared/data"
).resolve()
SEED_LINE = (
    "--model toy_model --synthetic-data device --precision 16.16 --half-partials --validation False "
    "--micro-batch-size 8 --gradient-accumulation 8 --dataset cifar10"
)
"""What the seven lines of the old README have in common, but for the data and a smaller model."""
LINES = {"1": (6, 6), "2": (6, 6), "10": (66, 66), "1/2": (3, 3), "1/3": (2, 2), "0": (0, 1)}
"""--logs-per-epoch -> log lines and calls on the device of six epochs."""
WARNINGS = {"2": "adjusted to 1 an epoch", "10": "adjusted to 11 an epoch", "0": "is one call on the device"}
THROUGHPUT, ACCURACY, LOSS = r"throughput: *(.*?) samples\/sec", r"accuracy: *(.*?) \%", r"loss: *(\d*\.\d*)"
"""What the old benchmark files look for in the output."""
TRAIN, TEST = 96, 31
TOY = [
    "--dataset", "mnist", "--model", "toy_model_bn", "--precision", "32.32", "--micro-batch-size", "4",
    "--gradient-accumulation", "4", "--num-epochs", "3", "--validation-micro-batch-size", "7",
]  # fmt: skip
"""One program for most of these tests: 3 epochs of 6 updates of 16 images."""


def called(*words):
    """Exit status, the JSON result (or None), and everything that was said."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["cnn", *map(str, words), "--json"])
    lines = out.getvalue().splitlines()
    return status, json.loads(lines[-1]) if lines else None, err.getvalue()


def events(folder, kind):
    return [event for event in read_events(folder) if event["event"] == kind]


def write_idx(path, values):
    dims = struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(struct.pack(">I", 0x800 + values.ndim) + dims + values.tobytes(), 1))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with a few bright or dark images in MNIST's files: odd numbers, and something to learn."""
    setup()  # compiled once, whichever test comes first
    folder = tmp_path_factory.mktemp("mnist")
    draws = np.random.default_rng(0)
    for name, count in (("train", TRAIN), ("t10k", TEST)):
        labels = draws.integers(0, 10, count).astype(np.uint8)
        pixels = draws.integers(0, 20, (count, 28, 28)) + 23 * labels[:, None, None]
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", pixels.astype(np.uint8))
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return folder


@pytest.fixture
def toy(digits, tmp_path):
    """The words of a run with that program in a folder of its own."""
    return [*TOY, "--dataset-path", digits, "--results-dir", tmp_path, "--seed", "5", "--run-name", "run"]


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """A run that nothing disturbed, with its checkpoints: result, what was said, folder."""
    folder = tmp_path_factory.mktemp("runs")
    words = [*TOY, "--dataset-path", digits, "--results-dir", folder, "--seed", "5", "--run-name", "run"]
    status, result, said = called("train", *words, "--clean-dir", "False")
    assert status == 0, said
    return result, said, folder / "run"


def weights(folder, step=18):
    """Checksums of every array of a checkpoint: weights, optimiser, statistics, counters."""
    leaves = json.loads((folder / f"{step:08d}" / "manifest.json").read_text())["leaves"]
    assert {name.split("/")[0] for name in leaves} >= {"params", "statistics", "update"}
    return leaves


def content(folder):
    """Every file under a folder with its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(*words):
    command, _, rest = find_command(["cnn", "train", *map(str, words)])
    return resolve(command, scan(rest, options_of(command.config))).config


@pytest.mark.parametrize("logs", LINES)
def test_the_seven_lines_plan_their_logs_and_calls(logs):
    words = ["train", *SEED_LINE.split(), "--num-epochs", "6", "--logs-per-epoch", logs, "--plan"]
    status, plan, said = called(*words)
    lines, calls = LINES[logs]
    assert status == 0 and plan["calls"] == calls
    assert sum(event["event"] == "log" for event in plan["events"]) == lines
    assert plan["updates_per_call"] == 4686 // calls and plan["updates_per_epoch"] == 781
    warnings = [line for line in said.splitlines() if line.startswith("warning:")]
    assert len(warnings) == (logs in WARNINGS) and WARNINGS.get(logs, "") in said


def test_the_seventh_line_is_the_old_error_and_nothing_runs(tmp_path):
    words = [*SEED_LINE.split(), "--num-epochs", "5", "--logs-per-epoch", "1/2", "--results-dir", tmp_path]
    status, result, said = called("train", *words)
    assert status == 2 and "It is not possible to log 2.0 epochs a time for 5 epochs" in said
    assert list(result) == ["error"] and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("logs", LINES)
def test_the_seven_lines_log_as_often_as_they_plan(logs, tmp_path):
    words = [*SEED_LINE.split(), "--num-epochs", "6", "--logs-per-epoch", logs, "--results-dir", tmp_path]
    status, result, said = called("train", *words)
    assert status == 0, said
    lines, calls = LINES[logs]
    folder = Path(result["run"])
    logged = events(folder, "log")
    assert [log["update"] for log in logged] == list(range(4686 // calls, 4687, 4686 // calls))[:lines]
    assert len(re.findall(r"^update [\d,]+, epoch", said, re.MULTILINE)) == lines
    assert WARNINGS.get(logs, "") in said and "half partials: " in said
    assert result["updates"] == 4686 and not events(folder, "validation") and "time to train" not in said
    assert "made up" in said
    for log in logged:
        assert math.isfinite(log["loss"]) and log["throughput"] > 0
    assert max(map(int, (path.name for path in (folder / "checkpoints").glob("0*")))) == 4686


def test_images_that_are_made_up_are_among_the_records_and_said_last(tmp_path):
    words = [
        *TOY,
        "--weight-updates-per-epoch",
        2,
        "--synthetic-data",
        "host",
        "--no-validation",
        "--results-dir",
        tmp_path,
        "--run-name",
        "run",
    ]
    status, _, said = called("train", *words)
    assert status == 0, said
    (warning,) = (
        each["message"] for each in events(tmp_path / "run", "warning") if "made up" in each["message"]
    )
    assert said.count(f"warning: {warning}") == 2


@pytest.mark.parametrize(("file", "unit"), [("cnns.yml", 100), ("older/cnns.yml", 1)])
def test_old_benchmarks_take_the_last_validation_and_the_last_loss_of_the_training(whole, file, unit):
    """The oldest patterns read a share, those after them a percentage."""
    result, said, folder = whole
    found = read_old(file, "tf2_resnet50_train_real_pod16", said.splitlines(), {"run": folder})
    logs = events(folder, "log")
    assert found["throughput"] == pytest.approx(logs[2]["throughput"], rel=1e-4)  # two of three are warm-up
    assert found["accuracy"] == pytest.approx(
        unit * result["validation"][-1]["validation_accuracy"], abs=0.006
    )
    assert found["loss"] == pytest.approx(logs[-1]["loss"], rel=1e-4)


def test_every_record_has_the_epoch_of_its_update_and_the_end_that_of_the_last(whole):
    records = list(read_events(whole[2]))
    assert all(record["epoch"] == record["update"] / 6 for record in records)
    assert {record["event"]: record["update"] for record in records}["end"] == 18


def test_training_is_followed_by_the_validation_of_every_checkpoint_in_order(whole):
    result, said, folder = whole
    assert [log["update"] for log in events(folder, "log")] == [6, 12, 18]
    rows = result["validation"]
    assert [(row["step"], row["epoch"]) for row in rows] == [(6, 1.0), (12, 2.0), (18, 3.0)]
    assert [event["update"] for event in events(folder, "validation")] == [6, 12, 18]
    for row in rows:
        right = row["validation_accuracy"] * TEST
        assert row["samples"] == TEST and right == pytest.approx(round(right), abs=1e-9)
        assert row["validation_accuracy"] <= row["validation_top_5"] <= 1
    best = max(rows, key=lambda row: (row["validation_accuracy"], -row["step"]))
    assert result["best"] == best and f"best of 3: step {best['step']}, epoch {best['epoch']:g}" in said
    assert result["time_to_train_seconds"] > 0 and "time to train: 0:0" in said
    assert [event["processes"] for event in events(folder, "time_to_train")] == [1]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "00000006", "00000012", "00000018", "network.json",
    }  # fmt: skip


def test_the_old_benchmarks_find_their_figures_in_the_output(whole):
    result, said, folder = whole
    logs = events(folder, "log")
    assert [float(found) for found in re.findall(THROUGHPUT, said)] == pytest.approx(
        [log["throughput"] for log in logs], rel=1e-4
    )
    accuracies = [float(found) for found in re.findall(ACCURACY, said)]
    training = [100 * log["training_accuracy"] for log in logs]
    validated = [100 * row["validation_accuracy"] for row in result["validation"]]
    assert accuracies == pytest.approx([*training, *validated], abs=0.006)
    losses = [float(found) for found in re.findall(LOSS, said)]
    assert losses == pytest.approx([log["loss"] for log in logs], rel=1e-4)
    assert all(
        {"learning_rate", "epoch", "memory_gib", "loss", "training_accuracy", "throughput"} <= set(log)
        for log in logs
    )
    (compiling,) = events(folder, "compile")
    assert compiling["compile_seconds"] > 0 and result["compile_seconds"] > 0


@pytest.mark.parametrize("words", [("validate",), ("train", "--training", "False")])
def test_validation_alone_of_a_folder_finds_the_same_figures_and_changes_nothing(words, whole, toy):
    result, _, folder = whole
    before = content(folder / "checkpoints")
    given = folder if words[0] == "train" else folder / "checkpoints"
    norm = ["--norm-layer", "{name: batch_norm, momentum: 0.5}"]  # of no weight once it is trained
    status, again, said = called(*words, *toy, *norm, "--checkpoint-input-dir", given)
    assert status == 0, said
    assert again["validation"] == result["validation"] and again["best"] == result["best"]
    assert "time_to_train_seconds" not in again and "updates" not in again
    assert content(folder / "checkpoints") == before


@pytest.mark.parametrize("what", ["run", "run/checkpoints"])
def test_a_runs_folder_is_all_that_its_validation_needs(what, whole, tmp_path, monkeypatch):
    result, _, folder = whole
    before = content(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "SLOW", 0)
    status, again, said = called("validate", folder.parent / what)
    assert status == 0, said
    assert again["validation"] == result["validation"] and again["best"] == result["best"]
    assert "(the run had" not in said and "update 6, epoch 1.00" in said and "run" not in again
    status, again, said = called("validate", "--checkpoint-input-dir", folder.parent / what)
    assert status == 0 and again["validation"] == result["validation"], said
    assert content(folder) == before and not list(tmp_path.iterdir())
    assert said.count("validation: compiled in ") == 1  # one program for all checkpoints


def test_an_option_beside_a_runs_folder_wins_and_is_told(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--top-k", "3", "--seed", "5", "--precision", "16.32"]
    status, result, said = called("validate", whole[2], *words)
    assert status == 0, said
    assert "option --top-k: 3 (the run had 5)\n" in said
    assert "option --precision: 16.32 (the run had 32.32)\n" in said and said.count("(the run had") == 2
    assert all("validation_top_3" in row for row in result["validation"])
    for words, reason in (
        ([whole[2], "--model", "toy_model"], "holds a toy_model_bn"),
        ([whole[2], "--config", "mnist_toy"], "keep one"),
        ([tmp_path], "neither a run's folder (config.json) nor one of checkpoints (network.json)"),
    ):
        status, result, _ = called("validate", *words)
        assert status == 2 and reason in result["error"]
    assert not list(tmp_path.iterdir())


def test_checkpoints_away_from_their_run_are_validated_by_what_they_tell_of_their_network(
    whole, digits, tmp_path
):
    shutil.copytree(whole[2] / "checkpoints", tmp_path / "moved")
    words = ["--dataset-path", digits, "--validation-micro-batch-size", "7"]
    status, result, said = called("validate", tmp_path / "moved", *words)
    assert status == 0, said
    assert result["validation"] == whole[0]["validation"]


def test_a_folder_that_is_not_there_is_an_error_and_random_weights_need_their_word(tmp_path, toy):
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.iterdir())
    empty = ["--checkpoint-input-dir", tmp_path / "empty"]
    typo = ["--checkpoint-input-dir", tmp_path / "typo"]
    for words, reason in (
        (["validate", *toy, *typo], f"--checkpoint-input-dir {tmp_path / 'typo'}: no such folder"),
        (["validate", tmp_path / "typo"], "typo: no such folder"),
        (["validate", *toy, *typo, "--random-weights"], "typo: no such folder"),
        (["train", *toy, *typo], "typo: no such folder"),
        (["train", *toy, *typo, "--training", "False"], "typo: no such folder"),
        (["validate", *toy, *empty], "empty: no network.json there"),
        (["validate", *toy], "or --random-weights"),
        (["train", *toy, "--random-weights"], "--random-weights: goes with validation alone"),
        (["train", *toy, "--resume", "--training", "False"], "`hotloop cnn validate RUN`"),
    ):
        status, result, _ = called(*words)
        assert status == 2 and reason in result["error"], result
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_is_there_is_not_passed_over_for_random_weights(digits, whole):
    words = ["--dataset-path", digits, "--results-dir", whole[2].parent, "--run-name", "run"]
    status, result, _ = called("train", *TOY, *words, "--training", "False")
    assert status == 2
    assert f"--training False: `hotloop cnn validate {whole[2]}` validates that run" in result["error"]


def test_a_folder_for_checkpoints_that_cannot_be_is_named_before_there_is_a_run(toy, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "in"):
        status, result, said = called("train", *toy, "--checkpoint-output-dir", folder)
        assert status == 2 and f"cannot make --checkpoint-output-dir {folder}: " in result["error"], said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_random_weights_are_validated_where_that_is_asked_for(tmp_path, toy, whole):
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.iterdir())
    words = ["--random-weights", "--checkpoint-input-dir", tmp_path / "empty"]
    status, result, said = called("validate", *toy, *words)
    assert status == 0 and "empty holds no checkpoint; random weights are validated" in said
    assert [row["step"] for row in result["validation"]] == [0] and result["best"] is None
    status, again, said = called("train", *toy, "--training", "False")  # what the old line has always meant
    assert status == 0 and again["validation"] == result["validation"]
    status, result, _ = called("validate", whole[2], "--random-weights")
    assert status == 2 and "holds checkpoints; leave out one" in result["error"]
    words = ["--synthetic-data", "host", "--validation-micro-batch-size", "2500", "--random-weights"]
    status, result, said = called("validate", *toy, *words)
    assert status == 0 and "there is no checkpoint to validate; random weights are validated" in said
    assert sorted(tmp_path.iterdir()) == before
    (row,) = result["validation"]
    assert row["samples"] == 10_000
    assert row["validation_accuracy"] == pytest.approx(0.1, abs=0.03)
    assert row["validation_top_5"] == pytest.approx(0.5, abs=0.05)


def test_the_last_weights_are_validated_where_no_checkpoint_was_kept(toy, whole, tmp_path):
    status, result, said = called("train", *toy, "--ckpts-per-epoch", "0")
    assert status == 0 and "there is no checkpoint to validate; the last weights are validated" in said
    assert result["validation"] == whole[0]["validation"][-1:]
    assert not list(tmp_path.rglob("0000*"))


def another(folder, step, network):
    """A checkpoint of some other run in a folder."""
    shutil.copy(network, folder)
    with Checkpoints(folder, KeepAll(), family="cnn", shared=True) as found:
        found.save(step, {"x": np.zeros(3)}, position={})


def test_checkpoints_that_were_not_validated_are_not_cleaned_away(toy, tmp_path):
    (tmp_path / "empty").mkdir()
    words = ["--checkpoint-input-dir", tmp_path / "empty", "--clean-dir"]
    status, result, said = called("train", *toy, *words, "--run-name", "stays")
    assert status == 0 and "3 checkpoints of this run stay" in said
    assert "empty holds no checkpoint; the last weights are validated" in said
    assert len(list((Path(result["run"]) / "checkpoints").glob("[0-9]*"))) == 3


@pytest.mark.parametrize("named", [False, True])
def test_the_best_and_the_last_checkpoint_of_a_finished_run_stay_and_can_be_used(
    named, toy, whole, tmp_path, monkeypatch
):
    """Also where both folders are named and are the same, as in the old benchmark."""
    rows = [{"validation_accuracy": accuracy, "samples": TEST} for accuracy in (0.2, 0.4, 0.4)]
    monkeypatch.setattr("hotloop.families.cnn.train.validation_figures", lambda sums, top, kind: rows.pop(0))
    kept = tmp_path / "kept" if named else tmp_path / "run" / "checkpoints"
    words = ["--checkpoint-output-dir", kept, "--checkpoint-input-dir", kept] if named else []
    status, result, said = called("train", *toy, *words)
    assert status == 0, said
    assert f"of 3 checkpoints the best (step 12) and the last (step 18) stay in {kept}" in said
    assert sorted(path.name for path in kept.iterdir()) == ["00000012", "00000018", "network.json"]
    monkeypatch.undo()
    before = content(tmp_path)
    status, result, said = called("validate", tmp_path / "run")
    assert status == 0 and result["validation"] == whole[0]["validation"][1:]
    # Finished: it says so and does nothing, and neither how devices are found nor stages change a weight.
    staged = "--strict-devices", "True", "--pipeline-splits", "pool_1"
    status, result, said = called("train", *toy, *words, "--resume", *staged)
    assert status == 0 and result == {"run": str(tmp_path / "run"), "finished": True}
    assert f"run is finished, its checkpoints are in {kept}: there is nothing to go on with" in said
    assert f"`hotloop cnn validate {tmp_path / 'run'}`" in said and content(tmp_path) == before
    # Nor does who computes which part of a batch, as long as the batch is the same.
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["num_replicas"] == 1 and config["gradient_accumulation_count"] % 2 == 0
    halves = ("--gradient-accumulation-count", config["gradient_accumulation_count"] // 2)
    status, result, said = called("train", *toy, *words, "--resume", "--num-replicas", "2", *halves)
    assert status == 0 and result["finished"] and content(tmp_path) == before
    status, result, said = called("train", *toy, *words, "--resume", "--num-replicas", "2")
    assert status == 2 and "num_replicas: 1 -> 2" in result["error"] and content(tmp_path) == before
    status, result, said = called("train", *toy, *words, "--resume", "--num-epochs", "7")
    assert status == 2 and "num_epochs: 3 -> 7" in result["error"] and content(tmp_path) == before


def test_a_last_checkpoint_that_is_the_best_is_named_once(toy, monkeypatch):
    rows = [{"validation_accuracy": accuracy, "samples": TEST} for accuracy in (0.2, 0.3, 0.4)]
    monkeypatch.setattr("hotloop.families.cnn.train.validation_figures", lambda sums, top, kind: rows.pop(0))
    status, _, said = called("train", *toy)
    assert status == 0 and "of 3 checkpoints the last (step 18), which is the best, stays in" in said


def test_a_finished_run_that_kept_all_is_neither_validated_nor_timed_again(digits, whole):
    folder = whole[2]
    words = [
        *TOY,
        "--dataset-path",
        digits,
        "--results-dir",
        folder.parent,
        "--seed",
        "5",
        "--run-name",
        "run",
    ]
    words += ["--clean-dir", "False", "--resume"]
    before = content(folder)
    status, result, said = called("train", *words)
    assert status == 0 and result == {"run": str(folder), "finished": True}, said
    assert "there is nothing to go on with" in said and content(folder) == before
    status, result, said = called("train", *words, "--validation", "False")
    assert status == 0 and result["finished"] and content(folder) == before


def test_a_cleaned_run_says_what_became_of_its_checkpoints_and_how_to_keep_them(toy, tmp_path):
    status, _, said = called("train", *toy, "--num-epochs", "1", "--clean-dir")
    assert status == 0 and "removed 1 checkpoints, as --clean-dir asks for" in said
    for words in (["validate", tmp_path / "run"], ["predict", tmp_path / "run", "any.png"]):
        for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
            words[1] = path
            status, result, _ = called(*words)
            assert status == 2
            assert "run: its checkpoints were removed after the validation, as --clean-dir" in result["error"]
            assert "train again without it, and the best and the last stay" in result["error"]


def test_clean_dir_removes_what_the_run_made_and_nothing_else(toy, whole, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    another(kept, 4, whole[2] / "checkpoints" / "network.json")
    before = content(kept)
    status, result, said = called("train", *toy, "--checkpoint-output-dir", kept, "--clean-dir", "True")
    assert status == 0 and "removed 3 checkpoints" in said
    assert [row["step"] for row in result["validation"]] == [6, 12, 18]
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert [event["epoch"] for event in read_events(Path(result["run"]))][-2:] == [3.0, 3.0]
    after = content(kept)
    about = Path("network.json")
    assert {**after, about: b""} == {**before, about: b""}
    (tmp_path / "mine").mkdir()
    words = ["--run-name", "own", "--clean-dir", "--checkpoint-output-dir", tmp_path / "mine"]
    status, _, _ = called("train", *toy, *words)
    assert status == 0 and not list((tmp_path / "mine").iterdir())  # empty again, and still there


def test_checkpoints_of_another_run_or_network_are_never_written_over(toy, whole, tmp_path):
    kept = tmp_path / "kept"
    shutil.copytree(whole[2] / "checkpoints", kept)
    before = content(kept)
    status, _, said = called("train", *toy, "--checkpoint-output-dir", kept)
    assert status == 2 and "holds step 6 of another run" in said
    status, _, said = called("train", *toy, "--model", "toy_model", "--checkpoint-output-dir", kept)
    assert status == 2 and "holds a toy_model_bn for 28 x 28 x 1 images" in said
    assert content(kept) == before and not (tmp_path / "run").exists()


def test_checkpoints_of_another_network_are_refused_in_one_line(whole, toy, tmp_path):
    words = [*toy, "--model", "toy_model", "--checkpoint-input-dir", whole[2]]
    status, _, said = called("train", *words)  # before anything is trained or opened
    assert status == 2 and "holds a toy_model_bn" in said and not list(tmp_path.iterdir())
    status, _, said = called("validate", *words)
    (error,) = [line for line in said.splitlines() if line.startswith("hotloop: error:")]
    assert status == 2 and "holds a toy_model_bn" in error and "ask for a toy_model for" in error


def stopped(*words):
    """Begin a run and interrupt it at its first log, that of update 6, which is written while updates 7 to 12 run."""
    heard = io.StringIO()

    def stop(text):
        if text.startswith("update 6,"):
            signal.raise_signal(signal.SIGINT)
            wait_for(lambda: "Ctrl-C" in heard.getvalue())

    with redirect_stderr(heard):
        train.run(config_of(*words), Listener(stop), "test")


def wait_for(happened):
    for _ in range(1000):
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


ONLY_THE_END = ["--ckpts-per-epoch", "1/3", "--clean-dir", "False"]


def test_a_program_that_is_compiled_while_weights_are_drawn_is_the_only_one_also_after_a_stop(
    toy, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(train, "compiles_ahead", lambda mesh: mesh is None)
    words = [*toy, "--clean-dir", "False"]
    with pytest.raises(Interrupted, match="after update 6 of 18"):
        stopped(*words)
    status, _, said = called("train", *words, "--resume")
    assert status == 0, said
    assert [record.get("ahead") for record in events(tmp_path / "run", "compile")] == [True, True]
    for first in events(tmp_path / "run", "first_update"):
        spent = first["lower_seconds"] + first["compile_seconds"] + first["call_seconds"]
        assert sum(first["parts"].values()) + spent < first["seconds"] + 1e-3
    assert weights(tmp_path / "run" / "checkpoints") == weights(whole[2] / "checkpoints")
    found = records(tmp_path / "run")
    assert [each.pop("ahead", None) for each in found].count(True) == 1
    assert found == records(whole[2])


def test_an_interrupted_run_saves_beside_another_runs_step_of_that_number(toy, whole, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    another(kept, 12, whole[2] / "checkpoints" / "network.json")
    before = content(kept / "00000012")
    words = [*toy, "--ckpts-per-epoch", "1/3", "--checkpoint-output-dir", kept]
    with pytest.raises(Interrupted, match="after update 12 of 18, saved in"):
        stopped(*words)
    assert len(list(kept.glob("00000012-*"))) == 1
    status, result, said = called("train", *words, "--resume")
    assert status == 0, said
    assert [event["update"] for event in events(tmp_path / "run", "resume")] == [12]
    assert weights(kept) == weights(whole[2] / "checkpoints")
    assert result["validation"] == whole[0]["validation"][-1:]  # as without the stop, whose step has gone
    assert sorted(path.name for path in kept.iterdir()) == ["00000012", "00000018", "network.json"]
    assert content(kept / "00000012") == before


def test_a_run_goes_on_from_its_own_step_beside_newer_ones_of_a_run_that_came_between(toy, whole, tmp_path):
    kept = tmp_path / "kept"
    words = [*toy, *ONLY_THE_END, "--checkpoint-output-dir", kept]
    with pytest.raises(Interrupted, match="after update 12 of 18"):
        stopped(*words)
    another(kept, 18, whole[2] / "checkpoints" / "network.json")
    before = content(kept)
    status, _, said = called("train", *words, "--resume")
    (error,) = [line for line in said.splitlines() if line.startswith("hotloop: error:")]
    assert status == 2 and "kept: holds step 18 of another run" in error and content(kept) == before
    shutil.rmtree(kept / "00000018")
    another(kept, 15, whole[2] / "checkpoints" / "network.json")
    status, result, said = called("train", *words, "--resume", "--clean-dir", "True")
    assert status == 0, said
    assert [event["update"] for event in events(tmp_path / "run", "resume")] == [12]
    assert [row["step"] for row in result["validation"]] == [18]  # as without the stop, whose step has gone
    assert result["validation"][-1] == whole[0]["validation"][-1]
    assert [path.name for path in sorted(kept.glob("0*"))] == ["00000015"]


def test_a_finished_run_whose_checkpoints_were_cleaned_does_not_start_over(toy, tmp_path):
    status, _, said = called("train", *toy, "--num-epochs", "1", "--clean-dir")
    assert status == 0 and "removed 1 checkpoints" in said
    before = content(tmp_path)
    status, _, said = called("train", *toy, "--num-epochs", "1", "--resume")
    (error,) = [line for line in said.splitlines() if line.startswith("hotloop: error:")]
    assert status == 2 and content(tmp_path) == before
    assert "finished and its checkpoints were removed, as --clean-dir asked for; to train again" in error


def test_a_run_without_checkpoints_starts_over_with_a_notice_but_not_once_it_is_finished(
    toy, whole, tmp_path
):
    words = [*toy, "--ckpts-per-epoch", "0"]
    with pytest.raises(Interrupted, match="nothing was saved"):
        stopped(*words)
    status, result, said = called("train", *words, "--resume")
    assert status == 0 and "warning: the run has no checkpoint yet, so it starts over" in said
    assert result["validation"] == whole[0]["validation"][-1:]
    logs = [each for each in current_records(read_events(tmp_path / "run")) if each["event"] == "log"]
    assert [log["update"] for log in logs] == [6, 12, 18]
    status, result, _ = called("train", *words, "--resume")
    assert status == 2 and "run is finished and has no checkpoints; to train again" in result["error"]


@pytest.mark.parametrize("seed", [["--seed", "5"], []])
def test_a_stopped_run_goes_on_to_the_same_bits(seed, toy, whole, tmp_path):
    """Also where it drew its own seed, and where newer checkpoints of another run lie beside its own."""
    kept = tmp_path / "kept"
    kept.mkdir()
    another(kept, 99, whole[2] / "checkpoints" / "network.json")
    words = [word for word in toy if word not in ("--seed", "5")] + seed
    words += ["--checkpoint-output-dir", kept, "--clean-dir", "False"]

    with pytest.raises(Interrupted, match="--resume --run-name run"):
        stopped(*words)
    assert not (kept / "00000018").exists()
    status, result, said = called("train", *words, "--resume")
    assert status == 0, said
    assert result["seed"] == json.loads((tmp_path / "run" / "config.json").read_text())["seed"]
    if seed:
        assert weights(kept) == weights(whole[2] / "checkpoints")
        assert result["validation"][-1] == whole[0]["validation"][-1]
        assert records(tmp_path / "run") == records(whole[2])
    assert 99 not in [row["step"] for row in result["validation"]] and (kept / "00000099").is_dir()
    first, second = (event for event in read_events(tmp_path / "run") if event["event"] == "training")
    assert (first["process"], second["process"]) == (1, 2) and second["seconds_before"] > 0
    assert result["time_to_train_seconds"] > second["seconds_before"]
    assert result["time_to_train_processes"] == 2 and ", in 2 processes\n" in said


@pytest.mark.slow
def test_more_logs_make_shorter_calls_and_the_same_bits(toy, whole, tmp_path):
    words = ["--logs-per-epoch", "3", "--ckpts-per-epoch", "1", "--validation", "False"]
    status, result, said = called("train", *toy, *words)
    assert status == 0 and len(events(tmp_path / "run", "log")) == 9
    assert weights(tmp_path / "run" / "checkpoints") == weights(whole[2] / "checkpoints")
    assert (
        "validation" not in result and "time to train" not in said and "time_to_train_seconds" not in result
    )


def test_compile_only_compiles_and_trains_nothing(toy, tmp_path):
    status, result, _ = called("train", *toy, "--compile-only")
    assert status == 0 and result["compile_seconds"] > 0
    assert {event["event"] for event in read_events(tmp_path / "run")} == {"start", "compile", "end"}
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_plan_counts_the_images_that_are_there_and_writes_nothing(toy, tmp_path):
    status, plan, said = called("train", *toy, "--plan")
    assert status == 0 and (plan["samples"], plan["total_updates"], plan["calls"]) == (TRAIN, 18, 3)
    assert f"validation: {TEST} images in 5 batches of 7 (4 padded)" in said
    assert not list(tmp_path.iterdir())


def test_a_sweep_is_told_when_the_target_was_reached(whole, toy):
    rows = whole[0]["validation"]
    for target, first in ((0.0, 1.0), (1.0, None)):
        words = [
            "--checkpoint-input-dir",
            whole[2],
            "--sweep",
            "--target-accuracy",
            target,
            "--run-name",
            str(target),
        ]
        status, result, _ = called("validate", *toy, *words)
        assert status == 0 and (result["target_accuracy"], result["epoch_to_target"]) == (target, first)
        short = min(rows[-1]["validation_accuracy"] - target, 0) / 0.02
        assert result["optimization_metric"] == pytest.approx(math.exp(-0.5 * short**2) / 3)


def test_a_configuration_for_more_devices_runs_with_one_notice_of_each_kind():
    status, plan, said = called("train", "--config", "resnet8_16ipus_bn", "--synthetic-data", "cpu", "--plan")
    assert status == 0 and plan["batch"]["global"] == 2000
    assert plan["batch"]["replicas"] == len(jax.devices())
    (notice,) = [line for line in said.splitlines() if "16 replicas" in line]
    assert "the global batch 2000 and the learning rate stay" in notice
    words = ["--config", "resnet50_mlperf_bs16", "--prefetch-depth", "3", "--conv-dithering", "--plan"]
    status, _, said = called("train", *words, "--synthetic-data", "ipu")
    (notice,) = [line for line in said.splitlines() if "without effect here" in line]
    named = notice.partition("without effect here: ")[2].split(", ")
    assert status == 0 and len(named) == len(set(named))
    assert {"--prefetch-depth", "--conv-dithering", "--fused-preprocessing"} <= set(named)


def test_more_replicas_train_the_same_and_are_validated(toy, whole):
    """The run that one device made with accumulation: every device's statistics come to the same."""
    words = [
        "--micro-batch-size",
        "4",
        "--gradient-accumulation",
        "1",
        "--num-replicas",
        "4",
        "--ckpts-per-epoch",
        "0",
    ]
    if len(jax.devices()) < 4:
        pytest.skip("four devices")
    status, result, said = called("train", *toy, *words)
    assert status == 0, said
    (row,), last = result["validation"], whole[0]["validation"][-1]
    assert row["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-5)


STAGES = ["--pipeline-splits", "pool_0", "conv2d_1", "--device-mapping", "0", "0", "1"]
STAGES += ["--pipeline-schedule", "Interleaved"]


@pytest.mark.slow
def test_stages_train_the_same_are_validated_in_stages_and_go_on_where_there_is_one_device(
    toy, whole, tmp_path, monkeypatch
):
    """Two replicas of two devices, the first of which has two stages; the interrupted run goes on merged."""
    if len(jax.devices()) < 4:
        pytest.skip("four devices")
    words = [*toy, *STAGES, "--num-replicas", "2", "--gradient-accumulation", "2", "--clean-dir", "False"]
    words += ["--pipeline-validation-model", "--strict-devices", "False"]
    status, _, said = called("train", *words, "--plan")
    assert status == 0 and "2 x 2 devices, stages from conv2d_1; Interleaved: a device works 75% of" in said
    with pytest.raises(Interrupted, match="after update 6 of 18"):
        stopped(*words)
    status, result, said = called("validate", tmp_path / "run")
    assert status == 0 and "merge" not in said, said
    rows, expected = result["validation"], whole[0]["validation"]
    assert [row["step"] for row in rows] == [6]
    assert [row["validation_loss"] for row in rows] == pytest.approx(losses_of(expected[:1]), rel=1e-5)
    assert {row["samples"] for row in rows} == {TEST}
    only = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda platform=None: only)
    status, result, said = called("train", *words, "--resume")
    assert status == 0 and "3 stages merge into one; 2 replicas become 1 with accumulation 4" in said, said
    assert [row["validation_loss"] for row in result["validation"]] == pytest.approx(
        losses_of(expected), rel=1e-5
    )


def losses_of(rows):
    return [row["validation_loss"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "device"])
def test_eight_replicas_eight_parts_and_stages_train_on_the_same_made_up_images(tmp_path, where):
    words = f"--model toy_model_bn --dataset mnist --synthetic-data {where} --precision 32.32 "
    words += "--micro-batch-size 4 --seed 1 --weight-updates-per-epoch 2 --logs-per-epoch 2 --validation False --json"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    losses = []
    for replicas, parts, more in ((8, 1, ""), (1, 8, ""), (4, 2, ""), (4, 2, " --pipeline-splits flatten")):
        place = tmp_path / f"{replicas}{bool(more)}"
        split = f" --num-replicas {replicas} --gradient-accumulation {parts} --results-dir {place}{more}"
        command = [sys.executable, "-m", "hotloop", "cnn", "train", *(words + split).split()]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        logs = events(Path(json.loads(done.stdout.splitlines()[-1])["run"]), "log")
        losses.append([log["loss"] for log in logs])
        assert "become" not in done.stderr and "merge" not in done.stderr  # on as many devices as asked for
    np.testing.assert_allclose(losses, [losses[0]] * 4, rtol=1e-6)
    assert np.isfinite(losses).all() and np.min(losses) > 0


def test_a_seed_that_is_not_given_is_drawn_and_told(toy, tmp_path):
    words = [word for word in toy if word not in ("--seed", "5")] + [
        "--validation",
        "False",
        "--num-epochs",
        "1",
    ]
    status, result, said = called("train", *words)
    assert status == 0 and f"\nseed: {result['seed']}\n" in said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == result["seed"]
    status, zero, said = called("train", *words, "--seed", "0", "--run-name", "zero")
    assert status == 0 and zero["seed"] == 0 and "\nseed: " not in said
    one, other = (weights(tmp_path / name / "checkpoints", 6) for name in ("run", "zero"))
    assert one != other


def test_a_run_that_diverges_stops_with_advice(toy, tmp_path):
    words = ["--lr-schedule-params", "{initial_learning_rate: 1e30}", "--model", "toy_model"]
    words += ["--gradient-accumulation", "1"]
    status, _, said = called("train", *toy, *words)
    (error,) = [line for line in said.splitlines() if line.startswith("hotloop: error:")]
    assert status == 2 and re.search("loss is (nan|inf) at update", error)
    assert "lower the learning rate or scale the loss" in error
    (end,) = events(tmp_path / "run", "end")
    assert end["status"] == "failed" and "validation" not in {
        event["event"] for event in read_events(tmp_path / "run")
    }


# What options alone cannot do is a table of the family's; here is what only the command finds out.
BAD = [
    ("--loss-scaling nan", "--loss-scaling nan"),
    ("--global-batch-size 128", "--gradient-accumulation-count"),
    ("--micro-batch-size 50", "96 samples do not fill one global batch of 200"),
    ("--dataset-path /nowhere/mnist", "--dataset-path /nowhere/mnist: no such folder"),
    ("--num-replicas 99", "--num-replicas 99: there"),
    (
        "--strict-devices --config resnet8_16ipus_bn --gradient-accumulation 1",
        "--strict-devices: 16 replicas need 16",
    ),
    ("--training False --validation False", "leaves nothing to do"),
    (
        "--training False --compile-only",
        "--compile-only: compiles the training program, and this only validates",
    ),
    ("--random-weights", "--random-weights: goes with validation alone"),
    ("--resume --training False", "there is no training to go on with; `hotloop cnn validate RUN`"),
    ("--resume --run-name nobody", "nothing to resume"),
    ("--norm-layer {name:group_norm,num_groups:3}", "--norm-layer: num_groups 3 does not divide"),
    ("--checkpoint-output-dir /dev/null", "/dev/null"),
]


def test_a_plan_for_a_folder_that_is_not_there_is_refused_too(toy, tmp_path):
    status, result, _ = called("train", *toy, "--dataset-path", tmp_path / "typo", "--plan")
    assert status == 2 and "typo: no such folder" in result["error"]


@pytest.mark.parametrize(("line", "begins"), BAD)
def test_what_cannot_work_is_one_line_and_exit_status_2(line, begins, toy, tmp_path):
    words = [word.replace(":", ": ").replace(",", ", ") for word in line.split()]
    status, result, said = called("train", *toy, *words)
    (error,) = [text for text in said.splitlines() if text.startswith("hotloop: error:")]
    assert status == 2 and begins in error, error
    assert list(result) == ["error"] and not list(tmp_path.iterdir())


def test_resume_without_a_name_says_so(toy):
    words = [word for word in toy if word not in ("--run-name", "run")]
    status, _, said = called("train", *words, "--resume")
    assert status == 2 and "--resume: say which run goes on by --run-name" in said


def test_without_wandb_there_is_no_run(toy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for words in (["train", *toy], ["train", *toy, "--training", "False"]):
        status, result, _ = called(*words, "--wandb")
        assert status == 2 and "pip install 'hotloop[wandb]'" in result["error"]
    assert not list(tmp_path.iterdir())


def test_describe_counts_parameters_layers_and_split_points():
    status, facts, said = called("describe", "resnet50")
    assert status == 0 and facts["parameters"] == 25_557_032
    assert facts["flops"] == pytest.approx(8.2e9, rel=0.02) and "conv2_block1_out" in said
    split = {layer["name"] for layer in facts["layers"] if layer["may_split"]}
    assert {"conv2_block2_out", "conv3_block1_out", "conv4_block2_out"} <= split
    assert called("describe", "resnet51")[0] == 2


def test_describe_recommends_stages_by_flops_and_by_measured_time(digits):
    status, facts, said = called("describe", "cifar_resnet8", "--stages", "3", "--measure", "False")
    assert status == 0, said
    best, old = facts["recommended"], facts["by_parameters"]
    assert f"--pipeline-splits {' '.join(best['splits'])}" in said and best["rule"] == "FLOPs"
    assert len(best["stages"]) == len(old["stages"]) == 3
    assert sum(stage["parameters"] for stage in best["stages"]) == facts["parameters"]
    assert set(facts["busy"]) == {"Grouped", "Interleaved", "Sequential"}
    assert all(list(shares) == ["4", "16", "64"] for shares in facts["busy"].values())
    assert facts["busy"]["Sequential"]["16"] == pytest.approx(1 / 3)
    assert "photographs" not in said  # a small set lies on every device anyway
    words = ("--measure", "False", "--micro-batch-size", "16")
    status, facts, said = called("describe", "resnet50", "--stages", "4", *words)
    assert status == 0 and facts["image_bytes"] == 224 * 224 * 3 and "147.0 MiB for 64 micro-batches" in said
    status, facts, said = called("describe", "toy_model", "--stages", "2", "--micro-batch-size", "2")
    assert status == 0 and facts["recommended"]["rule"] == "time" and "time measured on" in said
    for stages, words in (
        ("0", "--stages 0: must be at least 1"),
        ("9", "--stages 9: toy_model has 6 layers"),
    ):
        status, _, said = called("describe", "toy_model", "--stages", stages)
        assert status == 2 and words in said and len(said.splitlines()) == 1


def test_help_names_every_command_and_configuration(capsys):
    assert main(["cnn", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(
        name in said for name in ("train", "validate", "predict", "describe", "import", "build-records")
    )
    assert main(["cnn", "train", "--help"]) == 0
    said = capsys.readouterr().out
    assert "resnet50_8k_bn_pipeline" in said and "--gradient-accumulation-count" in said


def needs(name):
    here = ROOT.is_dir() and find_set(known_set(name), ROOT) is not None
    return pytest.mark.skipif(not here, reason=f"no {name} in {ROOT}")


def learned(dataset, model, rate, tmp_path, *words):
    """Accuracies of a short float32 run on real images, checkpoint after checkpoint."""
    schedule = f"{{initial_learning_rate: {rate}, total_epochs: 1, peak_epoch: 0.3}}"
    recipe = ["--optimizer-params", "{momentum: 0.9}", "--norm-layer", "{name: batch_norm, momentum: 0.9}"]
    recipe += [
        "--lr-schedule",
        "one_cycle",
        "--lr-schedule-params",
        schedule,
        "--precision",
        "32.32",
        "--seed",
        "0",
    ]
    where = ["--dataset", dataset, "--dataset-path", ROOT, "--results-dir", tmp_path, "--model", model]
    status, result, said = called("train", *where, *recipe, "--validation-micro-batch-size", "500", *words)
    assert status == 0, said
    return [row["validation_accuracy"] for row in result["validation"]]


@pytest.mark.slow
@needs("mnist")
def test_the_toy_learns_real_digits_in_a_moment(tmp_path):
    words = ["--micro-batch-size", "64", "--weight-updates-per-epoch", "250"]
    (accuracy,) = learned("mnist", "toy_model_bn", 0.003, tmp_path, *words)
    assert accuracy > 0.4


@pytest.mark.slow
@needs("mnist")
def test_resnet8_learns_real_digits_in_a_sixth_of_an_epoch(tmp_path):
    words = ["--micro-batch-size", "32", "--weight-updates-per-epoch", "300"]
    (accuracy,) = learned("mnist", "cifar_resnet8", 0.004, tmp_path, *words)
    assert accuracy > 0.95


@pytest.mark.slow
@needs("cifar10")
def test_resnet8_learns_a_sample_of_real_photographs(tmp_path):
    words = ["--micro-batch-size", "32", "--weight-updates-per-epoch", "468", "--ckpts-per-epoch", "3"]
    accuracies = learned("cifar10", "cifar_resnet8", 0.004, tmp_path, *words)
    assert len(accuracies) == 3 and accuracies[-1] == max(accuracies) > 0.4
