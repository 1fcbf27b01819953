"""The journal of a sweep: what began and what ended, whatever stopped it in between."""

import json
import os
import subprocess
import sys

import pytest

from hotloop.errors import RunError
from hotloop.sweeps.journal import FILE, open_journal, read_about, read_records

ABOUT = {"space": {"a": {"values": [1, 2]}}, "seed": 3}


def begun(folder):
    with open_journal(folder, ABOUT, resume=False) as journal:
        journal.begin(1, {"a": 1})
        journal.end(1, {"trial": 1, "status": "finished", "objective": 0.5})
        journal.begin(2, {"a": 2})


def test_a_sweep_goes_on_where_it_stopped(tmp_path):
    begun(tmp_path)
    assert read_about(tmp_path) == ABOUT
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "end", "trial": 2, "ro')  # a kill tore it
    before = (tmp_path / FILE).read_bytes()
    with open_journal(tmp_path, ABOUT, resume=True) as journal:
        assert journal.begun == {1: {"a": 1}, 2: {"a": 2}}
        assert list(journal.rows) == [1] and journal.rows[1]["objective"] == 0.5
        journal.begin(1, {"a": 1})
        assert 1 in journal.begun
    after = (tmp_path / FILE).read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])  # nothing that was written changes
    with open_journal(tmp_path, ABOUT, resume=True) as journal:
        assert journal.rows == {}  # the first trial began again, and has not ended


def test_another_sweep_is_refused(tmp_path):
    begun(tmp_path)
    with pytest.raises(RunError, match=r"--resume: .* is another sweep: seed: 3 -> 4"):
        open_journal(tmp_path, {**ABOUT, "seed": 4}, resume=True).__enter__()
    with pytest.raises(RunError, match="holds a sweep: go on with it by --resume"):
        open_journal(tmp_path, ABOUT, resume=False).__enter__()
    with pytest.raises(RunError, match=r"--resume: .* holds no sweep"):
        open_journal(tmp_path / "none", ABOUT, resume=True).__enter__()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(RunError, match="is not empty"):
        open_journal(tmp_path / "other", ABOUT, resume=False).__enter__()


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        '{"event": "other"}',
        '{"event": "begin", "trial": 0, "values": {}}',
        '{"event": "begin", "trial": 1}',
        '{"event": "end", "trial": true, "row": {}}',
    ],
)
def test_a_line_that_others_wrote_is_named(tmp_path, line):
    begun(tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RunError, match="line 5 is not a record of a sweep"):
        read_records(tmp_path)


def test_a_journal_without_its_first_line_is_named(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"event": "begin", "trial": 1, "values": {}}) + "\n")
    with pytest.raises(RunError, match="its first line is not that of a sweep"):
        read_about(tmp_path)


HOLDER = """
import sys, pathlib
from hotloop.sweeps.journal import open_journal
with open_journal(pathlib.Path(sys.argv[1]), {}, resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_holds_a_sweep(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ,
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(RunError, match=f"is in use by process {holder.pid}"):
        open_journal(tmp_path, {}, resume=True).__enter__()
    holder.communicate(b"")
    with open_journal(tmp_path, {}, resume=True):
        pass
