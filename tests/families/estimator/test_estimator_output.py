"""What an Estimator says while it works: lines and a bar by default, nothing but warnings when it is quiet."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import X, Y, apply, data, init, model_fn, small

from hotloop import Estimator, EvalSpec, ModelSpec, RunConfig, TrainSpec, train_and_evaluate
from hotloop.errors import HotloopError

QUIET = {"quiet": True}


def work(estimator: Estimator) -> None:
    """Every verb, once."""
    estimator.train(data, steps=10)
    estimator.evaluate(data, name="all")
    list(estimator.predict(lambda: X))


def test_every_verb_says_what_it_does_on_standard_error(tmp_path: Path, capsys: Any) -> None:
    work(small(tmp_path))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert any(line.startswith("update 10") and "loss: " in line for line in lines)
    assert lines[-2].startswith("evaluation all at update 10: loss ")
    assert lines[-1] == f"predictions of update 10 of {tmp_path}"


def test_the_last_evaluation_of_train_and_evaluate_is_said_once(tmp_path: Path, capsys: Any) -> None:
    spec = EvalSpec(data, throttle_seconds=3600)
    train_and_evaluate(small(tmp_path, checkpoint_steps=10), TrainSpec(data, 20), spec)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("evaluation")] == [
        "evaluation at update 20"
    ]


def test_a_quiet_one_says_nothing_but_warnings(tmp_path: Path, capsys: Any) -> None:
    small(tmp_path, voice=QUIET).train(data, steps=1)
    assert capsys.readouterr() == ("", "")
    small(tmp_path, voice=QUIET).train(lambda: (X[:100], Y[:100]), steps=1)
    err = capsys.readouterr().err
    assert err.startswith("warning: goes on with another input") and err.count("\n") == 1


def test_lines_go_where_they_are_wanted(tmp_path: Path, capsys: Any) -> None:
    lines: list[str] = []
    small(tmp_path, voice={"say": lines.append}).train(data, steps=1)
    assert capsys.readouterr() == ("", "") and any(line.startswith("update 1") for line in lines)


@pytest.mark.parametrize("voice", [{}, QUIET])
def test_every_verb_has_a_bar_on_a_terminal_unless_it_is_quiet(
    voice: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    work(small(tmp_path, voice=voice))
    shown = [word in terminal.getvalue() for word in ("training", "evaluating", "predicting")]
    assert shown == [not voice] * 3
    assert not voice or terminal.getvalue() == ""


def test_a_bar_of_predictions_that_are_not_used_up_leaves_room_for_others(
    tmp_path: Path, monkeypatch: Any
) -> None:
    estimator = small(tmp_path, voice=QUIET).train(data, steps=1)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    speaking = small(tmp_path)
    rows = speaking.predict(lambda: X)
    next(rows)
    speaking.train(data, steps=1)
    assert estimator.latest_checkpoint() == 2


def test_a_quiet_one_cannot_be_told_how_to_speak() -> None:
    with pytest.raises(HotloopError, match="quiet=True leaves nothing for say"):
        Estimator(model_fn, RunConfig("x"), say=print, quiet=True)


def with_predictions(predictions: Any) -> Any:
    good = model_fn(None, None, "train", {})
    return lambda: ModelSpec(init, apply, predictions=predictions, optimizer=good.optimizer)


def test_a_row_is_what_predictions_gives_for_a_sample_or_the_output(tmp_path: Path) -> None:
    small(tmp_path).train(data, steps=1)

    def rows(predictions: Any) -> list[Any]:
        return list(small(tmp_path, with_predictions(predictions)).predict(data))

    outputs = rows(None)
    assert all(isinstance(row, np.ndarray) and row.shape == (2,) for row in outputs)
    classes = rows(lambda outputs: outputs.argmax(-1))
    assert all(isinstance(row, np.integer) for row in classes)
    named = rows(lambda outputs: {"class": outputs.argmax(-1), "logits": outputs})
    assert [row["class"] for row in named] == classes == [row.argmax() for row in outputs]
    assert all(isinstance(row, dict) and row["logits"].shape == (2,) for row in named)
