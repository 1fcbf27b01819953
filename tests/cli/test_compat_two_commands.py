"""`hotloop compat run_and_time.py`: two commands one after the other, and the status of the first counts."""

import json
import os
import subprocess
import sys

import pytest

from hotloop.bench.compat import Translation
from hotloop.cli.main import main


@pytest.fixture
def two_commands(monkeypatch):
    """The old command stands for `hotloop data FIRST`, then `hotloop --version`-like work that leaves a trace."""

    def use(first):
        found = Translation(["hotloop", "plan", "--json"], [], {}, {}, [["hotloop", *first]])
        monkeypatch.setattr("hotloop.bench.compat.translate", lambda words: found)

    return use


def test_the_second_command_runs_when_the_first_has_ended_well(two_commands, capfd):
    two_commands(["plan", "--num-epochs", "2"])
    with pytest.raises(SystemExit) as end:
        main(["compat", "old.py"])
    assert end.value.code == 0
    said = capfd.readouterr()
    assert json.loads(said.out.splitlines()[-1])["epochs"] == 1.0
    assert "epochs: 2" in said.err  # the first, whose words must not stand where the object is expected


def test_a_first_command_that_fails_ends_it_with_its_status(two_commands, capfd):
    two_commands(["plan", "--num-epochs", "none"])
    with pytest.raises(SystemExit) as end:
        main(["compat", "old.py"])
    assert end.value.code == 2
    said = capfd.readouterr()
    assert "--num-epochs none: must be" in said.err and said.out == ""


APP = "--model toy_model --dataset mnist --synthetic-data host --micro-batch-size 16 --weight-updates-per-epoch 2"


@pytest.mark.slow
def test_a_timed_training_runs_after_one_that_compiles(tmp_path):
    words = ["run_and_time.py", "--num-replicas", "1", "--ipus-per-replica", "1", "--num-instances", "1"]
    words += ["--hosts", "localhost", "--partition", "p", "--vipu-host", "h"]
    words += [f"--app-args={APP} --precision 32.32 --num-epochs 2 --run-name timed"]
    command = [sys.executable, "-m", "hotloop", "compat", "--device", "cpu", *words]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "time to train:" in result.stdout
    runs = {path.name for path in (tmp_path / "results").iterdir()}
    assert runs == {"timed", "timed-compiling"}
