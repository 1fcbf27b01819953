"""The shortest run of each family that logs, saves several times and can be resumed, as words for `hotloop`."""

import gzip
import struct
from pathlib import Path

import numpy as np

IMAGES = (64, 32)
"""For `cifar_data.IMAGE_SETS`: how many the estimator's random images are."""
FAMILIES = ("vcd", "recommender", "cnn", "estimator")


def write_digits(folder: Path) -> Path:
    """A folder with 60 + 10 random images in MNIST's files."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name, count in (("train", 60), ("t10k", 10)):
        images = generator.integers(0, 256, (count, 28, 28), np.uint8)
        labels = generator.integers(0, 10, count, np.uint8)
        for kind, data in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">{1 + data.ndim}I", 2048 + data.ndim, *data.shape)
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + data.tobytes()))
    return folder


def words(family: str, data: Path, results: Path, name: str = "run") -> list[str]:
    """A command line; the run's folder is RESULTS/NAME. `data` is what `write_digits` made."""
    if family == "estimator":
        return ["estimator", "--generated-data", "--epochs", "3", "--evaluate-every", "1", "--batches-per-step", "1",
                "--model-dir", str(results / name)]  # fmt: skip
    place = ["--results-dir", str(results), "--run-name", name]
    if family == "vcd":
        return ["vcd", "train", *place, "--data", str(data), "--z-dim", "2", "--hidden", "8", "8", "--hmc-steps", "1",
                "--leapfrog-steps", "1", "-b", "10", "--updates", "40", "--log-every", "10", "--no-testing",
                "--seed", "3"]  # fmt: skip
    if family == "recommender":
        return ["recommender", "train", *place, "--data", "procedural", "--epochs", "3", "--batch-size", "256",
                "--size", "128", "--valid-per-epoch", "2", "--seed", "3"]  # fmt: skip
    return ["cnn", "train", *place, "--dataset", "mnist", "--dataset-path", str(data), "--model", "toy_model_bn",
            "--precision", "32.32", "--micro-batch-size", "4", "--num-epochs", "3",
            "--validation", "False", "--seed", "3"]  # fmt: skip


def resumed(family: str, line: list[str]) -> list[str]:
    """The same line to go on; the estimator always does."""
    return line if family == "estimator" else [*line, "--resume"]
