"""One small training of each family as a command line, its data made here, and the process that runs it."""

import gzip
import os
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Family:
    """A command and its options; `resume` is added where the run has begun."""

    name: str
    words: tuple[str, ...]
    resume: tuple[str, ...] = ("--resume",)

    def command(self, data: Path, results: Path, *, resume: bool) -> list[str]:
        """A whole command line."""
        words = [word.format(data=data / self.name, results=results) for word in self.words]
        return [sys.executable, "-m", "hotloop", self.name, *words, *(self.resume if resume else ())]


FAMILIES = (
    Family(
        "vcd",
        ("train", "--data", "{data}", "-r", "{results}", "-n", "run", "--z-dim", "2", "--hidden", "8", "8",
         "--hmc-steps", "2", "--leapfrog-steps", "2", "-b", "10", "--updates", "200", "--log-every", "9",
         "--updates-per-call", "5", "--iwae-samples", "20", "--burn-in", "2", "--kept", "3"),
    ),
    Family(
        "recommender",
        ("train", "--training-data-file", "{data}/train.txt", "--validation-data-file", "{data}/valid.txt",
         "--test-data-file", "{data}/test.txt", "--size", "128", "--batch-size", "7", "--epochs", "12",
         "--base-learning-rate", "-11.5", "--precision", "32.32", "--results-dir", "{results}", "--run-name", "run"),
    ),
    Family(
        "cnn",
        ("train", "--dataset", "mnist", "--dataset-path", "{data}", "--model", "toy_model_bn", "--precision",
         "32.32", "--micro-batch-size", "4", "--gradient-accumulation", "4", "--num-epochs", "6", "--seed", "5",
         "--logs-per-epoch", "2", "--validation-micro-batch-size", "7", "--clean-dir", "False", "--results-dir",
         "{results}", "--run-name", "run"),
    ),
    Family(
        "estimator",
        ("--data-dir", "{data}", "--batch-size", "16", "--batches-per-step", "3", "--epochs", "10",
         "--evaluate-every", "1", "--summary-interval", "4", "--log-interval", "100000", "--model-dir",
         "{results}/run"),
        resume=(),
    ),
)  # fmt: skip


def write_idx(path: Path, values: Any) -> None:
    dims = struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(struct.pack(">I", 0x800 + values.ndim) + dims + values.tobytes(), 1))


def make_data(folder: Path) -> None:
    """What each family trains on, in a folder of its name."""
    draws = np.random.default_rng(0)
    for family in FAMILIES:
        (folder / family.name).mkdir()
    for family in ("vcd", "cnn"):
        for name, count in (("train", 120), ("t10k", 30)):
            pixels = draws.integers(0, 256, (count, 28, 28)).astype(np.uint8)
            write_idx(folder / family / f"{name}-images-idx3-ubyte.gz", pixels)
            labels = draws.integers(0, 10, count).astype(np.uint8)
            write_idx(folder / family / f"{name}-labels-idx1-ubyte.gz", labels)
    users, items = np.nonzero(draws.random((40, 30)) < 0.5)
    values, part = draws.integers(1, 6, len(users)), draws.choice(3, len(users), p=(0.7, 0.2, 0.1))
    for number, name in enumerate(("train", "valid", "test")):
        own = [at for at in range(len(users)) if part[at] == number]
        lines = "".join(f"{users[at]}\t{items[at]}\t{values[at]}\n" for at in own)
        (folder / "recommender" / f"{name}.txt").write_text(lines)
    for name, count in (("data_batch_1.bin", 96), ("test_batch.bin", 40)):
        labels = draws.integers(0, 10, (count, 1)).astype(np.uint8)
        pixels = draws.integers(0, 256, (count, 3072)).astype(np.uint8)
        (folder / "estimator" / name).write_bytes(np.concatenate([labels, pixels], 1).tobytes())


def start(command: list[str]) -> "subprocess.Popen[str]":
    """The command as a process, in a group of its own, what it says kept apart."""
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        process_group=0,
    )


def hears(process: "subprocess.Popen[str]") -> bool:
    """Whether the process catches SIGTERM by now: what comes before is Python's own start."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return bool(caught >> (signal.SIGTERM - 1) & 1)
