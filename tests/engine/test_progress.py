"""The progress bar: on a terminal alone, one below the other."""

import io
import sys

import pytest

from hotloop.engine.progress import hide, show


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_a_bar_within_a_bar_stands_below_it(terminal):
    with show("training", 3) as outer:
        with show("evaluating") as inner:
            inner.advance()
        outer.advance(2)
        outer.update("still training")
    text = terminal.getvalue()
    assert "training" in text and "evaluating" in text and "still training" in text


def test_bars_may_end_in_any_order(terminal):
    """As those of a generator do that is not used up."""
    outer, inner = show("predicting"), show("training", 2)
    outer.__enter__()
    bar = inner.__enter__()
    outer.__exit__(None, None, None)
    bar.advance()
    inner.__exit__(None, None, None)
    with show("and again") as bar:
        bar.advance()
    assert "and again" in terminal.getvalue()


def test_a_hidden_bar_shows_nothing_even_on_a_terminal(terminal):
    with hide("working", 3) as bar:
        bar.advance()
        bar.update("still working")
    assert terminal.getvalue() == ""
