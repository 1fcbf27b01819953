"""Hooks between compiled calls: EarlyStopping ends a training where a plain count does, resumed or not."""

import json
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import X, Y, data, same, small, weights

from hotloop import EarlyStopping, EvalSpec, Hook, RunConfig, TrainSpec, train_and_evaluate
from hotloop.engine.interrupt import Interrupted
from hotloop.engine.run import read_events
from hotloop.errors import OptionError
from hotloop.families.estimator.between_calls import HookedCheckpoints

QUIET = {"quiet": True}
SLOW = {"rate": 0.02}  # so that the best evaluation is not the first
HELD_OUT = (
    X[:50],
    np.where(np.arange(50) % 6, Y[:50], 1 - Y[:50]),
)  # too sure of itself, a model fares worse here


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "eval" / "results.jsonl").read_text().splitlines()]


def train(folder: Path, hook: Any, max_steps: int = 200, held_out: Any = HELD_OUT, **config: Any) -> Any:
    estimator = small(folder, params=SLOW, voice=QUIET, **{"checkpoint_steps": 10, "keep_last": 2, **config})
    return estimator, train_and_evaluate(estimator, TrainSpec(data, max_steps, (hook,)), EvalSpec(held_out))


def stop_by_hand(losses: list[float], patience: int, min_delta: float) -> tuple[int, int]:
    """The places of the evaluation that stops, and of the best one."""
    best, place, waited = np.inf, -1, 0
    for at, loss in enumerate(losses):
        if best - loss > min_delta:
            best, place, waited = loss, at, 0
        else:
            waited += 1
        if waited == patience:
            return at, place
    raise AssertionError("never stopped")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Any:
    """The evaluations of a training that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, Hook())
    return results(folder)


def series(losses: list[float]) -> Any:
    """A hook that has others see these figures."""
    return [(10 * (at + 1), {"loss": loss, "accuracy": 1 - loss}) for at, loss in enumerate(losses)]


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("min_delta", [0.0, 0.1])
def test_it_stops_where_so_many_evaluations_in_a_row_were_no_better(patience: int, min_delta: float) -> None:
    from hotloop.families.estimator.hooks import RunHandle

    losses = [0.9, 0.5, 0.55, 0.45, 0.6, 0.44, 0.7, float("nan"), 0.5, 0.45]
    at, place = stop_by_hand(losses, patience, min_delta)
    for monitor in ("loss", "accuracy"):
        hook, run = EarlyStopping(monitor, patience=patience, min_delta=min_delta), RunHandle(None)
        seen = 0
        for step, figures in series(losses):
            hook.after_evaluation(run, step, figures)
            seen += 1
            if run.stopped:
                break
        assert (seen - 1, hook.best_step) == (at, 10 * (place + 1))


def test_a_training_ends_saved_at_the_evaluation_that_stops_it(whole: Any, tmp_path: Path) -> None:
    losses = [found["loss"] for found in whole]
    at, place = stop_by_hand(losses, 2, 0.0)
    assert at > place > 0
    estimator, result = train(tmp_path, EarlyStopping("loss", patience=2))
    assert result == whole[at] and estimator.latest_checkpoint() == 10 * (at + 1) < 200
    (event,) = [record for record in read_events(tmp_path) if record["event"] == "early_stop"]
    assert (event["update"], event["best_update"]) == (10 * (at + 1), 10 * (place + 1))
    assert event["best"] == pytest.approx(losses[place])
    # The same lines again have nothing to do; `steps` counts anew.
    again, result = train(tmp_path, EarlyStopping("loss", patience=2))
    assert again.latest_checkpoint() == 10 * (at + 1) and result["loss"] == pytest.approx(losses[at])
    again.train(data, steps=5, hooks=[EarlyStopping("loss", patience=2)])
    assert again.latest_checkpoint() == 10 * (at + 1) + 5


class Cutting(Hook):
    """Asks for a stop by a signal once `at` updates are made; counts evaluations and logs."""

    def __init__(self, at: int | None):
        self.at, self.count, self.logs = at, 0, 0

    def after_call(self, run: Any, first: int, metrics: Any) -> None:
        if self.at is not None and first < self.at <= run.step:
            signal.raise_signal(signal.SIGTERM)

    def after_evaluation(self, run: Any, step: int, figures: Any) -> None:
        self.count += 1

    def after_log(self, run: Any, step: int, figures: Any) -> None:
        self.logs += 1

    def to_save(self) -> Any:
        return {"count": self.count, "logs": self.logs}

    def go_on_from(self, saved: Any) -> None:
        self.count, self.logs = saved.get("count", 0), saved.get("logs", 0)


@pytest.mark.parametrize("cut", [5, 30])
def test_a_training_that_was_cut_stops_at_the_same_update(cut: int, whole: Any, tmp_path: Path) -> None:
    at, _ = stop_by_hand([found["loss"] for found in whole], 3, 0.0)
    spec = {"checkpoint_steps": 10, "iterations_per_call": 5, "log_steps": None}
    for place in (cut, None):
        counting = Cutting(place)
        estimator = small(tmp_path, params=SLOW, voice=QUIET, **spec)
        hooks = (EarlyStopping("loss", patience=3), counting)
        with pytest.raises(Interrupted) if place else nullcontext():
            train_and_evaluate(estimator, TrainSpec(data, 200, hooks), EvalSpec(HELD_OUT))
    assert estimator.latest_checkpoint() == 10 * (at + 1)
    assert counting.count == at + 1


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_best_weights_come_back(replicas: int, whole: Any, tmp_path: Path) -> None:
    losses = [found["loss"] for found in whole]
    at, place = stop_by_hand(losses, 4, 0.0)
    hook = EarlyStopping("loss", patience=4, restore_best=True)
    estimator, result = train(tmp_path / "early", hook, replicas=replicas, keep_last=1)
    best, _ = train(tmp_path / "best", Hook(), 10 * (place + 1), replicas=replicas)
    assert estimator.latest_checkpoint() == 10 * (at + 1)
    assert same(weights(estimator), weights(best))
    assert result["loss"] == pytest.approx(losses[place], rel=1e-5) and result["global_step"] == 10 * (at + 1)
    assert estimator.measure(HELD_OUT)["loss"] == result["loss"]


def test_they_also_come_back_where_a_training_ends_with_its_steps(whole: Any, tmp_path: Path) -> None:
    losses = [found["loss"] for found in whole]
    hook = EarlyStopping("loss", patience=100, restore_best=True)
    _, result = train(tmp_path, hook, 200)
    assert (result["global_step"], hook.best_step) == (
        200,
        10 * (1 + int(np.argmin(losses))),
    ) and hook.restored
    assert result["loss"] == pytest.approx(min(losses), rel=1e-6) and min(losses) < losses[-1]


def test_without_evaluations_it_watches_the_logs_and_stops_right_there(tmp_path: Path) -> None:
    small(tmp_path / "whole", voice=QUIET, log_steps=7).train(data, max_steps=140)
    losses = [record["loss"] for record in read_events(tmp_path / "whole") if record["event"] == "log"]
    at, _ = stop_by_hand(losses, 2, 0.02)
    assert at < len(losses) - 1
    for name, cuts in (("whole", [None]), ("within", [15, None]), ("there", [7 * (at + 1), None])):
        for cut in cuts:
            hooks = EarlyStopping(patience=2, min_delta=0.02), Cutting(cut)
            early = small(tmp_path / f"early_{name}", voice=QUIET, log_steps=7)
            with pytest.raises(Interrupted) if cut else nullcontext():
                early.train(data, max_steps=140, hooks=hooks)
        assert early.latest_checkpoint() == 7 * (at + 1) and hooks[1].logs == at + 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"monitor": ""}, "monitor='' must be the name of a metric"),
        ({"monitor": 3}, "monitor=3 must be"),
        ({"patience": 0}, "patience=0 must be a whole number from 1"),
        ({"patience": 1.5}, "patience=1.5 must be"),
        ({"min_delta": -1}, "min_delta=-1 must be a number from 0"),
        ({"min_delta": float("nan")}, "min_delta=nan must be"),
        ({"mode": "least"}, "mode='least' must be 'auto' or 'min' or 'max'"),
        ({"restore_best": 1}, "restore_best=1 must be True or False"),
    ],
)
def test_bad_values_are_refused_in_a_line(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=f"^EarlyStopping: {said}"):
        EarlyStopping(**given)


def test_what_a_training_cannot_watch_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for hooks, said in (
        ([EarlyStopping("val_loss")], "monitor='val_loss' is none of the model's figures: loss, accuracy"),
        ([EarlyStopping(restore_best=True)], "restore_best needs the evaluations of train_and_evaluate"),
        ([EarlyStopping(restore_best=True)] * 2, "two EarlyStopping with restore_best"),
        ([EarlyStopping], "the class EarlyStopping is no Hook"),
    ):
        with pytest.raises(OptionError, match=said):
            small(tmp_path / "none").train(data, steps=1, hooks=hooks)
    with pytest.raises(OptionError, match="tensorboard='yes' must be True or False"):
        RunConfig(tensorboard="yes")  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()


def test_the_page_s_example_stops_early_with_the_best_weights(tmp_path: Path, monkeypatch: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "estimator.md").read_text()
    (program,) = (
        text for text in re.findall("```python\n(.*?)```", page, re.DOTALL) if "EarlyStopping(" in text
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert names["result"]["global_step"] < 20_000 and (tmp_path / "early" / "checkpoints").is_dir()


def test_a_kill_before_the_best_weights_came_back_is_made_up_for(tmp_path: Path, monkeypatch: Any) -> None:
    def hook() -> EarlyStopping:
        return EarlyStopping("loss", patience=2, restore_best=True)

    with monkeypatch.context() as killed:
        killed.setattr(HookedCheckpoints, "return_to_best", lambda self, state: None)
        _, last = train(tmp_path, hook())
    again, result = train(tmp_path, hook())
    assert result["global_step"] == last["global_step"] and result["loss"] < last["loss"]
    again.train(data, steps=5)
    assert again.latest_checkpoint() == last["global_step"] + 5
