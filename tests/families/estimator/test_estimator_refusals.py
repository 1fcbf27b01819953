"""What an Estimator refuses, each in one clear line, and what it does with a choice that could be read two ways.

`REFUSED` is the table: what cannot work, by what its line says. Most of it is refused before anything is compiled or
written.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import X, Y, apply, data, model_fn, right, small

from hotloop import Arrays, Estimator, EvalSpec, Hook, ModelSpec, RunConfig, TrainSpec, train_and_evaluate
from hotloop.engine.feed import Resident
from hotloop.engine.run import read_events, read_json
from hotloop.errors import CheckpointError, DataError, HotloopError, OptionError

Act = Callable[[Any, Path], Any]
"""What is refused, with an estimator that is trained, and a folder that is not there yet."""


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


def changed(**fields: Any) -> Callable[[], ModelSpec]:
    """A model_fn whose spec has these fields instead."""
    good = model_fn(None, None, "train", {})
    return lambda: replace(good, **fields)


def model(**fields: Any) -> Act:
    """Training a model with these fields of its spec."""
    return lambda there, new: small(new, changed(**fields)).train(data, steps=1)


def returned(spec: Any) -> Act:
    return lambda there, new: small(new, lambda: spec).train(data, steps=1)


def given(source: Any, **config: Any) -> Act:
    """Training on this input."""
    return lambda there, new: small(new, **config).train(source, steps=5)


def arrays(**fields: Any) -> Act:
    return given(Arrays(X, Y, **fields))


def config(**fields: Any) -> Act:
    return lambda there, new: RunConfig(**fields)


def parts(*positional: Any, **named: Any) -> Act:
    """Making an Estimator of these."""
    return lambda there, new: Estimator(*(positional or (model_fn,)), **({"model_dir": "x"} | named))


def trained_with(**arguments: Any) -> Act:
    return lambda there, new: there.train(data, **arguments)


def both(train: Any = None, test: Any = None, estimator: Any = None) -> Act:
    """train_and_evaluate with one of its parts another."""
    chosen = train or TrainSpec(data, 20), test or EvalSpec(data)
    return lambda there, new: train_and_evaluate(estimator or there, *chosen)


def mislabelled() -> Any:
    yield X[:16], Y[:16]
    yield X[:16], np.where(np.arange(16) == 3, -1, Y[:16]).astype(np.int32)


FLOATS = X, Y.astype(np.float32)
REFUSED: dict[str, Act] = {
    # a model_fn and its spec
    "model_fn must return a ModelSpec, not dict": returned({"loss": 1}),
    "model_fn must return a ModelSpec, not None": returned(None),
    "needs init and apply, or init and stages, or a module": model(apply=None),
    "to train, a ModelSpec needs an optimizer, e.g. optax.sgd(0.01), not float 0.1": model(optimizer=0.1),
    "optimizer: name=ftrl: must be one of sgd, momentum, lars": model(optimizer="ftrl", learning_rate=0.1),
    "optimizer: params: momentum missing: found none; sgd takes": model(optimizer="sgd", learning_rate=0.1),
    "learning_rate of adam must be a number from 0, a function or a schedule by name, not None": model(
        optimizer="adam"
    ),
    "learning_rate: name=warm: must be one of const, cosine": model(
        optimizer="adam", learning_rate={"name": "warm"}
    ),
    "learning_rate and optimizer_params are for an optimizer by name": model(learning_rate=0.1),
    "loss gives float32[] for 16 samples: it needs one value for each": model(loss=lambda o, y: o.mean()),
    "accuracy gives bool[] for 16 samples": model(
        metrics={"accuracy": lambda o, y: (o.argmax(-1) == y).all()}
    ),
    "apply failed on": model(apply=lambda weights, x: x @ jnp.zeros((7, 2))),
    "init failed on": model(init=lambda key: 1 / 0),
    "init gives no arrays": model(init=lambda key: {}),
    "ModelSpec: metrics must be a dict of functions by name, not int 5": model(metrics=5),
    "ModelSpec: metrics must be a dict of functions by name, not list ['a']": model(metrics=["a"]),
    "ModelSpec: metrics must be a dict of functions by name, not dict {5: None}": model(metrics={5: None}),
    "ModelSpec: apply must be a function, not int 5": model(apply=5),
    "ModelSpec: loss must be a function, not int 5": model(loss=5),
    "ModelSpec: predictions must be a function, not int 5": model(predictions=5),
    "ModelSpec: classes must be a whole number from 1, not int 0": model(classes=0),
    "ModelSpec: classes must be a whole number from 1, not str '3'": model(classes="3"),
    "ModelSpec: module must be a flax.nnx module, or a function that makes one, not int 5": model(
        init=None, apply=None, module=5
    ),
    "ModelSpec: stateful needs an init that gives (weights, state)": model(
        stateful=True, init=jnp.zeros_like
    ),
    "ModelSpec.init gives weights int32[5, 2]: they must be floating, to have a gradient": model(
        init=lambda key: jnp.zeros((5, 2), int)
    ),
    **{
        f"model_fn: a metric cannot be called {name}: ": model(metrics={name: right})
        for name in ("loss", "samples", "global_step", "update", "epoch")
    },
    # inputs
    "labels: 7 at sample 5 is out of range: the model has classes 0 to 1": given(
        (X, np.where(np.arange(200) == 5, 7, Y))
    ),
    "input_fn gives no samples": given((X[:0], Y[:0])),
    "input_fn gives no batches": given(list),
    "must have one length, but they have: features 200, labels 100": given((X, Y[:100])),
    "input_fn gives a int": given(lambda: 7),
    "input_fn gives no labels": given(lambda: X),
    "input_fn asks for batch: it can be given mode, params, config": given(lambda batch: X),
    "a batch of 16 does not fall into 1 replicas x 3 parts": given(data, accumulation=3),
    f"only {jax.device_count()} {jax.default_backend()} device": given(data, replicas=16),
    "labels are float32[16]: the softmax cross-entropy needs whole numbers": given(FLOATS),
    "labels are float32[16]: the softmax cross-entropy needs": given(
        Resident({"features": X, "labels": FLOATS[1]}, 16, seed=1)
    ),
    "Arrays: batch_size=0 must be a whole number from 1": arrays(batch_size=0),
    "Arrays: batch_size='8' must be a whole number from 1": arrays(batch_size="8"),
    "Arrays: batch_size=2.5 must be a whole number from 1": arrays(batch_size=2.5),
    "Arrays: shuffle='no' must be True or False": arrays(shuffle="no"),
    "Arrays: transform=5 must be a function of a batch and a key": arrays(transform=5),
    "Arrays: transform failed: KeyError 'feature'": arrays(transform=lambda batch, key: batch["feature"]),
    "Arrays: transform gives a ShapeDtypeStruct: it must give a batch {'features': ..., 'labels': ...}": arrays(
        transform=lambda batch, key: batch["features"]
    ),
    "Arrays: batch_size=0 must be": lambda there, new: there.evaluate(Arrays(X, Y, batch_size=0)),
    # the fields of a RunConfig
    **{
        f"RunConfig: batch_size={value!r} must be a whole number": config(batch_size=value)
        for value in ("8", None, 2.5, True)
    },
    "RunConfig: iterations_per_call=2.5 must be a whole number": config(iterations_per_call=2.5),
    "RunConfig: seed=1.5 must be a whole number": config(seed=1.5),
    "RunConfig: keep_last=None must be a whole number": config(keep_last=None),
    "RunConfig: replicas=None must be a whole number": config(replicas=None),
    "RunConfig: log_steps=1.5 must be a whole number or None": config(log_steps=1.5),
    "RunConfig: log_seconds='3' must be a number or None": config(log_seconds="3"),
    "RunConfig: loss_scale='foo' must be a number or 'auto'": config(loss_scale="foo"),
    "RunConfig: loss_scale=None must be a number or 'auto'": config(loss_scale=None),
    "RunConfig: precision=32 must be '32.32' or '16.32' or '16.16'": config(precision=32),
    "RunConfig: keep_best=3 must be the name of a metric or None": config(keep_best=3),
    "RunConfig: model_dir=5 must be a path or None": config(model_dir=5),
    **{
        f"RunConfig: {name}=0 must be greater than 0": config(**{name: 0})
        for name in ("batch_size", "iterations_per_call", "log_seconds", "keep_last", "loss_scale")
    },
    "RunConfig: keep_best='max:acuracy' is none of the model's figures: loss, accuracy": given(
        data, keep_best="max:acuracy"
    ),
    "RunConfig: keep_best='max:acuracy' is none of the model's": lambda there, new: train_and_evaluate(
        small(new, keep_best="max:acuracy"), TrainSpec(data, 1), EvalSpec(data)
    ),
    # the parts of an Estimator
    "Estimator: warm_start_from=5 must be a path": parts(warm_start_from=5),
    "Estimator: model_dir='' must be a path": parts(model_dir=""),
    "Estimator: model_dir=5 must be a path": parts(model_dir=5),
    "Estimator: say=5 must be a function": parts(say=5),
    "Estimator: progress=5 must be a function": parts(progress=5),
    "Estimator: quiet='no' must be True or False": parts(quiet="no"),
    "Estimator: config must be a RunConfig, not a dict": parts(model_fn, {"model_dir": "x"}),
    "Estimator: params must be a dict": parts(model_fn, RunConfig("x"), 5),
    "Estimator: model_fn must be a function": parts({}, RunConfig("x")),
    # what the verbs are called with
    **{f"steps={steps!r}: must be a whole number": trained_with(steps=steps) for steps in (2.5, "10", True)},
    **{f"steps={steps}: must be at least 1": trained_with(steps=steps) for steps in (0, -1)},
    "max_steps=0: must be at least 1": trained_with(max_steps=0),
    "max_steps=2.5: must be a whole number": trained_with(max_steps=2.5),
    "steps=0: must be at": lambda there, new: there.evaluate(data, steps=0),
    "steps='10': must be": both(test=EvalSpec(data, steps="10")),
    "arrays have no end: give steps or max_steps": trained_with(),
    "the first is how many more, the second how many in all": trained_with(steps=1, max_steps=1),
    "hooks=a Hook: must be a list": trained_with(steps=1, hooks=Hook()),
    "hooks: the class Hook is no Hook": trained_with(steps=1, hooks=[Hook]),
    "hooks=a Hook: must be": both(TrainSpec(data, 11, hooks=Hook())),
    "checkpoint='10': must be a whole number": lambda there, new: there.evaluate(data, checkpoint="10"),
    "checkpoint=2.5: must be a whole number": lambda there, new: there.predict(data, checkpoint=2.5),
    "checkpoint=2.5: must be a whole": lambda there, new: there.weights(data, checkpoint=2.5),
    "export: max_batch=0 must be a whole number from 1": lambda there, new: there.export(
        "model", data, max_batch=0
    ),
    "name=a/b: must begin with a letter or digit": lambda there, new: there.export("model", data, name="a/b"),
    "EvalSpec: exporters='worst' must be one of best, latest": both(test=EvalSpec(data, exporters="worst")),
    "train_and_evaluate: estimator must be an Estimator, not a function": both(estimator=model_fn),
    "train_and_evaluate: train_spec must be a TrainSpec, not a EvalSpec": both(EvalSpec(data)),
    "train_and_evaluate: eval_spec must be an EvalSpec, not a TrainSpec": both(test=TrainSpec(data, 1)),
    **{
        f"EvalSpec: throttle_seconds={seconds!r} must be a number from 0": both(
            test=EvalSpec(data, throttle_seconds=seconds)
        )
        for seconds in ("x", -1, float("nan"))
    },
    "no checkpoint in ": lambda there, new: small(new).evaluate(data),
    "no checkpoint": lambda there, new: small(new).predict(data),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_one_line_before_anything_is_written(
    words: str, trained: Any, tmp_path: Path
) -> None:
    assert words in refused(lambda: REFUSED[words](trained, tmp_path / "new"))
    assert not (tmp_path / "new").exists()


BAD_BATCHES = {
    "labels: -1 at sample 3 of batch 1 is out of range": mislabelled,
    "batch 1: features is float32[15, 5], the first batch had float32[16, 5]": [
        (X[:16], Y[:16]), (X[:15], Y[:15]),
    ],
    "batch 1: features is float64[16, 5], the first batch had float32[16, 5]": [
        (X[:16], Y[:16]), (X[:16].astype(np.float64), Y[:16]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("words", BAD_BATCHES)
def test_a_later_batch_that_cannot_be_trained_on_is_named(words: str, tmp_path: Path) -> None:
    assert words in refused(lambda: small(tmp_path).train(BAD_BATCHES[words], steps=5))


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
    model = changed(metrics={"mae": lambda o, y: abs((o[:, 1] - o[:, 0]) / 2 + 0.5 - y)})
    estimator = small(tmp_path, model, checkpoint_steps=10, keep_last=1, keep_best="mae")
    train_and_evaluate(estimator, TrainSpec(data, 40), EvalSpec(data))
    events = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "validation"]
    best = min(events, key=lambda e: e["mae"])["update"]
    kept = {int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*")}
    assert best != 40 and kept == {best, 40}


def test_a_folder_that_cannot_be_made_is_named_with_summaries_too(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        line = refused(lambda: small(folder, summary_steps=1).train(data, steps=1))  # noqa: B023
        assert line.startswith(f"cannot make the run folder {folder}")


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

    new = small(tmp_path / "new", wider, voice={"warm_start_from": there.model_dir})
    with pytest.raises(CheckpointError, match="does not fit this model"):
        new.train(data, steps=1)
    with pytest.raises(DataError, match="arrays have no end"):
        small(tmp_path / "new").train(data)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"report=.*: cannot write there"):
        small(tmp_path / "new", report=tmp_path / "file" / "x").train(data, steps=1)
    assert not (tmp_path / "new").exists()
