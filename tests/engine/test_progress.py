"""The progress bar: on a terminal alone, one below the other; and that it tells of the compiler."""

import io
import math
import os
import pty
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import jax
import numpy as np
import pytest

from hotloop.engine import progress
from hotloop.engine.drive import drive
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Evaluation, Program
from hotloop.engine.plan import Plan
from hotloop.engine.progress import attach_bar, compiling, hide, show
from hotloop.engine.run import Run


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch):
    """Standard error, kept; not in a fixture, because pytest sets its own between setup and call."""
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_bar_within_a_bar_stands_below_it(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with show("training", 3) as outer:
        with show("evaluating") as inner:
            inner.advance()
        outer.advance(2)
        outer.update("still training")
    text = terminal.getvalue()
    assert "training" in text and "evaluating" in text and "still training" in text


def test_bars_may_end_in_any_order(monkeypatch):
    """As those of a generator do that is not used up."""
    terminal = on_terminal(monkeypatch)
    outer, inner = show("predicting"), show("training", 2)
    outer.__enter__()
    bar = inner.__enter__()
    outer.__exit__(None, None, None)
    bar.advance()
    inner.__exit__(None, None, None)
    with show("and again") as bar:
        bar.advance()
    assert "and again" in terminal.getvalue()


def test_a_hidden_bar_shows_nothing_even_on_a_terminal(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with hide("working", 3) as bar:
        bar.advance()
        bar.update("still working")
    assert terminal.getvalue() == ""


class Heard:
    """Progress that keeps what it is told."""

    def __init__(self):
        self.told = []

    def advance(self, amount=1):
        self.told.append(("advance", amount))

    def update(self, description):
        self.told.append(("update", description))

    @contextmanager
    def compiling(self, recorded):
        self.told.append("begin compiling")
        try:
            yield
        finally:
            self.told.append(("end compiling", recorded))


def test_the_innermost_bar_hears_of_a_compilation_and_of_its_end_even_when_it_fails():
    outer, inner = Heard(), Heard()
    with attach_bar(outer):
        with attach_bar(inner), pytest.raises(ValueError, match="no such operation"), compiling():
            raise ValueError("no such operation")
        with compiling(recorded=True):
            pass
    assert inner.told == ["begin compiling", ("end compiling", False)]
    assert outer.told == ["begin compiling", ("end compiling", True)]
    with compiling():  # nobody asked for a bar: nothing happens
        pass


def test_a_bar_says_that_the_compiler_works_and_estimates_from_its_end_on(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with show("training", 10) as bar:
        bar.advance(4)  # done before a resume, say: no pace to estimate from
        (task,) = progress._shown[0].tasks
        with compiling():
            monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 75)
            progress._shown[0].refresh()
            assert "compiling (75 s so far)" in terminal.getvalue()
        assert (task.completed, task.speed) == (4, None)
        assert task.elapsed < 60  # what the compiler took does not count
        bar.advance(1)
        assert task.completed == 5 and task.fields["compiling_since"] is None
        began = task.start_time
        monkeypatch.setattr(progress, "QUICK", math.inf)
        with compiling():  # it was there already: the estimate goes on
            pass
        assert (task.completed, task.start_time) == (5, began) and task.fields["compiling_since"] is None


def test_without_a_terminal_a_line_tells_of_a_long_compilation_that_no_record_tells_of(monkeypatch, capsys):
    said = []
    with show("evaluating", None, said.append), compiling():
        pass
    assert said == []
    monkeypatch.setattr(progress, "SLOW", 0)
    with show("evaluating", None, said.append):
        with compiling():
            pass
        with compiling(recorded=True):
            pass
    assert said == ["evaluating: compiled in 0 s"]
    with show("predicting"), compiling():
        pass
    assert capsys.readouterr() == ("", "predicting: compiled in 0 s\n")


def test_training_and_evaluation_say_that_they_compile_before_anything_moves(tmp_path):
    bar, evaluated = Heard(), Heard()
    data = {"x": np.ones((6, 2), np.float32)}
    program = Program(lambda state, batch, key: (state, {"loss": state["w"].sum()}), Resident(data, 2), 2,
        jax.random.key(0),
    )  # fmt: skip
    state = {"w": np.zeros(3, np.float32)}
    with attach_bar(bar), Run(tmp_path, {}, command="", environment={}) as run:
        state = drive(program, Plan.for_updates(4, log_every=2), state, run, progress=bar)
    assert bar.told[:2] == ["begin compiling", ("end compiling", True)]
    assert bar.told[2:] and all(what[0] == "advance" for what in bar.told[2:])
    evaluation = Evaluation(lambda state, batch: {"sum": batch["x"].sum(1)}, data, 4)
    with attach_bar(evaluated):
        assert evaluation(state)["sum"] == evaluation(state)["sum"] == 12
    assert evaluated.told == ["begin compiling", ("end compiling", False)]


PROGRAM = """
import time
from hotloop.engine.progress import compiling, show

with show("evaluating") as bar:
    with compiling():
        until = time.monotonic() + 1.3
        while time.monotonic() < until:
            time.sleep(0.05)
    bar.update("on we go")
"""


def test_on_a_real_terminal_the_seconds_of_the_compiler_go_on():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    with suppress(OSError):  # the end of a terminal whose other side is closed
        while part := os.read(ours, 4096):
            text += part
    os.close(ours)
    assert child.wait(60) == 0
    assert b"compiling (0 s so far)" in text and b"compiling (1 s so far)" in text and b"on we go" in text
