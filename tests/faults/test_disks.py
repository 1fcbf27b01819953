"""Full and read-only disks, and limits of file sizes: one line, no hang, nothing half written, and a run that resumes.

A disk is a tmpfs where this machine lets us mount one; else a folder without permissions, and a limit of the size of
files, stand in for it.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from short_runs import FAMILIES, IMAGES, resumed, words, write_digits

from hotloop.cli.main import main
from hotloop.data import dataset
from hotloop.engine.run import read_events

ROOM = {
    "vcd": 400,  # KiB: the first checkpoint fits, and one that follows does not
    "recommender": 4000,
    "cnn": 120,
    "estimator": 8000,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("data") / "mnist")


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setitem(dataset.IMAGE_SETS, "cifar10", IMAGES)


def mount(*words):
    return subprocess.run(["mount", *map(str, words)], capture_output=True, check=False).returncode == 0


@contextmanager
def disk(folder, kib):
    """A disk of so many KiB; the test is skipped where none can be mounted."""
    folder.mkdir()
    if not (sys.platform == "linux" and mount("-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder)):
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run(line, capsys):
    """Exit status, and the one line of an error, if there is one."""
    status = main(line)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    errors = [text for text in err.splitlines() if "error:" in text]
    assert len(errors) == (status != 0), err
    return status, "".join(errors)


def parts(folder):
    """What a process left that it did not finish."""
    return [path for path in folder.rglob(".*") if path.name != ".lock"]


def statuses(folder):
    return [record["status"] for record in read_events(folder) if record["event"] == "end"]


def finish(family, line, folder, capsys):
    """Go on, or begin where there was nothing to go on with: the run ends as it should have."""
    begun = (folder / "events.jsonl").exists() and any(read_events(folder))
    status, error = run(resumed(family, line) if begun else line, capsys)
    assert (status, error) == (0, "")
    assert statuses(folder)[-1] == "finished"


@pytest.mark.parametrize("family", ["recommender", "cnn"])
def test_a_disk_without_any_room_is_one_line_and_nothing_is_left_of_it(family, digits, tmp_path, capsys):
    with disk(tmp_path / "disk", 8) as full:
        (full / "ballast").write_bytes(b"x" * 8192)
        status, error = run(words(family, digits, full / "results"), capsys)
        assert status == 2 and "No space left on device" in error
        assert not parts(full)


@pytest.mark.parametrize("family", ["recommender", "cnn"])
def test_a_disk_that_can_only_be_read_is_one_line(family, digits, tmp_path, capsys):
    with read_only(tmp_path / "disk") as folder:
        status, error = run(words(family, digits, folder / "results"), capsys)
    assert status == 2 and str(folder / "results") in error
    assert ("Permission denied" if os.geteuid() else "Read-only file system") in error


@contextmanager
def read_only(folder):
    if os.geteuid():
        folder.mkdir(mode=0o555)
        yield folder
        return
    with disk(folder, 64) as made:  # to root a folder without permissions is nothing
        assert mount("-o", "remount,ro", made)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_whose_disk_fills_up_says_so_and_finishes_once_there_is_room(family, digits, tmp_path, capsys):
    with disk(tmp_path / "disk", ROOM[family]) as full:
        line = words(family, digits, full)
        status, error = run(line, capsys)
        assert status == 2 and "No space left on device" in error
        assert not parts(full)
        assert mount("-o", "remount,size=64m", full)
        finish(family, line, full / "run", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_on_a_disk_too_small_for_its_beginning_starts_once_there_is_room(
    family, digits, tmp_path, capsys
):
    with disk(tmp_path / "disk", 8) as full:  # two pages: the folder, and one file
        line = words(family, digits, full)
        status, error = run(line, capsys)
        assert status == 2 and "No space left on device" in error
        assert not parts(full)
        assert mount("-o", "remount,size=64m", full)
        finish(family, line, full / "run", capsys)


@pytest.mark.slow
def test_a_report_on_a_full_disk_is_one_line_and_the_run_resumes_without_it(digits, tmp_path, capsys):
    with disk(tmp_path / "disk", 16) as full:
        line = words("vcd", digits, tmp_path)
        status, error = run([*line, "--report", str(full / "report")], capsys)
        assert status == 2 and "No space left on device" in error
        assert statuses(tmp_path / "run") == ["failed"]
        finish("vcd", line, tmp_path / "run", capsys)


@pytest.mark.slow
def test_an_export_to_a_full_disk_is_one_line_and_nothing_is_left_of_it(tmp_path, capsys):
    with disk(tmp_path / "disk", 64) as full:
        line = ["export", "--model-name", "cifar_resnet8", "--dataset", "cifar10", "-o", str(full / "models")]
        status, error = run(line, capsys)
        assert status == 2 and "No space left on device" in error
        assert list(full.iterdir()) == []


CHILD = """
import resource, sys
limit = int(sys.argv.pop(1))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from hotloop.data import dataset as cifar_data
cifar_data.IMAGE_SETS["cifar10"] = (64, 32)
from hotloop.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def in_a_process(line, limit=0, **environment):
    """Exit status and all text of a command in a process of its own, which must end by itself."""
    found = subprocess.run(
        [sys.executable, "-c", CHILD, str(limit), *line],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )
    assert "Traceback" not in found.stdout + found.stderr, found.stderr
    return found.returncode, found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "what"), [(200, "cannot write in"), (30_000, "cannot write step ")])
def test_a_limit_of_file_sizes_is_named_as_one(limit, what, digits, tmp_path, capsys):
    line = words("vcd", digits, tmp_path)
    status, said = in_a_process(line, limit, HOTLOOP_CACHE=str(tmp_path / "cache"))
    assert status == 2
    (error,) = [text for text in said.splitlines() if text.startswith("hotloop: error:")]
    assert what in error and "File too large" in error and "No space" not in error
    assert not parts(tmp_path / "run")
    finish("vcd", line, tmp_path / "run", capsys)


@pytest.mark.slow
def test_a_full_disk_under_tensorboard_costs_its_curves_and_nothing_else(digits, tmp_path):
    pytest.importorskip("tensorboardX")
    with disk(tmp_path / "disk", 4) as full:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "tensorboard").symlink_to(full)
        (full / "ballast").write_bytes(b"x" * 4096)
        status, said = in_a_process(words("estimator", digits, tmp_path))
    assert status == 0, said
    records = list(read_events(tmp_path / "run"))
    warnings = [record["message"] for record in records if record["event"] == "warning"]
    assert len(warnings) == 1 and "TensorBoardSink failed and is off" in warnings[0]
    assert "No space left on device" in warnings[0] and said.count("TensorBoardSink failed") == 1
    assert [record["update"] for record in records if record["event"] == "summary"] == [1, 2, 3, 4, 5, 6]
    assert statuses(tmp_path / "run") == ["finished"]


@pytest.mark.slow
def test_a_full_disk_under_the_cache_costs_time_alone(digits, tmp_path):
    with disk(tmp_path / "disk", 8) as full:
        (full / "ballast").write_bytes(b"x" * 8192)
        status, said = in_a_process(words("vcd", digits, tmp_path), HOTLOOP_CACHE=str(full / "cache"))
    assert status == 0, said
    assert statuses(Path(tmp_path / "run")) == ["finished"]
