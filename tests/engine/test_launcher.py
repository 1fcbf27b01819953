"""The launcher with processes that need no jax: what each is given, and what becomes of all when one is lost, stopped,
stuck or wrong. Nothing is left running, looked for by process group."""

import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from launch_fakes import make_launch, started

from hotloop.engine import launched_process, launcher
from hotloop.engine.interrupt import Stopped
from hotloop.engine.launched_process import OutputLog, read_last_lines
from hotloop.engine.launcher import FailedProcess, LostProcess, run_processes
from process_groups import LONGEST, find_processes, living_members, wait_until_gone

pytestmark = [
    pytest.mark.usefixtures("signals_heard"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc"),
]


@pytest.fixture
def groups(monkeypatch) -> list[int]:
    """The process groups that a launcher in this process starts."""
    started: list[int] = []
    add = launched_process.OrphanGuard.add

    def noticed(guard: launched_process.OrphanGuard, group: int) -> None:
        started.append(group)
        add(guard, group)

    monkeypatch.setattr(launched_process.OrphanGuard, "add", noticed)
    return started


def run(acts: str, count: int = 2, **settings: float) -> list[str]:
    """What the launcher says while it runs these."""
    said: list[str] = []
    run_processes(make_launch(acts, count, **settings), said.append)
    return said


def assert_none_left(groups: list[int], started: int) -> None:
    assert len(groups) == started
    assert [living_members(group) for group in groups] == [[]] * started


def test_each_process_is_told_who_it_is_and_reads_nothing(capfd, groups):
    run("0=environment:HOTLOOP_PROCESS,environment:HOTLOOP_PROCESSES,environment:HOTLOOP_HEARTBEAT,stdin", 3)
    assert capfd.readouterr().out.splitlines() == ["0", "3", "30", "''"]
    run("0=environment:HOTLOOP_COORDINATOR 1=say:silence")
    first = capfd.readouterr().out
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", first)
    run("0=environment:HOTLOOP_COORDINATOR")
    assert capfd.readouterr().out != first  # a free port for each
    assert_none_left(groups, 7)


def test_a_port_that_another_program_takes_meanwhile_is_given_up_for_another_once(capfd, groups, monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken, free = other.getsockname()[1], launcher.find_free_port()
        ports = iter([taken, free])
        monkeypatch.setattr(launcher, "find_free_port", lambda: next(ports))
        (said,) = run("0=note:starting,listen,say:met 1=note:starting,wait_for:0:starting")
        assert said.startswith(f"the port {taken} of process 0 was taken meanwhile; all start again")
        assert "met" in capfd.readouterr().out
        ports = iter([taken, taken])
        with pytest.raises(FailedProcess) as failed:
            run("0=note:starting,listen 1=sleep:60")
        ports = iter([taken])  # an error after they have met is none of the port's
        with pytest.raises(FailedProcess):
            run("0=note:loading,listen 1=sleep:60")
    assert failed.value.exit_status == 2
    assert_none_left(groups, 10)


def test_a_process_that_is_killed_is_named_with_its_last_lines_and_the_others_end(capfd, groups):
    began = time.monotonic()
    said: list[str] = []
    acts = "1=note:training:7,say:about,say:to-go,kill:9 all=worker,sleep:60"
    with pytest.raises(LostProcess) as caught:
        run_processes(make_launch(acts, 3, heartbeat=5), said.append)
    assert time.monotonic() - began < 5 + 15
    assert re.fullmatch(
        r"process 1 of 3 on \S+ was lost while training, at update 7: killed by SIGKILL", str(caught.value)
    )
    assert said == ["process 1 | about", "process 1 | to-go"]
    assert caught.value.exit_status == 134
    assert_none_left(groups, 3)


def test_process_0_may_be_the_one_that_is_killed(groups):
    with pytest.raises(
        LostProcess, match=r"process 0 of 2 on \S+ was lost before it had begun: killed by SIGSEGV"
    ):
        run("0=kill:11 1=deaf,sleep:60")
    assert_none_left(groups, 2)


def test_one_that_jax_aborted_has_lost_a_peer(groups):
    with pytest.raises(LostProcess, match=r"process 1 of 2 .* aborted, as jax does when a peer is gone"):
        run("1=kill:6 0=sleep:60")
    with pytest.raises(LostProcess, match="aborted"):
        run("1=exit:134 0=sleep:60")
    assert_none_left(groups, 4)


@pytest.mark.parametrize("aborted", [False, True])
def test_one_that_is_stopped_is_lost_after_the_heartbeat_or_when_jax_aborts_its_peer(groups, aborted):
    began = time.monotonic()
    acts = "1=kill:19 0=sleep:0.5,kill:6" if aborted else "1=kill:19 0=sleep:60"
    with pytest.raises(LostProcess, match=r"process 1 of 2 .*\(SIGSTOP\)"):
        run(acts, heartbeat=60 if aborted else 1)
    assert time.monotonic() - began < 10
    assert_none_left(groups, 2)


@pytest.mark.slow
def test_of_those_without_progress_the_one_that_was_stopped_is_named(groups):
    acts = "0=note:training:4,sleep:60 1=note:training:5,kill:19"
    with pytest.raises(LostProcess, match=r"process 1 of 2 .*\(SIGSTOP\), with no progress for 1.5 s"):
        run(acts, stall=1.5)
    assert_none_left(groups, 2)


def test_one_that_makes_no_progress_is_lost_the_slowest_of_them(groups):
    acts = "0=note:training:5,sleep:60 1=note:training:4,sleep:60"
    with pytest.raises(LostProcess, match=r"process 1 of 2 .* update 4: it made no progress for 1.2 s"):
        run(acts, stall=1.2)
    assert_none_left(groups, 2)


def test_progress_and_compiling_are_no_stall(groups):
    run("0=keep_noting:training:1.9 1=note:compiling,sleep:1.8,note:training", stall=1.2)
    assert_none_left(groups, 2)


def test_all_start_again_with_the_words_that_resume(capfd, groups):
    said: list[str] = []
    acts = "0=note:training:3:--resume,say:begun,first:sleep:60,say:ended 1=wait_for:0:training,first:kill"
    run_processes(make_launch(acts, 2, max_restarts=1), said.append)
    assert capfd.readouterr().out.splitlines() == ["begun", "begun", "ended"]
    assert len(said) == 1
    assert "killed by SIGKILL; all start again (restart 1 of 1)" in said[0]
    assert_none_left(groups, 4)


def test_without_a_run_they_start_over_and_only_so_often(capfd, groups):
    with pytest.raises(LostProcess):
        run("0=say:begun,sleep:60 1=sleep:0.3,kill", max_restarts=2)
    assert capfd.readouterr().out.splitlines() == ["begun"] * 3
    assert_none_left(groups, 6)


def test_an_error_of_one_process_alone_is_its_line_and_status(groups, monkeypatch):
    monkeypatch.setattr("hotloop.engine.launcher.ECHO", 0.3)
    with pytest.raises(FailedProcess) as caught:
        run("1=say:before,error:a:broken:image,exit:2 0=worker,sleep:60")
    assert (caught.value.number, caught.value.exit_status) == (1, 2)
    assert re.fullmatch(r"process 1 of 2 on \S+: a broken image", str(caught.value))
    assert_none_left(groups, 2)


def test_an_error_that_process_0_tells_of_itself_is_not_told_again(groups):
    with pytest.raises(FailedProcess) as caught:
        run("1=note:loading,exit:2 0=wait_for:1:loading,sleep:0.5,exit:2")
    assert (caught.value.number, caught.value.exit_status) == (0, 2)
    with pytest.raises(FailedProcess) as caught:
        run("1=note:loading,exit:2 0=wait_for:1:loading,sleep:0.5,exit:1")
    assert (caught.value.number, caught.value.exit_status) == (1, 2)
    assert_none_left(groups, 4)


def test_one_that_was_stopped_by_a_signal_takes_the_others_with_it(capfd, groups, monkeypatch):
    monkeypatch.setattr("hotloop.engine.launcher.STOP_GRACE", 0.5)
    with pytest.raises(Stopped, match="process 1 was stopped by SIGTERM") as caught:
        run("0=told:0:0.7,note:training,sleep:60 1=wait_for:0:training,exit:143")
    assert caught.value.exit_status == 130
    assert capfd.readouterr().out == "saved SIGTERM\n"
    assert_none_left(groups, 2)


def test_all_may_end_at_their_own_times(groups):
    run("0=sleep:0.5 1=exit:0 2=sleep:0.2", 3)
    assert_none_left(groups, 3)


def test_what_a_process_prints_is_kept_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(launched_process, "LONGEST_LOG", 1000)
    log = OutputLog(tmp_path / "1.out")
    for number in range(2000):
        log.write(f"line {number}\n".encode())
        assert log.path.stat().st_size <= 2000
    log.write(b"\x1b[31mred\x1b[0m\rlast\n\n")
    assert read_last_lines([log.path, tmp_path / "none"], 3) == ["line 1999", "[31mred[0m", "last"]
    log.close()


def test_a_flood_does_not_hold_a_process_up(groups):
    run("1=flood:200000 0=sleep:0.1")
    assert_none_left(groups, 2)


def read_ready(process: "subprocess.Popen[str]", count: int = 2) -> list[int]:
    """The groups of the launcher's processes, once process 0 has said `ready`."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return find_processes(process.pid, count)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_is_passed_to_all_and_waited_for(number):
    acts = "0=told:0:0.5,wait_for:1:training,say:ready,sleep:60 1=told:0,note:training,sleep:60"
    with started(acts) as process:
        groups = read_ready(process)
        process.send_signal(number)
        out, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == 130
    assert out == f"saved {number.name}\n"
    assert errors.startswith("error: stopped by ")
    assert errors.endswith("; all 2 processes have ended\n")
    assert wait_until_gone(groups) == [[], []]


def test_a_sigterm_that_comes_again_is_the_same_stop_and_ctrl_c_ends_all_at_once():
    with started(
        "all=deaf,worker,note:training,say:ready,sleep:60 0=deaf,wait_for:1:training,say:ready,sleep:60"
    ) as process:
        groups = read_ready(process)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
        process.send_signal(signal.SIGINT)
        process.wait(LONGEST)
    assert process.returncode == 130
    assert wait_until_gone(groups) == [[], []]


def test_nothing_is_left_of_a_launcher_that_was_killed(tmp_path):
    with started(
        "all=deaf,worker,note:training,sleep:60 0=deaf,worker,wait_for:1:training,say:ready,sleep:60",
        env={"TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("worker ")
        groups = read_ready(process)
        assert min(len(living_members(group)) for group in groups) == 2
        assert list(tmp_path.glob("hotloop-launch-*"))
        process.kill()
        process.wait()
        assert wait_until_gone(groups) == [[], []]
        limit = time.monotonic() + LONGEST
        while list(tmp_path.iterdir()) and time.monotonic() < limit:
            time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("acts", "status", "said"), [
    ("0=told:0:0.2,{ready} 1=told:9,{waiting}", 9, r"error: process 1 of 2 on \S+: saved SIGTERM\n"),
    ("0=told:2,{ready} 1=told:0:0.2,{waiting}", 2, ""),  # process 0 says so itself
    ("0=told:-9,{ready} 1=told:0,{waiting}", 134, r"error: process 0 of 2 .* while saving.*: killed by SIGKILL\n"),
    ("0=told:0,{ready} 1=told:-9,{waiting}", 130, r"process 1 of 2 on \S+: killed by SIGKILL\nerror: stopped by"),
], ids=["a worker fails", "the save fails", "process 0 is killed", "a worker is killed"])  # fmt: skip
def test_a_stop_in_which_one_fails_or_is_killed_ends_as_that_one(acts, status, said):
    ready, waiting = "wait_for:1:training,say:ready,sleep:60", "note:training,sleep:60"
    with started(acts.format(ready=ready, waiting=waiting)) as process:
        groups = read_ready(process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == status
    assert re.search(said, errors) if said else errors == ""
    assert wait_until_gone(groups) == [[], []]
