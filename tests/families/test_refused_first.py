"""What can be seen to be wrong before the first update is refused before there is a run's folder."""

import sys

import jax.numpy as jnp
import pytest

from hotloop.cli.main import main
from hotloop.engine.checkpoint import Checkpoints
from hotloop.families.cnn import saved_network
from hotloop.families.cnn.network import NormChoice, build

CNN = ["cnn", "train", "--dataset", "cifar10", "--model", "toy_model_bn", "--synthetic-data", "device"]
RECOMMENDER = ["recommender", "train", "--data", "procedural"]
VCD = ["vcd", "train", "--hidden", "8", "8", "--z-dim", "2", "--data", "digits"]
FAMILIES = {
    "cnn": CNN,
    "recommender": RECOMMENDER,
    "vcd": VCD,
    "estimator": ["estimator", "--generated-data"],
}


def others_checkpoint(folder):
    """A step of a network that the options of CNN do not name."""
    with Checkpoints(folder, family=saved_network.FAMILY) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.ones(2)}}, position={})
    network = build("cifar_resnet8", (32, 32, 3), 10, NormChoice())
    saved_network.SavedNetwork(network, "cifar10", "32.32", "bfloat16", 1.0).write(folder)
    return folder


def refused(words, tmp_path, capsys, text):
    assert main([*words, "--results-dir", str(tmp_path / "results")]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("error:") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_report_that_cannot_be_written(family, tmp_path, capsys):
    (tmp_path / "file").touch()
    refused([*FAMILIES[family], "--report", str(tmp_path / "file" / "x")], tmp_path, capsys, "--report")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_results_folder_that_is_a_file(family, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main([*FAMILIES[family], "--results-dir", str(tmp_path / "file")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert str(tmp_path / "file") in line and "Not a directory" in line
    assert (tmp_path / "file").read_text() == "mine"


def test_weights_and_biases_that_is_not_installed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused([*CNN, "--wandb"], tmp_path, capsys, "pip install 'hotloop[wandb]'")


def test_photographs_without_pillow(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    for name in ("train/dog/1.jpg", "val/dog/2.jpg"):
        path = tmp_path / "photographs" / name
        path.parent.mkdir(parents=True)
        path.touch()
    words = ["cnn", "train", "--dataset", "imagenet", "--dataset-path", str(tmp_path / "photographs")]
    refused(words, tmp_path, capsys, "pip install 'hotloop[images]'")


@pytest.mark.parametrize("option", ["--checkpoint-input-dir", "--checkpoint-output-dir"])
def test_checkpoints_of_another_network(option, tmp_path, capsys):
    folder = others_checkpoint(tmp_path / "others")
    refused([*CNN, option, str(folder)], tmp_path, capsys, "holds a cifar_resnet8")


def test_a_run_to_resume_that_is_not_there(tmp_path, capsys):
    for words in (CNN, RECOMMENDER, VCD):
        refused([*words, "--resume", "--run-name", "x"], tmp_path, capsys, "nothing to resume")
