"""What cannot work about a pipelined ModelSpec is one line that names it, before anything is compiled or written."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from staged_estimator import X, data, dense, estimator, first, init, pipelined, second, third, undivided
from test_estimator_stages import TWO, normalised, with_state

from hotloop import ModelSpec, RunConfig
from hotloop.errors import HotloopError
from hotloop.families.estimator.config import Mode
from hotloop.families.estimator.tracing import find_sources

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def tied(weights: Any, y: Any) -> Any:
    return y @ weights["one"]["kernel"].T[:7, :3]


def ratio(outputs: Any, labels: Any) -> Any:
    return outputs[:, 0]


FIELDS: dict[str, dict[str, Any]] = {
    "stages must be a list of functions, not int 3": {"stages": 3},
    "stages must be a list of functions, not list []": {"stages": []},
    "stages must be a list of functions, not list ['": {"stages": ["first"]},
    "needs init and apply, or init and stages, or a module": {"apply": third},
    "device_mapping=[0, 1]: has 2 entries for 3 stages": {"device_mapping": [0, 1]},
    "device_mapping=[0, 2, 2]: must use every device from 0 to 2": {"device_mapping": [0, 2, 2]},
    "device_mapping=[0, 1, 0]: stages of one device must follow each other": {"device_mapping": [0, 1, 0]},
    "device_mapping='012': must be a list": {"device_mapping": "012"},
    "device_mapping=[0, 0.5, 1]: must be a list": {"device_mapping": [0, 0.5, 1]},
    "pipeline_schedule must be one of Grouped, Interleaved, Sequential, not str 'Fast'": {"pipeline_schedule": "Fast"},
    "gradient_accumulation_count must be a whole number from 1, not int 0": {"gradient_accumulation_count": 0},
    "gradient_accumulation_count must be a whole number from 1, not float 2.5": {"gradient_accumulation_count": 2.5},
    "a batch of 24 does not fall into 1 replicas x 7 parts": {"gradient_accumulation_count": 7},
    "optimizer_function must be a function, not str": {"optimizer": None, "optimizer_function": "sgd"},
    "optimizer and optimizer_function both name": {"optimizer_function": lambda outputs, labels: optax.sgd(0.1)},
    "optimizer_function must give an optimizer of optax, or (optimizer, loss), not float": {
        "optimizer": None, "optimizer_function": lambda outputs, labels: 0.1,
    },
    "optimizer_function failed on": {"optimizer": None, "optimizer_function": lambda outputs, labels: 1 / 0},
    "loss and optimizer_function both give a loss": {
        "optimizer": None, "loss": ratio, "optimizer_function": lambda o, labels: (optax.sgd(0.1), ratio(o, labels)),
    },
    "loss gives float32[] for 24 samples": {
        "optimizer": None, "optimizer_function": lambda outputs, labels: (optax.sgd(0.1), outputs.mean()),
    },
    "eval_metrics_fn must be a function, not int": {"eval_metrics_fn": 1},
    "stages[2] failed on": {"stages": [first, second, lambda w, y: y @ w["four"]]},
    "stages[1] failed on": {"stages": [first, lambda w, y: (y, "text"), third], "device_mapping": [0, 0, 1]},
    "stages on two devices use 'one'": {"stages": [first, second, tied]},
    "the last stage gives float32[] for 24 samples": {"stages": [first, second, lambda w, y: third(w, y).sum()]},
    "its step for one stage depends on the gradients or weights of others": {
        "optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    },
    "optimizer does not take the weights of one stage alone (one": {
        "optimizer": optax.masked(optax.sgd(0.1), dict.fromkeys(("one", "two", "skip", "three"), True)),
    },
    "optimizer: it draws random numbers": {"optimizer": optax.add_noise(0.1, 0.5, key=0)},
}  # fmt: skip


def refused(model: Any, folder: Path, verb: str = "train", **config: Any) -> str:
    with pytest.raises(HotloopError) as caught:
        made = estimator(folder, model, **config)
        made.train(data, steps=1) if verb == "train" else made._read_served(data, Mode.EVALUATE)
    assert "\n" not in str(caught.value)
    assert not folder.exists()
    return str(caught.value)


@pytest.mark.parametrize("words", FIELDS)
def test_a_wrong_field_is_named(words: str, tmp_path: Path) -> None:
    fields = {"stages": [first, second, third], "optimizer": optax.sgd(0.1), **FIELDS[words]}
    assert words in refused(lambda: ModelSpec(init=init, **fields), tmp_path / "new")


@pytest.mark.parametrize(
    "field",
    [
        {"gradient_accumulation_count": 2},
        {"pipeline_schedule": "Grouped"},
        {"device_mapping": [0]},
        {"optimizer_function": lambda outputs, labels: optax.sgd(0.1)},
        {"eval_metrics_fn": lambda outputs, labels: {}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_fields_of_stages_need_stages(field: Any, tmp_path: Path) -> None:
    def model() -> ModelSpec:
        return ModelSpec(init=init, apply=third, optimizer=optax.sgd(0.1), **field)

    assert f"{next(iter(field))} is for a model in stages" in refused(model, tmp_path / "new")


def test_two_numbers_of_parts_are_one_too_many(tmp_path: Path) -> None:
    words = refused(lambda: pipelined({"spec": TWO}), tmp_path / "new", accumulation=2)
    assert "gradient_accumulation_count=4, and the RunConfig has accumulation=2" in words
    same = RunConfig(accumulation=4)
    assert estimator(tmp_path, pipelined, {"spec": TWO}, accumulation=same.accumulation)._job(
        Mode.TRAIN, estimator(tmp_path, pipelined)._read_input(data, Mode.TRAIN)
    ).config.accumulation == 4  # fmt: skip


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        ([1], "eval_metrics_fn must give a dict of figures by name"),
        ({"samples": 1}, "eval_metrics_fn gives samples, which results have already"),
        ({"accuracy": 1}, "eval_metrics_fn gives accuracy, which results have already"),
        ({"f1": 1}, "f1 gives"),
    ],
)
def test_what_eval_metrics_give_is_looked_at(gives: Any, words: str, tmp_path: Path) -> None:
    def measure(outputs: Any, labels: Any) -> Any:
        return jax.tree.map(lambda _: outputs.mean(), gives)

    model = lambda: pipelined({"spec": {"eval_metrics_fn": measure}})  # noqa: E731
    assert words in refused(model, tmp_path / "new", "evaluate")


def test_weights_of_stages_are_a_dict(tmp_path: Path) -> None:
    def model() -> ModelSpec:
        return ModelSpec(
            init=lambda key: [jnp.ones((6, 3)), jnp.ones((3, 3))],
            stages=[lambda w, x: x @ w[0], lambda w, x: x @ w[1]],
            optimizer=optax.sgd(0.1),
        )

    assert "init must give the weights as a dict by name" in refused(model, tmp_path / "new")


def test_a_stage_that_computes_with_the_state_it_changes_takes_no_parts(tmp_path: Path) -> None:
    def centred(weights: Any, state: Any, x: Any, *, train: bool) -> Any:
        _, moved = normalised(weights, state, x, train=train)
        return jnp.tanh(dense(weights["one"], x - state["norm"]["mean"])), moved

    words = refused(with_state(centred), tmp_path / "new", accumulation=2)
    assert "a stage computes with the state that it changes" in words
    estimator(tmp_path / "whole batches", with_state(centred)).train(data, steps=1)


def test_a_norm_over_all_gradients_is_right_where_the_stages_share_a_device(tmp_path: Path) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    params = {"optimizer": optimizer, "spec": {"device_mapping": [0, 0, 0]}}
    merged = estimator(tmp_path / "merged", pipelined, params, accumulation=2).train(data, steps=2)
    plain = estimator(tmp_path / "plain", undivided, params).train(data, steps=2)
    for name, leaf in plain.weights(lambda: X).items():
        assert abs(merged.weights(lambda: X)[name] - leaf).max() < 2e-6


def test_what_a_value_depends_on_is_found_through_calls_branches_and_loops() -> None:
    def scanned(total: Any, x: Any) -> Any:
        return jax.lax.scan(lambda held, row: ((held[1], held[0] + row), None), (total, total), x)[0]

    def branch(a: Any, b: Any, c: Any) -> Any:
        return jax.lax.cond(a > 0, lambda x, y: (x, y), lambda x, y: (2 * x, y + 1), b, c)

    def function(a: Any, b: Any, c: Any) -> Any:
        inner = jax.jit(lambda x, y: (x + 1, y * 2))
        return (
            *inner(a, b),
            jax.nn.relu(c),
            jax.checkpoint(lambda x, y: x)(b, c),
            scanned(a, c)[0],
            branch(a, b, c),
        )

    ones = jnp.ones(3)
    sources, form = find_sources(function, jnp.float32(1), jnp.float32(1), ones)
    assert sources == [{0}, {1}, {2}, {1}, {0, 2}, {0, 1}, {0, 2}] and form[2].shape == (3,)
