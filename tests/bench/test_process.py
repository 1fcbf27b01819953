"""One program: its streams, its end, and that nothing of it stays behind."""

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from fake_programs import is_running, wait_until

from hotloop.bench import process
from hotloop.bench.process import MARK, run_program
from hotloop.engine.interrupt import Stopped, raise_stops

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")


def start(folder, code, timeout=10.0, keep=1 << 30, marked=True, **more):
    argv = [sys.executable, "-S", "-c", code]
    env = {**os.environ, "PYTHONUNBUFFERED": "", **({MARK: str(folder)} if marked else {})}
    return run_program(argv, folder, env, timeout, folder / "out", folder / "err", keep, grace=0.3, **more)


def test_the_two_streams_and_the_status_are_kept_apart(tmp_path):
    outcome = start(tmp_path, "import sys; print('o'); print('e', file=sys.stderr); sys.exit(3)")
    assert (outcome.exitcode, outcome.timed_out, outcome.reason) == (3, False, "")
    assert (tmp_path / "out").read_text() == "o\n"
    assert (tmp_path / "err").read_text() == "e\n"
    assert outcome.end - outcome.start == pytest.approx(outcome.seconds, abs=1e-3)


def test_a_program_that_reads_its_input_finds_nothing_there(tmp_path):
    assert start(tmp_path, "import sys; print(repr(sys.stdin.read()))").exitcode == 0
    assert (tmp_path / "out").read_text() == "''\n"


def test_the_runner_stays_in_its_folder_while_the_program_runs_in_another(tmp_path):
    here = str(Path.cwd())
    start(
        tmp_path,
        "import os; print(os.getcwd())",
        started=lambda pid: (tmp_path / "here").write_text(str(Path.cwd())),
    )
    assert (tmp_path / "out").read_text().strip() == str(tmp_path)
    assert (tmp_path / "here").read_text() == here


def test_what_cannot_be_started_says_why(tmp_path):
    files = (tmp_path / "out", tmp_path / "err")
    missing = run_program(["no-such-program"], tmp_path, os.environ, 1, *files)
    assert (missing.exitcode, missing.reason) == (127, "there is no program 'no-such-program'")
    (tmp_path / "text").write_text("")
    refused = run_program([str(tmp_path / "text")], tmp_path, os.environ, 1, *files)
    assert refused.exitcode == 126
    assert "cannot be started: Permission denied" in refused.reason
    nowhere = run_program(["true"], tmp_path / "gone", os.environ, 1, *files)
    assert "there is no folder" in nowhere.reason


def test_a_program_that_hangs_is_ended_at_its_timeout_and_what_it_said_is_kept(tmp_path):
    begin = time.monotonic()
    outcome = start(tmp_path, "import time; print('before', flush=True); time.sleep(60)", timeout=0.5)
    assert outcome.timed_out
    assert 0.5 <= outcome.seconds < time.monotonic() - begin < 3
    assert (tmp_path / "out").read_text() == "before\n"


def test_a_program_may_put_things_in_order_when_asked_to_end(tmp_path):
    outcome = start(
        tmp_path,
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        "print('ready', flush=True); time.sleep(60)",
        timeout=1.0,
    )
    assert outcome.timed_out
    assert (tmp_path / "out").read_text() == "ready\nsaved\n"


DEAF_FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session={apart})
print(os.getpid(), child.pid, flush=True)
{then}
"""


def pids(folder):
    return [int(word) for word in (folder / "out").read_text().split()]


@pytest.mark.parametrize("apart", [False, True])
def test_a_timeout_ends_grandchildren_too_even_deaf_ones_and_those_that_left_the_session(tmp_path, apart):
    family = DEAF_FAMILY.format(apart=apart, then="time.sleep(60)")
    outcome = start(tmp_path, family, timeout=0.7, marked=apart)  # a group needs no mark to be found
    assert outcome.timed_out
    assert outcome.exitcode == -9
    assert len(pids(tmp_path)) == 2
    wait_until(lambda: not any(map(is_running, pids(tmp_path))))


@pytest.mark.parametrize("apart", [False, True])
def test_a_child_left_behind_with_the_output_open_neither_blocks_the_runner_nor_survives(
    tmp_path, monkeypatch, apart
):
    monkeypatch.setattr(process, "LINGER", 0.2)
    outcome = start(tmp_path, DEAF_FAMILY.format(apart=apart, then=""), marked=apart)
    assert (outcome.exitcode, outcome.timed_out) == (0, False)
    assert outcome.seconds < 5
    wait_until(lambda: not any(map(is_running, pids(tmp_path))))


def test_ctrl_c_ends_the_whole_group_before_it_goes_on(tmp_path):
    def interrupt(seconds):
        if (tmp_path / "out").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, DEAF_FAMILY.format(apart=True, then="time.sleep(60)"), tick=interrupt, period=0.05)
    wait_until(lambda: not any(map(is_running, pids(tmp_path))))


PRINT_MUCH = "for number in range({count}): print(number, 'x' * 90)"


def test_ctrl_c_while_the_program_is_being_started_ends_it_too(tmp_path, monkeypatch, signals_heard):
    class InterruptedPopen(subprocess.Popen):
        def _execute_child(self, *args, **options):
            super()._execute_child(*args, **options)
            pids.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)  # before anybody knows of the program

    pids = []
    monkeypatch.setattr(process.subprocess, "Popen", InterruptedPopen)
    with pytest.raises(Stopped), raise_stops():
        start(tmp_path, "import time; time.sleep(60)")
    assert not is_running(*pids)


def test_five_megabytes_of_output_take_no_memory_and_the_bound_keeps_head_and_tail(tmp_path):
    tracemalloc.start()
    try:
        outcome = start(tmp_path, PRINT_MUCH.format(count=50_000), keep=100_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    text = (tmp_path / "out").read_text()
    assert len(text) < 100_100
    assert outcome.left_out > 4_000_000
    assert text.startswith("0 x")
    assert text.endswith("\n49999 " + "x" * 90 + "\n")
    assert f"\n[hotloop: {outcome.left_out} bytes left out here]\n" in text
    assert not (tmp_path / "out.tail").exists()


@pytest.mark.slow
def test_a_gigabyte_of_output_is_kept_within_its_bound_in_little_memory(tmp_path):
    tracemalloc.start()
    try:
        outcome = start(tmp_path, PRINT_MUCH.format(count=11_000_000), timeout=300, keep=1 << 26)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcome.exitcode == 0
    assert peak < 4_000_000
    assert (tmp_path / "out").stat().st_size < (1 << 26) + 100
    assert outcome.left_out + (tmp_path / "out").stat().st_size > 1_000_000_000


def test_starting_and_watching_a_program_costs_a_few_milliseconds(tmp_path):
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        run_program(["true"], tmp_path, os.environ, 10, tmp_path / "out", tmp_path / "err")
        times.append(time.perf_counter() - begin)
    assert sorted(times)[10] < 0.05
