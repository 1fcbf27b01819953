"""benchmarks/command_line.py: a record says how it was made, without anybody's paths."""

import json
import shlex
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def command_line(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS.parent))
    import command_line

    return command_line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chains", "4096", "--skip", "nuts"], "--chains 4096 --skip nuts"),
        (["--json", "found.json", "--rounds", "5"], "--rounds 5"),
        (["--rounds", "5", "--save", "/home/me/found.json"], "--rounds 5"),
        (["--json=/home/me/found.json", "--rounds=5"], "--rounds=5"),
        (["--data", "/home/me/data", "--limit", "1100"], "--data DATA --limit 1100"),
        (["--data=/home/me/data"], "--data=DATA"),
        (["--sources", "../a", "b/c", "--rounds", "3"], "--sources SOURCES SOURCES --rounds 3"),
        (["--dataset-path", "~/d/e"], "--dataset-path DATASET_PATH"),
        (["/home/me/checkout", "--epochs", "1/25"], "DATA --epochs 1/25"),
        (["--cases", "B1 ", "lstm-multi"], "--cases 'B1 ' lstm-multi"),
        (["--no-compile"], "--no-compile"),
    ],
)  # fmt: skip
def test_a_command_is_kept_as_typed_but_for_its_own_file_and_paths(command_line, words, said):
    found = command_line.describe_command([str(PEERS / "hmc.py"), *words])
    assert found == f"python benchmarks/peers/hmc.py {said}"
    assert "/home" not in found and shlex.split(found)[:1] == ["python"]


def test_a_folder_is_a_path_without_a_slash_too(command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photographs").mkdir()
    words = [str(PEERS / "cnn.py"), "--data", "photographs", "--cases", "resnet8-b8"]
    assert command_line.describe_command(words).endswith("cnn.py --data DATA --cases resnet8-b8")


def test_a_program_outside_of_this_checkout_is_told_without_its_folder(command_line, tmp_path):
    assert (
        command_line.describe_command([str(tmp_path / "mine.py"), "--rounds", "1"])
        == "python mine.py --rounds 1"
    )


def test_what_is_saved_says_how_it_was_made(command_line, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    import common

    file = tmp_path / "found.json"
    words = ["--shape", "full", "--size", "512", "--batch-size", "8", "--json", str(file)]
    monkeypatch.setattr("sys.argv", [str(PEERS / "recommender.py"), *words])
    common.save(file, {}, [])
    assert json.loads(file.read_text())["command"] == (
        "python benchmarks/peers/recommender.py --shape full --size 512 --batch-size 8"
    )
    assert str(tmp_path) not in file.read_text()


def test_every_benchmark_that_writes_a_record_of_its_own_says_the_command():
    programs = [*PEERS.glob("*.py"), *PEERS.parent.glob("*.py")]
    writing = [each for each in programs if "options.json.write_text(" in each.read_text()]
    assert {each.name for each in writing} >= {
        "before_after.py",
        "bulk_lists.py",
        "first_update.py",
        "kernel_times.py",
    }
    for program in writing:
        assert "describe_command()" in program.read_text(), program.name
