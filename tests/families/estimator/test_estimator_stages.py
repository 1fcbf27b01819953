"""A pipelined ModelSpec on devices of its own: it trains, evaluates and predicts as the undivided model does."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from staged_estimator import (
    X,
    Y,
    data,
    estimator,
    first,
    init,
    pipelined,
    right,
    second,
    third,
    undivided,
    weights,
)

from device_room import watch_devices
from hotloop import EvalSpec, Hook, ModelSpec, TrainSpec, train_and_evaluate
from hotloop.engine import stage_rows
from hotloop.engine.checkpoint_folder import read_leaves, read_whole
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.stage_rows import StageRows
from hotloop.families.estimator import model
from hotloop.families.estimator.config import Mode
from hotloop.families.estimator.training import _first_state, open_checkpoints
from same_numbers import assert_close, assert_seen

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
TWO = {"device_mapping": [0, 0, 1], "gradient_accumulation_count": 4}
PLAIN = {"optimizer": optax.sgd(1.0, momentum=0.0)}  # whose slot is the gradient
ONCE = {"steps": 1, "batch_size": len(X)}


class Losses(Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_call(self, run: Any, first: int, metrics: Any) -> None:
        self.found += metrics["loss"].tolist()


def run(
    folder: Path, model: Any, params: Any = None, steps: int = 4, input_fn: Any = data, **config: Any
) -> Any:
    """Weights after some updates, the loss of each, and the estimator."""
    losses = Losses()
    made = estimator(folder, model, params, **config).train(input_fn, steps=steps, hooks=[losses])
    found = weights(made)
    assert np.isfinite(losses.found).all() and all(np.isfinite(leaf).all() for leaf in found.values())
    return found, np.array(losses.found), made


def gradients(made: Any) -> dict[str, Any]:
    """Those of the first update of an optimiser whose slot they are."""
    folder = made.model_dir / "checkpoints" / "00000001"
    leaves = read_leaves(folder, read_whole(folder, 1))
    return {name: leaf for name, leaf in leaves.items() if "/trace/" in name}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Any:
    return run(tmp_path_factory.mktemp("whole"), undivided)


@pytest.mark.parametrize(
    ("schedule", "spec", "config"),
    [
        ("Grouped", {"gradient_accumulation_count": 6}, {}),
        ("Interleaved", TWO, {}),
        ("Sequential", {"device_mapping": [1, 0, 0]}, {"accumulation": 3}),
        ("Interleaved", TWO | {"gradient_accumulation_count": 3}, {"replicas": 2}),
    ],
    ids=["three stages", "two stages", "one by one", "two replicas"],
)
def test_stages_train_as_the_undivided_model_dropout_included(
    schedule: str, spec: Any, config: Any, whole: Any, tmp_path: Path
) -> None:
    fields = {"pipeline_schedule": schedule, **spec}
    found, losses, made = run(tmp_path, pipelined, {"spec": fields}, **config)
    expected, expected_losses, _ = whole
    same_training((found, losses), (expected, expected_losses))
    assert min(abs(losses)) > 0.1 and max(abs(leaf).max() for leaf in found.values()) > 0.5
    mesh = made._job(Mode.TRAIN, made._read_input(data, Mode.TRAIN)).mesh
    assert dict(mesh.shape) == {
        "replica": config.get("replicas", 1),
        "stage": 3 if schedule == "Grouped" else 2,
    }


def same_training(found: Any, wanted: Any) -> None:
    assert_close(found[1], wanted[1], 1e-6)
    assert_close(found[0], wanted[0], 2e-6)


def same_gradients(found: Any, wanted: Any) -> None:
    assert_close(found, wanted, 1e-6)


def test_the_gradient_of_one_update_is_that_of_the_undivided_model(tmp_path: Path) -> None:
    expected = gradients(run(tmp_path / "whole", undivided, PLAIN, **ONCE)[2])
    found = gradients(run(tmp_path / "stages", pipelined, {**PLAIN, "spec": TWO}, **ONCE)[2])
    assert len(expected) == 8 and all(abs(leaf).max() > 1e-4 for leaf in expected.values())
    same_gradients(found, expected)


def changed_label() -> tuple[Any, Any]:
    labels = Y.copy()
    labels[7] = (labels[7] + 1) % 3
    return X, labels


def moved_weight(params: Any) -> ModelSpec:
    def moved(key: Any) -> Any:
        drawn = init(key)
        return {**drawn, "two": {**drawn["two"], "bias": drawn["two"]["bias"].at[0].add(1e-3)}}

    optimizer = params.get("optimizer", optax.sgd(0.2, momentum=0.9))
    return ModelSpec(init=moved, stages=[first, second, third], optimizer=optimizer, **TWO)


@pytest.mark.slow
def test_one_changed_label_and_one_moved_weight_are_seen(whole: Any, tmp_path: Path) -> None:
    controls = (
        run(tmp_path / "label", pipelined, {"spec": TWO}, input_fn=changed_label),
        run(tmp_path / "weight", moved_weight),
    )
    assert_seen(partial(same_training, wanted=whole), *controls)
    expected = gradients(run(tmp_path / "whole", undivided, PLAIN, **ONCE)[2])
    once = (
        run(tmp_path / "once", pipelined, {**PLAIN, "spec": TWO}, **ONCE, input_fn=changed_label),
        run(tmp_path / "moved once", moved_weight, PLAIN, **ONCE),
    )
    assert_seen(partial(same_gradients, wanted=expected), *(gradients(made) for _, _, made in once))


def test_iterations_per_call_need_be_no_multiple_of_the_accumulation(tmp_path: Path, whole: Any) -> None:
    """An iteration is a whole update here: it was a part of one, which calls had to hold whole numbers of."""
    found, _, _ = run(tmp_path, pipelined, {"spec": TWO}, iterations_per_call=3)
    assert_close(found, whole[0], 2e-6)


@pytest.mark.slow
def test_a_checkpoint_is_that_of_the_undivided_model_and_goes_on_anywhere(whole: Any, tmp_path: Path) -> None:
    specs = {"spec": TWO}
    estimator(tmp_path, pipelined, specs).train(data, steps=1)
    manifest = json.loads((tmp_path / "checkpoints" / "00000001" / "manifest.json").read_text())
    plain = json.loads((whole[2].model_dir / "checkpoints" / "00000004" / "manifest.json").read_text())
    assert {name: leaf["shape"] for name, leaf in manifest["leaves"].items()} == {
        name: leaf["shape"] for name, leaf in plain["leaves"].items()
    }
    estimator(tmp_path, undivided).train(data, steps=1)
    estimator(tmp_path, undivided, replicas=2).train(data, steps=1)
    found, _, last = run(tmp_path, pipelined, {"spec": {**TWO, "device_mapping": [0, 1, 2]}}, steps=1)
    assert last.latest_checkpoint() == 4
    assert_close(found, whole[0], 2e-6)


def test_on_too_few_devices_stages_merge_with_one_line(whole: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    made = estimator(
        tmp_path, pipelined, {"spec": {"gradient_accumulation_count": 2}}, lines.append, replicas=2
    )
    made.train(data, steps=4)
    made.evaluate(data)
    assert_close(weights(made), whole[0], 2e-6)
    assert [line for line in lines if "merge" in line] == [
        "2 replicas x 3 devices for 3 stages on 4 devices: 3 stages merge into one; batches and learning rate stay"
    ]


def test_stages_evaluate_and_predict_as_the_undivided_model(whole: Any, tmp_path: Path) -> None:
    _, _, plain = whole
    expected = plain.measure(data)
    rows = list(plain.predict(lambda: X[:31]))
    staged = estimator(plain.model_dir, pipelined, {"spec": TWO}, replicas=2)
    assert staged.measure(data) == pytest.approx(expected, rel=1e-6)
    batches = [(X[:24], Y[:24]), (X[24:29], Y[24:29])]
    assert staged.measure(lambda: batches) == pytest.approx(plain.measure(lambda: batches), rel=1e-6)
    found = list(staged.predict(lambda: X[:31]))
    assert len(found) == len(rows) == 31
    for row, wanted in zip(found, rows, strict=True):
        np.testing.assert_allclose(row["logits"], wanted["logits"], rtol=0, atol=1e-6)
        assert row["class"] == wanted["class"]
    assert np.ptp([row["logits"] for row in rows]) > 0.1


def test_each_device_holds_its_own_stage_alone_and_training_evaluates_what_it_holds(tmp_path: Path) -> None:
    made = estimator(tmp_path, pipelined, {"spec": TWO}, checkpoint_steps=2)
    result = train_and_evaluate(made, TrainSpec(data, 4), EvalSpec(data))
    assert result == pytest.approx({**made.measure(data), "global_step": 4}, rel=1e-6)
    job = made._job(Mode.EVALUATE, made._read_input(data, Mode.EVALUATE))
    rows = job.place(made._restore(job, None)[1])["weights"]
    assert isinstance(rows, StageRows)
    sizes = [sum(int(np.prod(shape)) for shape in tree.shapes) for tree in rows.layout.trees]
    assert sizes == [6 * 8 + 8 + 8 * 7 + 7 + 6 * 7 + 7, 7 * 3 + 3]
    assert {shard.data.shape for shard in rows.rows["float32"].addressable_shards} == {(1, max(sizes))}


def wide(params: Any) -> ModelSpec:
    """Four stages with as many weights each."""

    def stage(number: int) -> Any:
        return lambda weights, x: jnp.tanh(x @ weights[str(number)])

    def draw(key: Any) -> Any:
        return {str(n): jax.random.normal(jax.random.fold_in(key, n), (WIDTH, WIDTH)) / 10 for n in range(4)}

    return ModelSpec(
        init=draw, stages=[stage(number) for number in range(4)], optimizer=optax.sgd(0.2, momentum=0.9)
    )


WIDTH = 128


@pytest.mark.slow
def test_a_model_is_drawn_and_restored_without_a_device_that_holds_more_than_two_copies_of_a_stage(
    tmp_path: Path,
) -> None:
    made = estimator(tmp_path, wide, batch_size=4)
    given = np.ones((8, WIDTH), np.float32), np.arange(8)
    job, served = (made._job(mode, made._read_input(given, mode)) for mode in (Mode.TRAIN, Mode.EVALUATE))
    with watch_devices() as most:
        state = _first_state(made, job)
    whole = jax.jit(partial(model.init, job))(stream(seed_key(made.config.seed), "init", 0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    assert all(size / 4 < held < 0.6 * size for held in most.values()), (most, size)
    here = stage_rows.undivided(state)
    assert jax.tree.structure(here) == jax.tree.structure(whole)
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(whole), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, position={})
    with watch_devices() as most:
        rows = served.place(made._restore(served, None)[1])["weights"]
    assert all(size / 9 < held < 0.3 * size for held in most.values()), (most, size)
    for name, kernel in stage_rows.whole(rows).items():
        assert kernel.tobytes() == np.asarray(whole["weights"][name]).tobytes()


@pytest.mark.slow
def test_the_optimizer_and_the_metrics_may_be_functions_as_they_were(whole: Any, tmp_path: Path) -> None:
    def optimizer_function(outputs: Any, labels: Any) -> Any:
        return optax.sgd(0.2, momentum=0.9), optax.softmax_cross_entropy_with_integer_labels(outputs, labels)

    def eval_metrics_fn(outputs: Any, labels: Any) -> Any:
        loss = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        return {"loss": 2 * loss, "accuracy": right(outputs, labels), "first": outputs[:, 0]}

    spec = {
        **TWO,
        "optimizer": None,
        "metrics": {},
        "optimizer_function": optimizer_function,
        "eval_metrics_fn": eval_metrics_fn,
    }
    found, _, made = run(tmp_path, pipelined, {"spec": spec})
    assert_close(found, whole[0], 2e-6)
    result, expected = made.measure(data), whole[2].measure(data)
    assert result["loss"] == pytest.approx(2 * expected["loss"], rel=1e-5)
    assert result["accuracy"] == expected["accuracy"] and abs(result["first"]) > 1e-3


def normalised(weights: Any, state: Any, x: Any, *, train: bool) -> Any:
    """Batch norm without its own scale: by the batch in training, by moving averages else."""
    mean = x.mean(0) if train else state["norm"]["mean"]
    moved = {"norm": {"mean": 0.9 * state["norm"]["mean"] + 0.1 * x.mean(0)}} if train else {}
    return jnp.tanh(dense_of(weights["one"], x - mean)), moved


def dense_of(layer: Any, x: Any) -> Any:
    return x @ layer["kernel"] + layer["bias"]


def last_of_two(weights: Any, state: Any, y: Any) -> Any:
    return dense_of(weights["two"], y)[:, :3], {}


def with_state(stage: Any = normalised, **fields: Any) -> Any:
    def model(params: Any) -> ModelSpec:
        return ModelSpec(
            init=lambda key: (
                {name: init(key)[name] for name in ("one", "two")},
                {"norm": {"mean": jnp.ones(6)}},
            ),
            stages=[stage, last_of_two],
            stateful=True,
            optimizer=optax.sgd(0.2),
            **fields,
        )

    return model


@pytest.mark.slow
def test_the_state_of_a_stage_goes_from_part_to_part(tmp_path: Path) -> None:
    merged = estimator(tmp_path / "merged", with_state(device_mapping=[0, 0]), accumulation=4)
    divided = estimator(tmp_path / "divided", with_state(), accumulation=4)
    results = [made.train(data, steps=3).measure(data) for made in (merged, divided)]
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert_close(weights(divided), weights(merged), 2e-6)
    found = []
    for made in (merged, divided):
        job = made._job(Mode.EVALUATE, made._read_input(data, Mode.EVALUATE))
        found.append(np.asarray(made._restore(job, None)[1]["model"]["norm"]["mean"]))
    assert abs(found[0] - 1).max() > 0.1
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


def test_the_pages_example_runs_in_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "estimator.md").read_text()
    (program,) = (text for text in re.findall("```python\n(.*?)```", page, re.DOTALL) if "stages=" in text)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    made, given = names["estimator"], (names["x"], names["y"])
    assert made._job(Mode.TRAIN, made._read_input(given, Mode.TRAIN)).mesh.shape["stage"] == 2


@pytest.mark.slow
def test_half_precision_rounds_alike_in_stages(tmp_path: Path) -> None:
    config = {"precision": "16.16", "accumulation": 2}
    merged, _, _ = run(tmp_path / "merged", undivided, **config)
    staged, _, _ = run(tmp_path / "staged", pipelined, {"spec": {"device_mapping": [0, 1, 1]}}, **config)
    assert {leaf.dtype for leaf in staged.values()} == {np.dtype(jnp.bfloat16)}
    assert_close(staged, merged, 0.02)  # a few units of the last of eight bits
