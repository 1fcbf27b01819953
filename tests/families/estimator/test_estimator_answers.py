"""What a trained Estimator answers, exactly; and one clear line for everything that cannot work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import X, Y, apply, data, init, right, small, weights

from hotloop import Arrays, EvalSpec, ModelSpec, TrainSpec, train_and_evaluate
from hotloop.errors import HotloopError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Any:
    return small(tmp_path_factory.mktemp("trained")).train(data, steps=30)


def expected(trained: Any) -> tuple[np.ndarray, float, float]:
    """Logits, mean loss and accuracy by float64."""
    kept = weights(trained)
    logits = X.astype(np.float64) @ kept["kernel"] + kept["bias"]
    losses = np.logaddexp(logits[:, 0], logits[:, 1]) - logits[np.arange(200), Y]
    return logits, losses.mean(), (logits.argmax(1) == Y).mean()


@pytest.mark.parametrize("size", [200, 16, 7])
def test_evaluation_counts_every_sample_once_for_any_batch(trained: Any, size: int) -> None:
    _, loss, accuracy = expected(trained)
    found = trained.evaluate(lambda: Arrays(X, Y, batch_size=size))
    assert (found["samples"], found["global_step"]) == (200, 30)
    assert found["accuracy"] == accuracy
    assert found["loss"] == pytest.approx(loss, rel=1e-6)


def test_evaluation_of_batches_counts_the_smaller_last_one(trained: Any) -> None:
    _, loss, accuracy = expected(trained)
    found = trained.evaluate(lambda: ((X[i : i + 48], Y[i : i + 48]) for i in range(0, 200, 48)))
    assert (found["samples"], found["accuracy"]) == (200, accuracy)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)


def test_evaluation_may_stop_after_some_batches(trained: Any) -> None:
    found = trained.evaluate(data, steps=3)
    assert found["samples"] == 48

    def endless() -> Any:
        while True:
            yield X[:16], Y[:16]

    assert trained.evaluate(endless, steps=2)["samples"] == 32


def test_predictions_are_rows_in_order_made_as_they_are_asked_for(trained: Any) -> None:
    logits, _, _ = expected(trained)
    rows = list(trained.predict(lambda: X))
    assert [int(row["class"]) for row in rows] == logits.argmax(1).tolist()
    np.testing.assert_allclose([row["logits"] for row in rows], logits, atol=1e-5)
    asked = []

    def few() -> Any:
        for start in range(0, 200, 50):
            asked.append(start)
            yield X[start : start + 50]

    generator = trained.predict(few)
    assert next(generator)["class"] == rows[0]["class"]
    assert len(asked) <= 2


def test_an_older_checkpoint_can_be_asked_for(tmp_path: Path) -> None:
    estimator = small(tmp_path, checkpoint_steps=5).train(data, steps=10)
    assert estimator.evaluate(data, checkpoint=5)["global_step"] == 5


def bad(**changes: Any) -> Callable[..., Any]:
    good = {"init": init, "apply": apply, "metrics": {"accuracy": right}, "optimizer": optax.sgd(0.1)}
    return lambda: ModelSpec(**{**good, **changes})


COSINE = {"initial_learning_rate": 0.1, "epochs_to_total_decay": 6}
BY_NAME = {
    "number": (bad(optimizer="adam", learning_rate=0.01), bad(optimizer=optax.adam(0.01))),
    "schedule": (
        bad(
            optimizer="momentum",
            optimizer_params={"momentum": 0.9},
            learning_rate={"name": "cosine", **COSINE},
        ),
        bad(optimizer=optax.sgd(optax.cosine_decay_schedule(0.1, 6), momentum=0.9)),
    ),
}


@pytest.mark.parametrize("case", BY_NAME)
def test_an_optimizer_and_a_schedule_by_name_are_those_of_optax(case: str, tmp_path: Path) -> None:
    named, theirs = (
        weights(small(tmp_path / str(n), model_fn).train(data, steps=8))
        for n, model_fn in enumerate(BY_NAME[case])
    )
    for name, expected in theirs.items():
        np.testing.assert_allclose(named[name], expected, rtol=1e-5, atol=1e-7)


def test_a_batch_larger_than_the_data_is_named_in_training_and_filled_up_elsewhere(
    trained: Any, tmp_path: Path
) -> None:
    with pytest.raises(HotloopError, match="batch size 16 is larger than the data set of 10 samples"):
        small(tmp_path).train(lambda: (X[:10], Y[:10]), steps=1)
    assert trained.evaluate(lambda: (X[:10], Y[:10]))["samples"] == 10
    assert len(list(trained.predict(lambda: X[:10]))) == 10


def test_a_loss_that_is_not_finite_ends_the_training_with_advice(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match=r"loss is nan at update \d+: lower the learning rate"):
        small(tmp_path, params={"rate": float("nan")}).train(data, steps=50)


def test_another_model_in_the_folder_is_refused(trained: Any) -> None:
    def wider() -> ModelSpec:
        return ModelSpec(
            init=lambda key: {"kernel": jnp.zeros((5, 3)), "bias": jnp.zeros(3)},
            apply=lambda w, x: x @ w["kernel"] + w["bias"],
            optimizer=optax.sgd(0.1),
        )

    with pytest.raises(HotloopError, match=r"leaf .* is .*in the checkpoint but .* here"):
        small(trained.model_dir, wider).evaluate(data)


def test_an_evaluation_may_be_throttled(tmp_path: Path) -> None:
    estimator = small(tmp_path, checkpoint_steps=10)
    found = train_and_evaluate(estimator, TrainSpec(data, 30), EvalSpec(data, throttle_seconds=3600))
    events = (tmp_path / "events.jsonl").read_text()
    assert events.count('"validation"') == 1
    assert found["global_step"] == 30
