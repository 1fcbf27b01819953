"""Signals from the first line of a command to its last: one line, status 128 + N, and the second one always ends it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent

import pytest

from hotloop.engine.run import read_events

pytestmark = pytest.mark.usefixtures("signals_heard")

CHILD = """
import sys, time, types
from hotloop.__main__ import main

def work(config, context):
{body}

from hotloop.cli import main as commands
from hotloop.cli.command import Command
sys.modules["slow"] = types.SimpleNamespace(COMMAND=Command("slow", "Slow.", run=work))
commands.COMMANDS["slow"] = ("slow", "Slow.")
sys.argv = ["hotloop", "slow"]
sys.exit(main())
"""
SLEEP = "print('ready', flush=True); time.sleep(60)"
WITH_RECORDS = """
from hotloop.engine.run import Run
with Run({path!r}, {{}}, command="slow", environment={{}}) as run:
    run.how_to_resume = "say it again"
    print('ready', flush=True)
    time.sleep(60)
"""
DEAF = """
word = 'ready'
while True:
    try:
        print(word, flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        word = 'deaf'
"""
WITH_WORKER = """
import multiprocessing
worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
worker.start()
word = f'ready\\n{worker.pid}'
while True:
    try:
        print(word, flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        word = 'deaf'
"""
FINALISER = """
class Thing:
    def __del__(self):
        print('ready', flush=True)
        time.sleep(60)
thing = Thing()
del thing
time.sleep(60)
"""
OWN_PROGRAM = """
import logging, sys, time, types

def setup(*words, **options):
    print('ready', flush=True)
    try:
        time.sleep(1.0)
    except BaseException:
        logging.exception("configuration error")

sys.modules["hotloop.engine.device"] = types.SimpleNamespace(setup=setup)
from hotloop.cli import Command, run_program
own = Command("own", "Own.", run=lambda config, context: print("went on"), on_device=True)
sys.exit(run_program(own, []))
"""
WHILE_IT_STARTS = """
from hotloop.engine.interrupt import leave_at_once
with leave_at_once():
    try:
        print('ready', flush=True)
        for _ in range(600):
            time.sleep(0.1)
    except BaseException:
        print("an exception among imports")
"""


def start(body: str, *, under: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """A command that does something slow, as a process `under` another; it has said that it is ready."""
    code = CHILD.format(body="\n".join("    " + line for line in body.splitlines()))
    process = subprocess.Popen(
        [*under, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


def send_until_it_ends(process: "subprocess.Popen[str]", number: int) -> None:
    """Somebody who is not content with the first answer; once would do, but for the machine that is that slow."""
    while process.poll() is None:
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, errors


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_signal_while_options_are_read_is_one_line_and_with_json_an_object(tmp_path, flags) -> None:
    """A file that nobody writes to, read for its options, is as slow as it gets."""
    os.mkfifo(tmp_path / "slow.yml")
    words = ["vcd", "train", "--config-path", str(tmp_path / "slow.yml"), *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "hotloop", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with (tmp_path / "slow.yml").open("w"):  # opens when the other side does
        process.send_signal(signal.SIGTERM)
        said = '{"error": "stopped by SIGTERM"}\n' if flags else ""
        assert ended(process) == (128 + signal.SIGTERM, said, "hotloop: error: stopped by SIGTERM\n")


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
)
def test_a_signal_is_one_line_and_a_status(number: int, name: str) -> None:
    process = start(SLEEP)
    process.send_signal(number)
    assert ended(process) == (128 + number, "", f"hotloop: error: stopped by {name}\n")


def test_while_a_command_starts_it_leaves_without_an_exception_among_imports() -> None:
    process = start(WHILE_IT_STARTS)
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "", "hotloop: error: stopped by Ctrl-C\n")


def test_records_end_and_the_line_says_how_to_resume(tmp_path: Path) -> None:
    process = start(WITH_RECORDS.format(path=str(tmp_path / "run")))
    process.send_signal(signal.SIGTERM)
    line = "hotloop: error: stopped by SIGTERM; to resume: say it again\n"
    assert ended(process) == (143, "", line)
    last = list(read_events(tmp_path / "run"))[-1]
    assert (last["event"], last["status"]) == ("end", "interrupted")


def test_a_stop_of_any_program_is_no_exception_among_what_opens_its_device() -> None:
    """As jax does it: what breaks off its search for plugins is logged, and the search goes on."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "", "hotloop: error: stopped by SIGTERM\n")


def test_one_of_several_takes_a_signal_that_comes_again_for_the_same_stop() -> None:
    process = start(
        f"from hotloop.engine.interrupt import share_stops\nwith share_stops():\n{indent(DEAF, '    ')}"
    )
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "deaf\n"
    for number in (signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
    send_until_it_ends(process, signal.SIGINT)
    assert ended(process)[0] == 130


def test_a_second_signal_ends_a_process_that_does_not_listen() -> None:
    process = start(DEAF)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "deaf\n"
    assert process.poll() is None
    send_until_it_ends(process, signal.SIGTERM)
    assert ended(process)[0] == 143


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_second_signal_leaves_no_worker_behind() -> None:
    process = start(WITH_WORKER)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    assert Path(f"/proc/{worker}").exists()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "deaf\n"
    send_until_it_ends(process, signal.SIGTERM)
    assert ended(process)[0] == 143
    for _ in range(1000):
        if not Path(f"/proc/{worker}/exe").exists():  # gone, or a dead one that nobody has asked after
            return
        time.sleep(0.02)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("it still runs")


def test_two_signals_at_the_same_moment_are_one_as_timeout_sends_them() -> None:
    process = start(DEAF)
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "deaf\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    send_until_it_ends(process, signal.SIGINT)
    assert ended(process)[0] == 130


def test_a_stop_that_falls_into_a_finaliser_is_not_lost() -> None:
    process = start(FINALISER)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "", "hotloop: error: stopped by SIGTERM\n")


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    process = start(SLEEP, under=["sh", "-c", 'trap "" INT; exec "$@"', "sh"])
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
