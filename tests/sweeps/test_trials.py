"""Trials as processes: none is left behind, each has its device, and the bar says how they stand."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hotloop.engine.progress import Progress
from hotloop.sweeps import engines
from hotloop.sweeps import trial as trials
from hotloop.sweeps.children import ChildProcesses
from hotloop.sweeps.trial import TAIL_BYTES, Trial, run_trial

pytestmark = pytest.mark.usefixtures("signals_heard")


def python(code):
    return (sys.executable, "-S", "-c", code)


def test_a_talkative_child_neither_blocks_nor_fills_the_memory():
    code = "import sys\nfor _ in range(300): sys.stderr.write('x' * 9999 + '\\n')\nprint('{\"a\": 1}')"
    found = run_trial(Trial(1, {}, Path("nowhere"), python(code)), 0, os.environ, ChildProcesses())
    assert (found.exit_status, found.answer) == (0, {"a": 1})
    assert len(found.said) == TAIL_BYTES and found.said.endswith("x\n")


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


def until(condition, seconds=20.0):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    assert condition()


STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)"])
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(f"{os.getpid()} {other.pid}")
part.rename(sys.argv[1])
time.sleep(99)
"""


def pids(path):
    until(path.exists)
    return [int(word) for word in path.read_text().split()]


def test_a_child_that_does_not_stop_is_killed_with_its_children(tmp_path):
    children = ChildProcesses()
    child = children.start([*python(STUBBORN), str(tmp_path / "pids")], os.environ)
    started = pids(tmp_path / "pids")
    assert all(map(alive, started))
    children.stop(grace=0.2)
    until(lambda: not any(map(alive, started)))
    assert child.wait() == -signal.SIGKILL
    with pytest.raises(KeyboardInterrupt):
        children.start(python(""), os.environ)


DRIVER = """
import os, sys
from pathlib import Path
from hotloop.sweeps import engines
from hotloop.sweeps.trial import Trial
code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()) + ' '); time.sleep(99)"
planned = [
    Trial(n, {}, Path("nowhere"), (sys.executable, "-S", "-c", code, f"{sys.argv[1]}/{n}")) for n in range(3)
]
engines.run_trials(planned, [os.environ] * 2, print)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_sweep_leaves_no_child(tmp_path, number):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stderr=subprocess.PIPE, process_group=0, text=True
    )
    until(lambda: sum(path.read_text().endswith(" ") for path in tmp_path.iterdir()) == 2)
    started = [pid for name in "01" for pid in pids(tmp_path / name)]
    assert all(map(alive, started))
    driver.send_signal(number)
    assert "Stopped: stopped by" in driver.communicate(timeout=20)[1]
    until(lambda: not any(map(alive, started)))
    assert not (tmp_path / "2").exists()  # the one that waited never began


def test_a_sweep_that_is_killed_takes_its_children_along(tmp_path):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], process_group=0)
    until(lambda: sum(path.read_text().endswith(" ") for path in tmp_path.iterdir()) == 2)
    started = [pid for name in "01" for pid in pids(tmp_path / name)]
    assert all(map(alive, started))
    driver.kill()
    driver.wait()
    until(lambda: not any(map(alive, started)))


def test_each_trial_sees_one_gpu_and_shares_its_memory_where_it_must():
    two = engines.DevicesFound("gpu", 2)
    assert engines.trial_environments(two, 2, {}) == [
        {engines.VISIBLE: "0"},
        {engines.VISIBLE: "1"},
    ]
    chosen = engines.trial_environments(two, 3, {engines.VISIBLE: "4,GPU-7", "A": "b"})
    assert [each[engines.VISIBLE] for each in chosen] == ["4", "GPU-7", "4"]
    assert {each[engines.MEMORY] for each in chosen} == {"0.450"} and chosen[0]["A"] == "b"
    assert engines.trial_environments(two, 4, {engines.MEMORY: "0.1"})[0][engines.MEMORY] == "0.1"
    assert engines.trial_environments(engines.DevicesFound("cpu", 1), 2, {"A": "b"}) == [{"A": "b"}] * 2


def standing(folder, *records):
    folder.mkdir()
    lines = [json.dumps({"update": 0, "epoch": 0.0, "time": time.time(), **record}) for record in records]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return Trial(int(folder.name), {}, folder, ())


def test_the_bar_of_a_sweep_says_how_each_trial_stands(tmp_path):
    start, compiled = {"event": "start", "time": time.time() - 3600}, {"event": "compile"}
    log = {"event": "log", "update": 14, "epoch": 0.95}
    standings = [
        standing(tmp_path / "1", start, compiled, log, {"event": "end"}),
        standing(tmp_path / "2", start, compiled, log),
        standing(tmp_path / "3", start, {"event": "warning"}),
        standing(tmp_path / "4", {"event": "log", "epoch": None}, compiled),
        standing(tmp_path / "5"),
        Trial(6, {}, tmp_path / "6", ()),
    ]
    said = trials.describe_progress(standings)
    assert said.startswith("sweep: trial 2 at epoch 0.95, trial 3 compiling 36") and said.endswith(" s")
    assert trials.describe_progress(standings[3:]) == "sweep"


def test_a_sweep_looks_at_its_trials_until_they_are_over(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "WATCH_SECONDS", 0.001)
    trial = standing(tmp_path / "1", {"event": "compile"}, {"event": "log", "epoch": 0.5})
    heard, looked = [], threading.Event()

    class Bar(Progress):
        def update(self, description):
            heard.append(description)
            looked.set()

    with trials.watch_trials([trial], Bar()):
        assert looked.wait(60)
    count = len(heard)
    assert set(heard) == {"sweep: trial 1 at epoch 0.50"}
    time.sleep(0.02)
    assert len(heard) == count


def test_the_next_trial_is_asked_for_when_a_place_is_free(tmp_path):
    heard = []

    def planned():
        for number in (1, 2, 3):
            yield Trial(number, {"after": list(heard)}, Path("nowhere"), python("print('{}')"))

    outcomes = engines.run_trials(
        planned(), [dict(os.environ)], lambda outcome: heard.append(outcome.trial.number)
    )
    assert [outcome.trial.values["after"] for outcome in outcomes] == [[], [1], [1, 2]]
    assert [outcome.status for outcome in outcomes] == ["finished"] * 3
