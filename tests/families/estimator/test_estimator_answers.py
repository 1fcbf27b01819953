"""What a trained Estimator answers, exactly; and one clear line for everything that cannot work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import X, Y, apply, data, init, right, small, weights

from hotloop import Arrays, EvalSpec, ModelSpec, RunConfig, TrainSpec, train_and_evaluate
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


WRONG_MODELS = {
    "model_fn must return a ModelSpec, not dict": lambda: {"loss": 1},
    "model_fn must return a ModelSpec, not None": lambda: None,
    "needs init and apply, or a module in their place": bad(apply=None),
    "to train, a ModelSpec needs an optimizer, e.g. optax.sgd(0.01), not float 0.1": bad(optimizer=0.1),
    "optimizer: name=ftrl: must be one of sgd, momentum, lars": bad(optimizer="ftrl", learning_rate=0.1),
    "optimizer: params: momentum missing: found none; sgd takes": bad(optimizer="sgd", learning_rate=0.1),
    "learning_rate of adam must be a number from 0, a function or a schedule by name, not None": bad(
        optimizer="adam"
    ),
    "learning_rate: name=warm: must be one of const, cosine": bad(
        optimizer="adam", learning_rate={"name": "warm"}
    ),
    "learning_rate and optimizer_params are for an optimizer by name": bad(learning_rate=0.1),
    "loss gives float32[] for 16 samples: it needs one value for each": bad(loss=lambda o, y: o.mean()),
    "accuracy gives bool[] for 16 samples": bad(metrics={"accuracy": lambda o, y: (o.argmax(-1) == y).all()}),
    "apply failed on": bad(apply=lambda weights, x: x @ jnp.zeros((7, 2))),
    "init failed on": bad(init=lambda key: 1 / 0),
    "init gives no arrays": bad(init=lambda key: {}),
}


@pytest.mark.parametrize("words", WRONG_MODELS)
def test_a_wrong_model_is_named_before_anything_is_compiled_or_written(words: str, tmp_path: Path) -> None:
    with pytest.raises(HotloopError) as caught:
        small(tmp_path / "model", WRONG_MODELS[words]).train(data, steps=1)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()


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
        small(tmp_path / str(n), model_fn).train(data, steps=8).evaluate(data)["loss"]
        for n, model_fn in enumerate(BY_NAME[case])
    )
    assert named == pytest.approx(theirs, rel=1e-5)


def ragged() -> Any:
    yield X[:16], Y[:16]
    yield X[:15], Y[:15]


def other_type() -> Any:
    yield X[:16], Y[:16]
    yield X[:16].astype(np.float64), Y[:16]


def mislabelled() -> Any:
    yield X[:16], Y[:16]
    yield X[:16], np.where(np.arange(16) == 3, -1, Y[:16]).astype(np.int32)


WRONG_INPUTS = {
    "labels: 7 at sample 5 is out of range: the model has classes 0 to 1": (
        X,
        np.where(np.arange(200) == 5, 7, Y),
    ),
    "labels: -1 at sample 3 of batch 1 is out of range": mislabelled,
    "batch 1: features is float32[15, 5], the first batch had float32[16, 5]": ragged,
    "batch 1: features is float64[16, 5], the first batch had float32[16, 5]": other_type,
    "input_fn gives no samples": (X[:0], Y[:0]),
    "input_fn gives no batches": list,
    "must have one length, but they have: features 200, labels 100": (X, Y[:100]),
    "input_fn gives a int": lambda: 7,
    "input_fn gives no labels": lambda: X,
    "input_fn asks for batch: it can be given mode, params, config": lambda batch: X,
}


@pytest.mark.parametrize("words", WRONG_INPUTS)
def test_wrong_input_is_named(words: str, tmp_path: Path) -> None:
    with pytest.raises(HotloopError) as caught:
        small(tmp_path).train(WRONG_INPUTS[words], steps=5)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_arrays_need_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match="arrays have no end: give steps or max_steps"):
        small(tmp_path).train(data)
    with pytest.raises(HotloopError, match="the first is how many more, the second how many in all"):
        small(tmp_path).train(data, steps=1, max_steps=1)
    with pytest.raises(HotloopError, match="max_steps=0: must be at least 1"):
        small(tmp_path).train(data, max_steps=0)


def test_a_batch_larger_than_the_data_is_named_in_training_and_filled_up_elsewhere(
    trained: Any, tmp_path: Path
) -> None:
    with pytest.raises(HotloopError, match="batch size 16 is larger than the data set of 10 samples"):
        small(tmp_path).train(lambda: (X[:10], Y[:10]), steps=1)
    assert trained.evaluate(lambda: (X[:10], Y[:10]))["samples"] == 10
    assert len(list(trained.predict(lambda: X[:10]))) == 10


def test_a_batch_that_cannot_be_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match=r"a batch of 16 does not fall into 1 replicas x 3 parts"):
        small(tmp_path, accumulation=3).train(data, steps=1)
    with pytest.raises(HotloopError, match="only 4 cpu devices here" if jax.device_count() == 4 else "only"):
        small(tmp_path, replicas=8).train(data, steps=1)


def test_a_loss_that_is_not_finite_ends_the_training_with_advice(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match=r"loss is nan at update \d+: lower the learning rate"):
        small(tmp_path, params={"rate": float("nan")}).train(data, steps=50)


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(HotloopError, match=f"cannot make the run folder {file}"):
        small(file).train(data, steps=1)
    for verb in ("evaluate", "predict"):
        with pytest.raises(HotloopError, match=r"no checkpoint in .*: train first"):
            getattr(small(tmp_path / "nothing"), verb)(data)


def test_an_export_says_that_it_is_not_there_yet(trained: Any) -> None:
    with pytest.raises(HotloopError, match="exported models come with serving"):
        trained.export("model")


def test_another_model_in_the_folder_is_refused(trained: Any) -> None:
    def wider() -> ModelSpec:
        return ModelSpec(
            init=lambda key: {"kernel": jnp.zeros((5, 3)), "bias": jnp.zeros(3)},
            apply=lambda w, x: x @ w["kernel"] + w["bias"],
            optimizer=optax.sgd(0.1),
        )

    with pytest.raises(HotloopError, match=r"leaf .* is .*in the checkpoint but .* here"):
        small(trained.model_dir, wider).evaluate(data)


@pytest.mark.parametrize(
    "field", ["batch_size", "iterations_per_call", "log_seconds", "keep_last", "loss_scale"]
)
def test_a_run_config_names_what_is_wrong_with_it(field: str) -> None:
    with pytest.raises(HotloopError, match=f"RunConfig: {field}=0 must be greater than 0"):
        RunConfig(**{field: 0})


def test_an_evaluation_may_be_throttled(tmp_path: Path) -> None:
    estimator = small(tmp_path, checkpoint_steps=10)
    found = train_and_evaluate(estimator, TrainSpec(data, 30), EvalSpec(data, throttle_seconds=3600))
    events = (tmp_path / "events.jsonl").read_text()
    assert events.count('"validation"') == 1
    assert found["global_step"] == 30
