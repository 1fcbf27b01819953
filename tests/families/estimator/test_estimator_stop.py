"""A run that a hook stops: what it says of its last state is of that state."""

from pathlib import Path
from typing import Any

from small import data, small

from hotloop import EvalSpec, Hook, TrainSpec, train_and_evaluate


class Early(Hook):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def after_call(self, run: Any, first: int, metrics: Any) -> None:
        self.seen.append(("call", first + len(metrics["loss"])))
        if run.step >= 23:
            run.stop()

    def on_checkpoint(self, run: Any, step: int) -> None:
        assert run.step == step
        self.seen.append(("saved", step))


def test_the_evaluation_is_of_the_last_checkpoint_and_hooks_hear_of_things_in_order(tmp_path: Path) -> None:
    early = Early()
    estimator = small(tmp_path / "m", checkpoint_steps=20, iterations_per_call=5)
    found = train_and_evaluate(estimator, TrainSpec(data, 60, (early,)), EvalSpec(data, None))
    assert found["global_step"] == estimator.latest_checkpoint() < 60
    assert found["loss"] == estimator.evaluate(data)["loss"]
    assert early.seen[-2:] == [("call", found["global_step"]), ("saved", found["global_step"])]
