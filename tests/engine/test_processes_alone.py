"""One process: everything about several costs nothing and says so; notes are kept all the same."""

import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.engine import process_log, processes
from hotloop.engine.device import REPLICA, device_mesh
from hotloop.engine.progress import show


def test_one_process_agrees_with_itself():
    thing = object()
    assert (processes.count(), processes.index(), processes.is_writer()) == (1, 0, True)
    assert processes.agreed(thing) is thing and processes.gathered(thing) == [thing]
    processes.start()
    processes.barrier("anything")
    processes.request_stop(15)
    processes.end(2, "nobody hears it")
    assert processes.stop_requested() is None and not processes.spans_processes(jax.numpy.ones(3))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_placing_and_fetching_are_jaxs_own():
    sharding = NamedSharding(device_mesh(4), PartitionSpec(REPLICA))
    tree = {"a": np.arange(8.0, dtype=np.float32), "key": jax.random.split(jax.random.key(3), 4)}
    placed, own = processes.place(tree, sharding), jax.device_put(tree, sharding)
    assert placed["a"].sharding == own["a"].sharding and placed["key"].dtype == own["key"].dtype
    assert processes.own_rows(sharding, 8) == slice(None)
    fetched = processes.fetch(placed["a"])
    np.testing.assert_array_equal(fetched, tree["a"])
    fetched[0] = 7  # ours, not a view of the device's
    assert placed["a"][0] == 0


def test_importing_it_imports_no_jax_and_no_numpy():
    code = "import sys, hotloop.engine.processes; print({'jax', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_notes_say_how_far_a_process_is_a_few_times_a_second(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_NOTES", str(tmp_path))
    monkeypatch.setenv("HOTLOOP_PROCESS", "3")
    monkeypatch.setattr(
        processes, "_noted", {"phase": None, "update": 0, "run": None, "resume": [], "time": 0.0}
    )
    file = tmp_path / "3.json"
    processes.note("loading", run=tmp_path / "run", resume=("--resume", "--run-name", "x"))
    assert json.loads(file.read_text())["phase"] == "loading"
    processes.note("training", 5)
    first = json.loads(file.read_text())
    assert first["update"] == 5 and first["run"] == str(tmp_path / "run")
    assert first["resume"] == ["--resume", "--run-name", "x"] and abs(first["time"] - time.time()) < 60
    processes.note("training", 6)  # too soon
    assert json.loads(file.read_text()) == first
    monkeypatch.setattr(processes, "NOTE_SECONDS", 0.0)
    processes.note("training", 7)
    last = json.loads(file.read_text())
    assert last["update"] == 7 and [*tmp_path.iterdir()] == [file]
    with show("reading", 3) as bar:  # progress of any kind is heard by the launcher's watch
        bar.advance()
    assert json.loads(file.read_text())["time"] > last["time"]


def test_without_a_launcher_there_are_no_notes(tmp_path, monkeypatch):
    monkeypatch.delenv("HOTLOOP_NOTES", raising=False)
    monkeypatch.chdir(tmp_path)
    processes.note("training", 1)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("noted", [True, False])
def test_the_lines_of_a_process_move_to_its_run(noted, tmp_path):
    code = (
        "import os, pathlib\n"
        "from hotloop.engine import process_log\n"
        "process_log.divert(2)\n"
        "print('from Python')\n"
        "os.write(2, b'from below\\n')\n"
        f"process_log.move_to(pathlib.Path({str(tmp_path / 'run')!r}), 2)\n"
        "print('and later')\n"
    )
    environment = {**os.environ, **({"HOTLOOP_NOTES": str(tmp_path)} if noted else {})}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "run" / process_log.FOLDER / "2.log").read_text().split("\n")[:-1] == [
        "from Python",
        "from below",
        "and later",
    ]
    assert (tmp_path / "2.log").exists() == noted
