"""What an Estimator refuses, each in one clear line, and what it does with a choice that could be read two ways."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import X, Y, apply, data, model_fn, right, small

from hotloop import Arrays, Estimator, EvalSpec, Hook, ModelSpec, RunConfig, TrainSpec, train_and_evaluate
from hotloop.engine.feed import Resident
from hotloop.engine.records import read_json
from hotloop.engine.run import read_events
from hotloop.errors import CheckpointError, DataError, HotloopError, OptionError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Any:
    return small(tmp_path_factory.mktemp("trained")).train(data, steps=10)


def refused(act: Callable[[], Any]) -> str:
    """The one line that an act is refused with."""
    with pytest.raises(HotloopError) as caught:
        act()
    line = str(caught.value)
    assert "\n" not in line
    return line


def with_metrics(**metrics: Any) -> Callable[..., ModelSpec]:
    """The small model, measured otherwise."""
    good = model_fn(None, None, "train", {})
    return lambda: ModelSpec(good.init, good.apply, metrics=metrics, optimizer=good.optimizer)


@pytest.mark.parametrize("name", ["loss", "samples", "global_step", "update", "epoch"])
def test_a_metric_cannot_take_the_name_of_another_figure(name: str, tmp_path: Path) -> None:
    line = refused(lambda: small(tmp_path, with_metrics(**{name: right})).train(data, steps=1))
    assert line.startswith(f"model_fn: a metric cannot be called {name}: ")


def later(features: Any, labels: Any) -> Callable[[], Any]:
    """Two batches like any, and then another."""
    return lambda: iter([(X[:16], Y[:16]), (X[:9], Y[:9]), (features, labels)])


OTHER_BATCHES = {
    "batch 2: features is float32[16, 4], the first batch had float32[16, 5]": later(X[:16, :4], Y[:16]),
    "batch 2: features is float64[16, 5], the first": later(X[:16].astype(np.float64), Y[:16]),
    "batch 2: features is float32[17, 5], the first": later(X[:17], Y[:17]),
    "batch 2: features is float32[0, 5], the first": later(X[:0], Y[:0]),
    "batch 2 is made of PyTreeDef({'features': *}), the first one of": later(X[:16], None),
}


@pytest.mark.parametrize("words", OTHER_BATCHES)
def test_later_batches_of_another_form_are_named_by_evaluate_and_predict(words: str, trained: Any) -> None:
    assert refused(lambda: trained.evaluate(OTHER_BATCHES[words])).startswith(words)
    assert refused(lambda: list(trained.predict(OTHER_BATCHES[words]))).startswith(words)


def test_later_batches_may_be_smaller(trained: Any) -> None:
    batches = later(X[:16], Y[:16])
    assert trained.evaluate(batches)["samples"] == len(list(trained.predict(batches))) == 41


@pytest.mark.parametrize("steps", [0, -1, 2.5, "10", True])
def test_numbers_of_steps_are_checked_by_every_verb(steps: Any, trained: Any) -> None:
    wanted = "must be at least 1" if steps in (0, -1) else "must be a whole number"
    for act in (
        lambda: trained.train(data, steps=steps),
        lambda: trained.evaluate(data, steps=steps),
        lambda: train_and_evaluate(trained, TrainSpec(data, 20), EvalSpec(data, steps=steps)),
    ):
        line = refused(act)
        assert line.startswith(f"steps={steps!r}: {wanted}")
    assert refused(lambda: trained.train(data, max_steps=steps)).startswith("max_steps=")


def test_hooks_are_a_list_of_hooks(trained: Any) -> None:
    assert "hooks=a Hook: must be a list" in refused(lambda: trained.train(data, steps=1, hooks=Hook()))
    assert "hooks: the class Hook is no Hook" in refused(lambda: trained.train(data, steps=1, hooks=[Hook]))
    one = TrainSpec(data, 11, hooks=Hook())  # type: ignore[arg-type]
    assert "must be a list" in refused(lambda: train_and_evaluate(trained, one, EvalSpec(data)))


@pytest.mark.parametrize(
    ("choice", "best"),
    [
        ("mae", ("mae", "min")),
        ("RMSE", ("RMSE", "min")),
        ("perplexity", ("perplexity", "min")),
        ("accuracy", ("accuracy", "max")),
        ("min:accuracy", ("accuracy", "min")),
        ("max:mae", ("mae", "max")),
        (None, None),
    ],
)
def test_the_best_is_the_least_of_errors_and_what_is_said_of_others(choice: Any, best: Any) -> None:
    assert RunConfig(keep_best=choice).best == best


def test_the_checkpoint_with_the_least_error_is_kept(tmp_path: Path) -> None:
    model = with_metrics(mae=lambda o, y: abs((o[:, 1] - o[:, 0]) / 2 + 0.5 - y))
    estimator = small(tmp_path, model, checkpoint_steps=10, keep_last=1, keep_best="mae")
    train_and_evaluate(estimator, TrainSpec(data, 40), EvalSpec(data))
    events = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "validation"]
    best = min(events, key=lambda e: e["mae"])["update"]
    kept = {int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*")}
    assert best != 40 and kept == {best, 40}


def test_a_best_that_no_metric_gives_is_refused_with_those_there_are(tmp_path: Path) -> None:
    estimator = small(tmp_path, keep_best="max:acuracy")
    line = "RunConfig: keep_best='max:acuracy' is none of the model's figures: loss, accuracy"
    assert refused(lambda: estimator.train(data, steps=1)) == line
    assert refused(lambda: train_and_evaluate(estimator, TrainSpec(data, 1), EvalSpec(data))) == line


def test_a_folder_that_cannot_be_made_is_named_with_summaries_too(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        line = refused(lambda: small(folder, summary_steps=1).train(data, steps=1))  # noqa: B023
        assert line.startswith(f"cannot make the run folder {folder}")


def test_labels_that_are_no_whole_numbers_need_a_loss_of_their_own(tmp_path: Path) -> None:
    floats = X, Y.astype(np.float32)
    words = "labels are float32[16]: the softmax cross-entropy needs whole numbers"
    for source in (floats, Resident({"features": X, "labels": floats[1]}, 16, seed=1)):
        assert refused(lambda: small(tmp_path).train(lambda: source, steps=1)).startswith(words)  # noqa: B023


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        *(("batch_size", value, "a whole number") for value in ("8", None, 2.5, True)),
        ("iterations_per_call", 2.5, "a whole number"),
        ("seed", 1.5, "a whole number"),
        ("keep_last", None, "a whole number"),
        ("replicas", None, "a whole number"),
        ("log_steps", 1.5, "a whole number or None"),
        ("log_seconds", "3", "a number or None"),
        ("loss_scale", "foo", "a number or 'auto'"),
        ("loss_scale", None, "a number or 'auto'"),
        ("precision", 32, "'32.32' or '16.32' or '16.16'"),
        ("keep_best", 3, "the name of a metric or None"),
        ("model_dir", 5, "a path or None"),
    ],
)
def test_a_field_of_another_kind_is_named_with_what_it_must_be(field: str, value: Any, wanted: str) -> None:
    assert refused(lambda: RunConfig(**{field: value})) == f"RunConfig: {field}={value!r} must be {wanted}"


def test_numbers_of_numpy_are_numbers() -> None:
    config = RunConfig(batch_size=np.int64(8), log_seconds=np.float32(0.5), loss_scale=np.float64(2))
    assert config.batch_size == 8


def test_numbers_of_numpy_are_numbers_of_steps(tmp_path: Path) -> None:
    estimator = small(tmp_path, checkpoint_steps=np.int64(1), seed=np.int64(3))
    estimator.train(data, steps=np.int64(2)).train(data, max_steps=np.uint8(3))
    assert estimator.evaluate(data, steps=np.int64(1), checkpoint=np.int64(2))["global_step"] == 2
    assert estimator.latest_checkpoint() == 3


def test_params_may_hold_what_has_no_json_form(tmp_path: Path) -> None:
    params = {"rate": 0.1, "loss": right, "optimizer": optax.sgd(0.1), "sizes": np.arange(2)}
    small(tmp_path, params=params).train(data, steps=1)
    noted = read_json(tmp_path / "config.json")["params"]
    assert noted["rate"] == 0.1 and noted["loss"] == "right" and noted["sizes"] == [0, 1]
    assert noted["optimizer"].endswith("GradientTransformationExtraArgs")


WRONG_PARTS: dict[str, Any] = {
    "warm_start_from=5 must be a path": {"warm_start_from": 5},
    "model_dir='' must be a path": {"model_dir": ""},
    "say=5 must be a function": {"say": 5},
    "progress=5 must be a function": {"progress": 5},
    "quiet='no' must be True or False": {"quiet": "no"},
}


@pytest.mark.parametrize("words", WRONG_PARTS)
def test_a_part_of_another_kind_is_named_when_the_estimator_is_made(words: str) -> None:
    given = {"model_dir": "x", **WRONG_PARTS[words]}
    assert refused(lambda: Estimator(model_fn, **given)) == f"Estimator: {words}"


def gives(**fields: Any) -> Callable[[], ModelSpec]:
    """A model_fn whose spec has these fields instead."""
    good = model_fn(None, None, "train", {})
    return lambda: replace(good, **fields)


WRONG_FIELDS: dict[str, Any] = {
    "ModelSpec: metrics must be a dict of functions by name, not int 5": {"metrics": 5},
    "ModelSpec: metrics must be a dict of functions by name, not list ['a']": {"metrics": ["a"]},
    "ModelSpec: metrics must be a dict of functions by name, not dict {5: None}": {"metrics": {5: None}},
    "ModelSpec: apply must be a function, not int 5": {"apply": 5},
    "ModelSpec: loss must be a function, not int 5": {"loss": 5},
    "ModelSpec: predictions must be a function, not int 5": {"predictions": 5},
    "ModelSpec: classes must be a whole number from 1, not int 0": {"classes": 0},
    "ModelSpec: classes must be a whole number from 1, not str '3'": {"classes": "3"},
    "ModelSpec: module must be a flax.nnx module, or a function that makes one, not int 5": {
        "init": None, "apply": None, "module": 5,
    },
    "ModelSpec: stateful needs an init that gives (weights, state)": {"stateful": True, "init": jnp.zeros_like},
    "ModelSpec.init gives weights int32[5, 2]: they must be floating, to have a gradient": {
        "init": lambda key: jnp.zeros((5, 2), int),
    },
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG_FIELDS)
def test_a_field_of_a_model_of_another_kind_is_named(words: str, tmp_path: Path) -> None:
    assert refused(lambda: small(tmp_path, gives(**WRONG_FIELDS[words])).train(data, steps=1)) == words
    assert not any(tmp_path.iterdir())


def cropped(batch: Any, key: Any) -> Any:
    return batch["feature"]


WRONG_ARRAYS: dict[str, Any] = {
    "Arrays: batch_size=0 must be a whole number from 1": {"batch_size": 0},
    "Arrays: batch_size='8' must be a whole number from 1": {"batch_size": "8"},
    "Arrays: batch_size=2.5 must be a whole number from 1": {"batch_size": 2.5},
    "Arrays: shuffle='no' must be True or False": {"shuffle": "no"},
    "Arrays: transform=5 must be a function of a batch and a key": {"transform": 5},
    "Arrays: transform failed: KeyError 'feature'": {"transform": cropped},
    "Arrays: transform gives a ShapeDtypeStruct: it must give a batch {'features': ..., 'labels': ...}": {
        "transform": lambda batch, key: batch["features"],
    },
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG_ARRAYS)
def test_a_field_of_arrays_of_another_kind_is_named_by_every_verb(words: str, trained: Any) -> None:
    given = Arrays(X, Y, **WRONG_ARRAYS[words])
    for act in (lambda: trained.train(given, steps=1), lambda: trained.evaluate(given)):
        assert refused(act) == words


def test_train_and_evaluate_names_what_it_cannot_take(trained: Any) -> None:
    wrong: Any = model_fn
    train, test = TrainSpec(data, 20), EvalSpec(data)
    line = refused(lambda: train_and_evaluate(wrong, train, test))
    assert line == "train_and_evaluate: estimator must be an Estimator, not a function"
    wrong = test
    line = refused(lambda: train_and_evaluate(trained, wrong, test))
    assert line == "train_and_evaluate: train_spec must be a TrainSpec, not a EvalSpec"
    for seconds in ("x", -1, float("nan")):
        wrong = EvalSpec(data, throttle_seconds=seconds)  # type: ignore[arg-type]
        line = refused(lambda: train_and_evaluate(trained, train, wrong))  # noqa: B023
        assert line == f"EvalSpec: throttle_seconds={seconds!r} must be a number from 0"


@pytest.mark.parametrize("checkpoint", ["10", 2.5])
def test_the_number_of_a_checkpoint_is_checked_by_every_verb(checkpoint: Any, trained: Any) -> None:
    for act in (trained.evaluate, trained.predict, trained.weights):
        line = refused(lambda: act(data, checkpoint=checkpoint))  # noqa: B023
        assert line == f"checkpoint={checkpoint!r}: must be a whole number"


def test_an_estimator_names_what_it_cannot_be_made_of() -> None:
    wrong: Any = {"model_dir": "x"}
    line = "Estimator: config must be a RunConfig, not a dict"
    assert refused(lambda: Estimator(model_fn, wrong)) == line
    assert "params must be a dict" in refused(lambda: Estimator(model_fn, RunConfig("x"), 5))  # type: ignore[arg-type]
    assert "model_fn must be a function" in refused(lambda: Estimator(wrong, RunConfig("x")))
    assert "model_dir=5 must be a path" in refused(lambda: Estimator(model_fn, model_dir=5))  # type: ignore[arg-type]


def test_a_temporary_folder_is_named_even_where_nothing_else_is_said(
    capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    estimator = Estimator(model_fn)
    out, err = capsys.readouterr()
    assert (
        not out
        and err.startswith(f"model_dir: {estimator.model_dir} (a temporary one")
        and err.count("\n") == 1
    )
    lines: list[str] = []
    Estimator(model_fn, say=lines.append)
    Estimator(model_fn, RunConfig(tmp_path))
    assert len(lines) == 1 and capsys.readouterr() == ("", "")


def wider(features: Any, labels: Any, mode: str, params: Any) -> ModelSpec:
    """Another network for the same data."""

    def init(key: Any) -> Any:
        return {"kernel": jnp.zeros((5, 3)), "bias": jnp.zeros(3)}

    return ModelSpec(init=init, apply=apply, optimizer=optax.sgd(0.1))


def test_what_cannot_be_trained_is_refused_while_nothing_is_written(tmp_path: Path) -> None:
    there = small(tmp_path / "there").train(data, steps=1)
    before = (tmp_path / "there" / "events.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="does not fit this model"):
        small(tmp_path / "there", wider).train(data, steps=1)
    assert (tmp_path / "there" / "events.jsonl").read_bytes() == before

    new = small(tmp_path / "new", wider)
    new._warm_start_from = there.model_dir
    with pytest.raises(CheckpointError, match="does not fit this model"):
        new.train(data, steps=1)
    with pytest.raises(DataError, match="arrays have no end"):
        small(tmp_path / "new").train(data)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"report=.*: cannot write there"):
        small(tmp_path / "new", report=tmp_path / "file" / "x").train(data, steps=1)
    assert not (tmp_path / "new").exists()
