"""The job files start hotloop commands of which every option exists and which resolve, and nothing else of ours."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from hotloop.cli.main import find_command
from hotloop.cli.parser import resolve, scan
from hotloop.errors import OptionError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def words_of(name: str) -> list[str]:
    """The one hotloop command of a job file."""
    text = (EXAMPLES / name).read_text()
    if name.endswith(".yml"):
        job = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        return container["command"]
    (line,) = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    words = shlex.split(line)
    return words[words.index("hotloop") :]


def resolved(words: list[str]):
    command, path, rest = find_command(words[1:])
    return path, resolve(command, scan(rest, command.options)).config


@pytest.mark.parametrize("name", ["slurm.sh", "open_mpi.sh", "kubernetes.yml"])
def test_a_job_file_is_a_command_that_resolves(name):
    words = words_of(name)
    path, config = resolved(words)
    assert path == "hotloop cnn train"
    assert config.num_replicas * config.devices_per_replica > 1
    with pytest.raises(OptionError, match="--no-such"):
        resolved([*words, "--no-such=1"])


@pytest.mark.parametrize("name", ["slurm.sh", "open_mpi.sh", "kubernetes.yml"])
def test_what_the_comments_name_of_ours_exists(name):
    comments = " ".join(line for line in (EXAMPLES / name).read_text().splitlines() if line.startswith("# "))
    command, _, _ = find_command(["cnn", "train"])
    known = {option.spelling for option in command.options}
    theirs = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--gpus-per-task"}
    named = set(re.findall(r"--[a-z][a-z-]*", comments)) - theirs
    assert named
    assert named <= known


def devices_of(name: str) -> int:
    config = resolved(words_of(name))[1]
    return config.num_replicas * config.devices_per_replica


def test_there_is_a_process_for_each_device():
    slurm = (EXAMPLES / "slurm.sh").read_text()
    nodes, tasks = (int(re.search(rf"--{name}=(\d+)", slurm)[1]) for name in ("nodes", "ntasks-per-node"))
    assert devices_of("slurm.sh") == nodes * tasks
    ranks = re.search(r"^mpirun -np (\d+)", (EXAMPLES / "open_mpi.sh").read_text(), re.MULTILINE)
    assert devices_of("open_mpi.sh") == int(ranks[1])
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes.yml").read_text())
    job = next(each for each in documents if each["kind"] == "Job")["spec"]
    assert devices_of("kubernetes.yml") == job["completions"] == job["parallelism"]
