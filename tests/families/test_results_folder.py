"""Where runs go when nobody says: one folder for all families, with the run's own report in the run."""

from pathlib import Path

import pytest

from hotloop import Estimator
from hotloop.cli.main import find_command
from hotloop.cli.parser import resolve, scan
from hotloop.errors import OptionError
from hotloop.families.cnn.train import run_folder as cnn_folder
from hotloop.families.kernels import config as kernels
from hotloop.families.kernels.timing import own_folder
from hotloop.families.recommender.train import run_folder as recommender_folder
from hotloop.families.vcd.train import run_folder as vcd_folder
from hotloop.options import options_of

TRAINING = {"vcd train": vcd_folder, "recommender train": recommender_folder, "cnn train": cnn_folder}
OLD_WORDS = {"vcd train": "-r", "recommender train": "--logdir", "recommender sweep": "--logdir"}


def read(words):
    command, _, rest = find_command(words.split())
    return resolve(command, scan(rest, options_of(command.config))).config


@pytest.mark.parametrize("command", [*TRAINING, "recommender sweep", "estimator"])
def test_every_family_keeps_its_runs_in_one_folder(command):
    assert read(command).results_dir == Path("results")
    assert read(f"{command} --results-dir elsewhere").results_dir == Path("elsewhere")
    old = OLD_WORDS.get(command, "--results-dir")
    assert read(f"{command} {old} elsewhere").results_dir == Path("elsewhere")


@pytest.mark.parametrize("command", TRAINING)
def test_a_run_is_a_folder_in_it(command):
    assert TRAINING[command](read(command)).parent == Path("results")
    assert TRAINING[command](read(f"{command} --run-name night")) == Path("results/night")


@pytest.mark.parametrize("name", ["../X", "/tmp/X", "a/b", "..", ".", " ", "a\\b", "x" * 201])
@pytest.mark.parametrize("command", [*TRAINING, "recommender sweep"])
def test_the_name_of_a_run_leads_nowhere_else(command, name):
    words = command.split()
    command, _, _ = find_command(words)
    with pytest.raises(
        OptionError, match=r"--run-name .*: must (be the name of one folder|have at most 200)"
    ):
        resolve(command, scan(["--run-name", name], options_of(command.config)))
    with pytest.raises(OptionError, match="--run-name"):  # from Python, too
        command.config(run_name=name)


@pytest.mark.parametrize("name", ["../X", "a/b", 3])
def test_the_name_of_an_evaluation_leads_nowhere_else(tmp_path, name):
    with pytest.raises(OptionError, match=r"name=.*must be a word"):
        Estimator(lambda: None, model_dir=tmp_path / "model").evaluate(None, name=name)
    assert not (tmp_path / "model").exists()


def test_what_a_kernel_writes_goes_there_too():
    assert own_folder(kernels.Dense()).parent == Path("results")
