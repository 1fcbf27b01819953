"""Estimator.export: what `predict` gives, by the names of its keys, from a folder without the model function."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import X, Y, data, small

from hotloop import EvalSpec, ModelSpec, TrainSpec, train_and_evaluate
from hotloop.engine import model_folder
from hotloop.errors import CheckpointError, HotloopError
from hotloop.families.estimator import export
from hotloop.serve.artefact import Artefact, in_rungs


@pytest.fixture(autouse=True)
def without_comparing(monkeypatch):
    """A fresh process takes seconds, and has tests of its own."""
    monkeypatch.setattr(model_folder, "compare_in_fresh_process", lambda folder: None)


def answers(folder, **inputs):
    artefact = Artefact.open(folder)
    return artefact, in_rungs(artefact.load(), artefact.ladder, inputs)


def test_a_dict_of_predictions_comes_back_by_its_keys(tmp_path):
    estimator = small(tmp_path / "a model").train(data, steps=10)
    evaluated = estimator.evaluate(data)
    folder = estimator.export(tmp_path / "models", data, max_batch=4)
    assert folder == tmp_path / "models" / "a-model" / "1"
    artefact, found = answers(folder, features=X[:7])
    rows = list(estimator.predict(lambda: X[:7]))
    assert [each.name for each in artefact.signature.outputs] == ["class", "logits"]
    assert found["class"].tolist() == [int(row["class"]) for row in rows]
    np.testing.assert_allclose(found["logits"], [row["logits"] for row in rows], atol=1e-6)
    assert artefact.about["source"]["step"] == evaluated.pop("global_step") == 10
    assert artefact.about["source"]["metrics"] == evaluated and artefact.about["config"] is None


def line(features):
    return ModelSpec(
        init=lambda key: jnp.zeros((), jnp.float32),
        apply=lambda slope, features: slope * features["a"] + features["b"]["c"],
        loss=lambda outputs, y: (outputs - y) ** 2,
        optimizer=optax.sgd(0.1),
    )


def test_plain_arrays_and_dicts_of_features_have_names(tmp_path):
    x = np.linspace(-1, 1, 32)  # float64, which the model sees as float32
    given = {"a": x, "b": {"c": x[::-1].copy()}}, 3 * x
    estimator = small(tmp_path / "line", line).train(given, steps=3)
    folder = estimator.export(tmp_path / "models", given, name="line", max_batch=2, checkpoint=3)
    narrow = {"a": x[:5].astype(np.float32), "b/c": x[::-1][:5].astype(np.float32)}
    artefact, found = answers(folder, **narrow)
    assert [(each.name, each.datatype) for each in artefact.signature.inputs] == [
        ("a", "FP32"),
        ("b/c", "FP32"),
    ]
    rows = list(estimator.predict(({"a": x[:5], "b": {"c": x[::-1][:5]}}, None)))
    np.testing.assert_allclose(found["predictions"], rows, atol=1e-6)


def test_exporters_write_the_best_the_latest_and_the_last(tmp_path, monkeypatch):
    estimator = small(tmp_path / "model", checkpoint_steps=10)
    losses = iter([0.5, 0.7, 0.4])
    measure = type(estimator)._make_measure

    def fake(self, source, job, steps):
        real = measure(self, source, job, steps)
        return lambda state: real(state) | {"loss": next(losses)}

    monkeypatch.setattr(type(estimator), "_make_measure", fake)
    train_and_evaluate(estimator, TrainSpec(data, 30), EvalSpec(data, exporters=("best", "latest", "final")))

    def steps(word):
        folder = tmp_path / "model" / "export" / word / "model"
        found = sorted(folder.iterdir(), key=lambda path: int(path.name))
        return [Artefact.open(path).about["source"]["step"] for path in found]

    assert steps("best") == [10, 30]
    assert steps("latest") == [10, 20, 30]
    assert steps("final") == [30]


def test_one_word_is_enough_and_none_exports_nothing(tmp_path):
    estimator = small(tmp_path / "model")
    train_and_evaluate(estimator, TrainSpec(data, 5), EvalSpec(data))
    assert not (tmp_path / "model" / "export").exists()
    train_and_evaluate(estimator, TrainSpec(data, 6), EvalSpec(data, exporters="final"))
    assert [path.name for path in (tmp_path / "model" / "export").iterdir()] == ["final"]


def test_another_programs_folder_says_who_can_export_it(tmp_path):
    small(tmp_path / "model").train(data, steps=1)
    with pytest.raises(
        CheckpointError, match=r"a program of your own, which has the model: call Estimator\.export"
    ):
        export.from_run(tmp_path / "model")


def test_without_a_checkpoint_or_samples_nothing_is_written(tmp_path):
    estimator = small(tmp_path / "model")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        estimator.export(tmp_path / "models", data)
    with pytest.raises(HotloopError, match="no samples"):
        estimator.export(tmp_path / "models", (X[:0], Y[:0]))
    assert not (tmp_path / "models").exists()
