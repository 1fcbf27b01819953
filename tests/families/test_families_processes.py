"""Several processes of any family: other data in one of them, as where a fetch failed on its machine alone, end all
with one line, and one of them writes the report."""

import gzip
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotloop
from process_groups import find_processes, wait_until_gone
from started_processes import LIMIT, environment, start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signals_heard")]
PROGRAM = Path(hotloop.__file__).with_name("__main__.py")
WORDS = {
    "cnn": "cnn train --dataset mnist --dataset-path mnist --model-name toy_model --num-replicas 2",
    "vcd": "vcd train --data mnist_files --replicas 2 -b 8",
}


def write_idx(path: Path, values: "np.ndarray[Any, Any]") -> None:
    header = struct.pack(f">{1 + values.ndim}I", 2048 + values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


def write_images(folder: Path, train: int) -> None:
    """MNIST's files with so many training images, where either family looks for them."""
    for name in ("mnist", "mnist_files"):
        (folder / name).mkdir(parents=True)
        for part, count in (("train", train), ("t10k", 16)):
            write_idx(folder / name / f"{part}-images-idx3-ubyte.gz", np.zeros((count, 28, 28), np.uint8))
            write_idx(folder / name / f"{part}-labels-idx1-ubyte.gz", np.zeros(count, np.uint8))


@pytest.mark.parametrize("family", WORDS)
def test_other_data_in_one_process_are_one_line_and_the_end_of_all(family: str, tmp_path: Path) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder, train in zip(folders, (64, 72), strict=True):
        write_images(folder, train)
    began = time.monotonic()
    with start(PROGRAM, *WORDS[family].split(), devices=1, folders=folders) as started:
        ended = started.finish()
    assert [each.status for each in ended] == [2, 2], ended
    (line,) = [line for line in ended[0].errors.splitlines() if "error" in line]
    assert "hotloop: error: process 1 on " in line and "has other data than process 0: train" in line
    assert time.monotonic() - began < 60
    assert not (folders[0] / "results").exists()


def test_one_process_writes_the_reports_of_training_and_test(tmp_path: Path) -> None:
    here, there = folders = [tmp_path / "here", tmp_path / "there"]
    draws, data = np.random.default_rng(0), tmp_path / "cifar"
    for folder in (here, there, data):
        folder.mkdir()
    for name, count in (("data_batch_1.bin", 64), ("test_batch.bin", 32)):
        records = draws.integers(0, 256, (count, 1 + 3072), np.uint8)
        records[:, 0] %= 10
        (data / name).write_bytes(records.tobytes())
    place = f"--dataset-path {data} --model-dir {tmp_path}/model"
    words = f"estimator --replicas 2 --epochs 1 --report report {place}"
    with start(PROGRAM, *words.split(), devices=1, folders=folders) as started:
        ended = started.finish()
    assert [each.status for each in ended] == [0, 0], ended
    for part in ("training", "evaluation"):
        assert (here / "report" / part / "summary.json").exists()
        assert len([*(here / "report" / part).rglob("*.xplane.pb")]) == 1
    assert [*there.iterdir()] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_reader_that_has_gone_ends_all(tmp_path: Path) -> None:
    """As `| head -0` does it: what process 0 says before the run has begun ends it, while the other waits for it."""
    reader, writer = os.pipe()
    command = ["cnn", "train", "--model-name", "toy_model", "--synthetic-data", "host"]
    words = ["launch", "--num-instances", "2", "--", *command, "--results-dir"]
    launcher = subprocess.Popen(
        [sys.executable, PROGRAM, *words, tmp_path],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(1),
    )
    os.close(writer)
    os.close(reader)
    try:
        groups = find_processes(launcher.pid, 2)
        errors = launcher.communicate(timeout=LIMIT)[1]
    finally:
        launcher.kill()
    assert launcher.returncode == 141, errors
    assert "Traceback" not in errors and [*tmp_path.iterdir()] == []
    assert wait_until_gone(groups) == [[], []]
