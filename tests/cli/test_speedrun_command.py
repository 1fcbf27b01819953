"""`hotloop cnn speedrun` from the command line: what it prints, records and refuses."""

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

from hotloop.cli.main import main
from hotloop.engine.run import read_events
from hotloop.families.cnn.speedrun import train
from hotloop.families.cnn.speedrun.config import Recipe
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
