"""A Keras model trains as Keras' own fit does, evaluates and predicts, goes on bit for bit, and on replicas alike."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from small import X, Y, right

os.environ.setdefault("KERAS_BACKEND", "jax")
keras: Any = pytest.importorskip("keras")

from hotloop import Estimator, RunConfig, from_keras  # noqa: E402
from hotloop.errors import HotloopError, MissingExtra  # noqa: E402
from hotloop.families.estimator import keras_parts  # noqa: E402
from same_numbers import assert_close  # noqa: E402

BATCHES = [(X[at : at + 16], Y[at : at + 16]) for at in range(0, 192, 16)]
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make(*between: str, optimizer: Any = None, compiled: bool = True) -> Any:
    keras.utils.set_random_seed(3)
    layers = {"norm": keras.layers.BatchNormalization, "dropout": lambda: keras.layers.Dropout(0.5)}
    first = keras.layers.Dense(8, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01))
    frozen = keras.layers.Dense(8, trainable=False)
    model = keras.Sequential(
        [keras.Input((5,)), first, frozen, *(layers[name]() for name in between), keras.layers.Dense(2)]
    )
    if compiled:
        model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), LOGITS, metrics=["accuracy"])
    return model


def estimate(folder: Path, model: Any, *, given: Any = None, **config: Any) -> Estimator:
    return Estimator(
        from_keras(model, **(given or {})), RunConfig(folder, batch_size=16, **config), quiet=True
    )


def values(model: Any) -> list[Any]:
    return [np.asarray(variable.value) for variable in model.weights]


def assert_same_weights(ours: Any, theirs: Any) -> None:
    """To float32's accuracy."""
    for found, wanted in zip(values(ours), values(theirs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("between", [(), ("norm",)], ids=["plain", "norm"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_it_trains_evaluates_and_predicts_as_keras_does(between: Any, optimizer: str, tmp_path: Path) -> None:
    makers = {
        "sgd": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9), 0.9),
        "adam": lambda: keras.optimizers.Adam(0.01, weight_decay=0.01, global_clipnorm=1.0),
    }
    theirs = make(*between, optimizer=makers[optimizer]())
    theirs.fit(X[:192], Y[:192], batch_size=16, shuffle=False, epochs=2, verbose=0)
    estimator = estimate(tmp_path, make(*between, optimizer=makers[optimizer]()), iterations_per_call=8)
    estimator.train(BATCHES).train(BATCHES)
    ours = estimator.to_keras()
    assert_same_weights(ours, theirs)
    loss, accuracy = theirs.evaluate(X, Y, batch_size=16, verbose=0)
    result = estimator.evaluate((X, Y))
    assert (result["loss"], result["accuracy"]) == pytest.approx((loss, accuracy), rel=2e-6)
    assert result["global_step"] == 24 and accuracy > 0.7
    rows = np.array(list(estimator.predict(X)))
    np.testing.assert_allclose(rows, theirs.predict(X, verbose=0), rtol=2e-5, atol=2e-6)
    assert estimator.to_keras(12) is ours and estimator.latest_checkpoint() == 24  # the first pass's end


def weighted_distance(labels: Any, outputs: Any) -> Any:
    """Of one's own, as Keras calls it: labels first; they are no outputs, so that turned round it is another."""
    return keras.ops.mean(keras.ops.abs(labels - outputs) * (1 + labels), axis=-1)


def make_compiled(loss: Any, metrics: Any, units: int) -> Any:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(units, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics[:1], weighted_metrics=metrics[1:])
    return model


@pytest.mark.parametrize(
    ("loss", "metrics", "units"),
    [
        ("binary_crossentropy", ["accuracy"], 1),  # labels of one axis, outputs of two
        ("hinge", ["mae"], 1),
        (weighted_distance, [weighted_distance], 1),
        (lambda labels, outputs: keras.ops.mean(labels * outputs**2 - outputs, axis=-1), [], 1),
        (
            keras.losses.sparse_categorical_crossentropy,
            ["accuracy", keras.metrics.sparse_top_k_categorical_accuracy],
            2,
        ),
    ],
    ids=["by name", "of another rank", "one's own", "lambda", "functions of keras"],
)
def test_what_a_model_is_compiled_with_means_what_it_means_to_keras(
    loss: Any, metrics: Any, units: int, tmp_path: Path
) -> None:
    labels = Y if units > 1 else Y.astype(np.float32)
    labels = labels[:, None] if loss is weighted_distance else labels
    theirs = make_compiled(loss, metrics, units)
    theirs.fit(X[:192], labels[:192], batch_size=16, shuffle=False, verbose=0)
    batches = [(X[at : at + 16], labels[at : at + 16]) for at in range(0, 192, 16)]
    estimator = estimate(tmp_path, make_compiled(loss, metrics, units)).train(batches)
    assert_same_weights(estimator.to_keras(), theirs)
    wanted = theirs.evaluate(X, labels, batch_size=16, verbose=0, return_dict=True)
    found = estimator.evaluate((X, labels))
    assert found == pytest.approx({**wanted, "samples": 200, "global_step": 12}, rel=2e-6)


def test_a_function_of_keras_that_is_given_takes_labels_first(tmp_path: Path) -> None:
    labels = Y[:, None].astype(np.float32)
    given = {"loss": keras.losses.binary_crossentropy, "metrics": {"same": keras.metrics.binary_crossentropy}}
    estimator = estimate(tmp_path, make_compiled("mse", [], 1), given=given).train((X, labels), steps=1)
    outputs = estimator.to_keras().predict(X, verbose=0)
    wanted = float(np.asarray(keras.losses.binary_crossentropy(labels, outputs)).mean())
    result = estimator.evaluate((X, labels))
    assert (result["loss"], result["same"]) == pytest.approx((wanted, wanted), rel=1e-5)


def test_an_optimiser_of_optax_makes_the_steps_that_keras_makes(tmp_path: Path) -> None:
    theirs = make(optimizer=keras.optimizers.SGD(0.1))
    theirs.fit(X[:192], Y[:192], batch_size=16, shuffle=False, verbose=0)
    by_name = {"optimizer": "sgd", "learning_rate": 0.1, "optimizer_params": {"momentum": 0.0}}
    for optimizer in ({"optimizer": optax.sgd(0.1)}, by_name):
        given = {"loss": LOGITS, "metrics": {"accuracy": right}, **optimizer}
        folder = tmp_path / str(len(optimizer))
        estimator = estimate(folder, make(compiled=False), given=given).train(BATCHES)
        assert_same_weights(estimator.to_keras(), theirs)


def test_it_goes_on_bit_for_bit_with_the_model_made_again(tmp_path: Path) -> None:
    whole = estimate(tmp_path / "whole", make("norm", "dropout")).train((X, Y), max_steps=30)
    for steps in (13, 30):  # layers of a new model have other names in Keras: `dense_7`
        parts = estimate(tmp_path / "parts", make("norm", "dropout")).train((X, Y), max_steps=steps)
    found, wanted = (values(each.to_keras()) for each in (parts, whole))
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert parts.measure((X, Y)) == whole.measure((X, Y))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_dropout_is_the_same_for_every_split_of_the_batch(tmp_path: Path) -> None:
    def train(name: str, *between: str, **split: int) -> Any:
        estimator = estimate(tmp_path / name, make(*between), **split).train((X, Y), steps=12)
        return estimator.weights(X)

    one = train("one", "dropout")
    for replicas, accumulation in ((4, 1), (1, 4), (2, 2)):
        found = train(f"{replicas}{accumulation}", "dropout", replicas=replicas, accumulation=accumulation)
        assert_close(found, one, 2e-6)
    without = train("without")
    assert max(np.abs(one[name] - without[name]).max() for name in one) > 0.01


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_moving_averages_are_of_all_replicas_and_evaluation_is_as_on_one(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), LOGITS)
    four = estimate(tmp_path, model, replicas=4).train([(X[:16], Y[:16])])
    moving = four.to_keras().layers[0].moving_mean
    np.testing.assert_allclose(moving.value, 0.01 * X[:16].astype(np.float64).mean(0), rtol=1e-5)
    one = estimate(tmp_path, model)
    assert four.measure((X, Y)) == pytest.approx(one.measure((X, Y)), rel=1e-6)
    np.testing.assert_allclose(list(four.predict(X[:7])), list(one.predict(X[:7])), atol=1e-6)


@pytest.mark.slow
def test_several_inputs_and_outputs_by_name(tmp_path: Path) -> None:
    keras.utils.set_random_seed(3)
    words, numbers = keras.Input((6,), dtype="int32", name="words"), keras.Input((5,), name="numbers")
    read = keras.layers.GRU(4, dropout=0.2, recurrent_dropout=0.2)(keras.layers.Embedding(10, 3)(words))
    both = keras.layers.Concatenate()([read, numbers])
    outputs = {"logits": keras.layers.Dense(2)(both), "size": keras.layers.Dense(1)(both)}
    model = keras.Model({"words": words, "numbers": numbers}, outputs)

    def loss(outputs: Any, labels: Any) -> Any:
        cross = optax.softmax_cross_entropy_with_integer_labels(outputs["logits"], labels)
        return cross + 0.1 * (outputs["size"][:, 0] - 1) ** 2

    features = {"words": np.arange(200 * 6).reshape(200, 6) % 10, "numbers": X}
    given = {"loss": loss, "optimizer": "adam", "learning_rate": 0.01}
    estimator = estimate(tmp_path, model, given=given).train((features, Y), steps=40)
    assert estimator.evaluate((features, Y))["loss"] < 0.6
    row = next(estimator.predict(features))
    assert set(row) == {"logits", "size"} and row["logits"].shape == (2,)


def test_inputs_in_a_list_stand_beside_labels_and_anything_else_is_one_line(tmp_path: Path) -> None:
    first, second = keras.Input((5,)), keras.Input((5,))
    model = keras.Model([first, second], keras.layers.Dense(2)(keras.layers.Add()([first, second])))
    model.compile("sgd", LOGITS)
    estimator = estimate(tmp_path, model).train(([X, 2 * X], Y), steps=2)
    rows = np.array(list(estimator.predict(([X, 2 * X], None))))
    np.testing.assert_allclose(
        rows, estimator.to_keras().predict([X, 2 * X], verbose=0), rtol=2e-5, atol=2e-6
    )
    with pytest.raises(
        HotloopError, match=r"fails on the features float32\[.*to predict \(\[a, b\], None\)"
    ) as found:
        list(estimator.predict([X, 2 * X]))  # two batches of one input
    assert "\n" not in str(found.value)


class OwnStep(keras.Sequential):  # type: ignore[misc]
    def compute_loss(self, *given: Any, **more: Any) -> Any:
        return 2 * super().compute_loss(*given, **more)


def make_own_step() -> Any:
    model = OwnStep([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile("sgd", LOGITS)
    return model


def make_weighted() -> Any:
    model = make()
    model.compile("sgd", LOGITS, loss_weights=[0.5])
    return model


class Bare(keras.Model):  # type: ignore[misc]
    """Says that it is built, and its layer is not."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, features: Any, training: bool = False) -> Any:
        return self.dense(features)


def make_bare() -> Any:
    model = Bare()
    with pytest.warns(UserWarning, match="does not have a `build"):
        model.build((None, 5))
    model.compile("sgd", LOGITS)
    assert model.built
    return model


REFUSED: dict[str, Any] = {
    "or the model with some features": lambda: from_keras(make_bare()),
    "an optimizer with use_ema=True puts its averages": lambda: from_keras(
        make(optimizer=keras.optimizers.SGD(0.1, use_ema=True))
    ),
    "OwnStep has a compute_loss of its own, which is not called here": lambda: from_keras(make_own_step()),
    "is compiled with loss_weights: give": lambda: from_keras(make_weighted()),
    "model must be a keras.Model, not int 5": lambda: from_keras(5),
    "is not built, so it has no weights yet": lambda: from_keras(keras.Sequential([keras.layers.Dense(2)])),
    "has no optimizer: compile it with one, or give optimizer=": lambda: from_keras(
        make(compiled=False), loss=LOGITS
    ),
    "has no weights: there is nothing to train": lambda: from_keras(
        keras.Sequential([keras.Input((5,)), keras.layers.Flatten()])
    ),
    "has no loss: compile it with one, or give": lambda: from_keras(make(compiled=False)),
    "learning_rate and optimizer_params are for an optimizer by name": lambda: from_keras(
        make(), learning_rate=0.1
    ),
    "metrics must be a dict of metrics by name, not list": lambda: from_keras(make(), metrics=["accuracy"]),
    "weights with a constraint need an optimizer of Keras": lambda: from_keras(
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_constraint="non_neg")]),
        loss=LOGITS,
        optimizer="sgd",
        learning_rate=0.1,
    ),
    "a LossScaleOptimizer, as mixed_float16 has it": lambda: from_keras(
        make(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    ),
}
LATER: dict[str, Any] = {
    "precision='16.16' is for other models": ({}, {"precision": "16.16"}),
    "loss 'mist' is none that Keras has": ({"loss": "mist"}, {}),
    "loss must be one of Keras or a function of outputs and labels, not int 5": ({"loss": 5}, {}),
    "reduction='sum': the mean over the batch is taken": (
        {"loss": keras.losses.MeanSquaredError(reduction="sum")},
        {},
    ),
    "loss with ignore_class=-1: Keras takes the mean over all other labels": (
        {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)},
        {},
    ),
    "metric auc (AUC) has no value for each sample": ({"metrics": {"auc": keras.metrics.AUC()}}, {}),
    "a ModelSpec needs an optimizer": ({"optimizer": 5}, {}),
    "ModelSpec: loss gives float32[]": ({"loss": lambda outputs, labels: outputs.mean()}, {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_model_to_train_is_refused_in_a_line(words: str) -> None:
    with pytest.raises(HotloopError) as error:
        REFUSED[words]()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("words", LATER)
def test_what_cannot_work_is_refused_before_anything_is_written(words: str, tmp_path: Path) -> None:
    given, config = LATER[words]
    with pytest.raises(HotloopError) as error:
        estimate(tmp_path / "none", make(), given=given, **config).train((X, Y), steps=1)
    assert words in str(error.value) and not (tmp_path / "none").exists()


def test_outputs_with_a_mask_take_functions_that_know_what_it_is_worth(tmp_path: Path) -> None:
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(10, 3, mask_zero=True), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    words, labels = np.arange(192).reshape(32, 6) % 10, np.ones((32, 6, 1), np.float32)
    with pytest.raises(
        HotloopError, match=r"outputs have a mask .* by which Keras weighs the loss: give func"
    ):
        estimate(tmp_path / "none", model).train((words, labels), steps=1)
    assert not (tmp_path / "none").exists()
    given = {"loss": lambda outputs, labels: ((outputs - labels) ** 2).mean((1, 2))}
    estimator = estimate(tmp_path / "own", model, given=given).train((words, labels), steps=1)
    assert next(estimator.predict(words)).shape == (6, 1)


@pytest.mark.parametrize("given", [X, (X, Y, np.ones(200))], ids=["features", "with weights of samples"])
def test_an_input_without_labels_is_one_line(given: Any, tmp_path: Path) -> None:
    with pytest.raises(
        HotloopError, match=r"gives no labels, which the loss of Keras needs: give \(features"
    ):
        estimate(tmp_path / "none", make()).train(given, steps=1)
    assert not (tmp_path / "none").exists()


def test_labels_that_are_no_class_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        HotloopError, match="labels: 7 at sample 3 is out of range: the model has classes 0 to 1"
    ):
        estimate(tmp_path, make()).train((X, np.where(np.arange(200) == 3, 7, Y)), steps=1)


def test_no_keras_another_backend_and_another_model_are_refused_in_a_line(monkeypatch: Any) -> None:
    with pytest.raises(HotloopError, match="to_keras: this Estimator's model is not from Keras"):
        Estimator(lambda: None, model_dir="x").to_keras()
    model = make()
    backend = SimpleNamespace(backend=lambda: "tensorflow")
    monkeypatch.setattr(keras, "backend", backend)
    with pytest.raises(HotloopError, match="Keras computes with tensorflow: set KERAS_BACKEND=jax before"):
        from_keras(model)
    monkeypatch.setattr(keras_parts, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"from_keras needs keras: pip install 'hotloop\[keras\]'"):
        from_keras(model)


def test_the_page_s_example_runs(tmp_path: Path, monkeypatch: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "estimator.md").read_text()
    (program,) = (
        text for text in re.findall("```python\n(.*?)```", page, re.DOTALL) if "from_keras(" in text
    )
    monkeypatch.chdir(tmp_path)
    exec(program, {})  # noqa: S102
    assert (tmp_path / "from_keras" / "checkpoints").is_dir()


def test_several_losses_are_refused_without_their_innards(tmp_path: Path) -> None:
    estimator = estimate(tmp_path, make(), given={"loss": {"first": "mse", "second": LOGITS}})
    with pytest.raises(HotloopError, match=r"not a dict of several: give one function of all outputs$"):
        estimator.train((X, Y), steps=1)
