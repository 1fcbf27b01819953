"""The progress bar: on a terminal alone, one below the other."""

import io
import sys

from hotloop.engine.progress import hide, show


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
