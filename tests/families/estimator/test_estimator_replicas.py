"""Evaluation and prediction on the devices of all replicas: every sample once, and what one device gives."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import X, Y, data, right, small, weights

from hotloop import Arrays, EvalSpec, ModelSpec, TrainSpec, train_and_evaluate
from hotloop.families.estimator.config import Mode
from same_numbers import assert_close, with_moved_weight

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


@pytest.fixture(scope="module")
def one(tmp_path_factory: Any) -> Any:
    return small(tmp_path_factory.mktemp("one")).train(data, steps=30)


def over_all(one: Any, replicas: int = 4, **config: Any) -> Any:
    return small(one.model_dir, replicas=replicas, **config)


@pytest.mark.parametrize("count", [200, 37, 3])
@pytest.mark.parametrize("batch", [16, 7])
def test_every_sample_is_evaluated_once_whatever_the_batch(count: int, batch: int, one: Any) -> None:
    given = lambda: Arrays(X[:count], Y[:count], batch_size=batch)  # noqa: E731
    found, expected = over_all(one, batch_size=batch).measure(given), one.measure(given)
    assert found["samples"] == count and expected["loss"] > 0.01
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_changed_label_is_seen_by_every_replica(one: Any) -> None:
    everywhere = over_all(one)
    right_now = everywhere.measure(data)["accuracy"]
    for place in range(0, 16, 4):  # one of each replica's share of the first batch
        labels = Y.copy()
        labels[place] = 1 - labels[place]
        assert abs(everywhere.measure(lambda: (X, labels))["accuracy"] - right_now) == pytest.approx(1 / 200)  # noqa: B023


def test_a_moved_weight_is_seen_by_all(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = over_all(one)
    before, restore = everywhere.measure(data)["loss"], everywhere._restore

    def moved(*given: Any) -> Any:
        update, state = restore(*given)
        return update, with_moved_weight(state, "weights", "kernel")

    monkeypatch.setattr(everywhere, "_restore", moved)
    assert abs(everywhere.measure(data)["loss"] / before - 1) > 1e-5


def test_batches_of_a_loader_are_shared_too(one: Any) -> None:
    batches = [(X[:16], Y[:16]), (X[16:32], Y[16:32]), (X[32:35], Y[32:35])]
    everywhere = over_all(one, 3)
    assert everywhere.measure(lambda: batches) == pytest.approx(one.measure(lambda: batches), rel=1e-6)
    assert everywhere.measure(lambda: batches, steps=2)["samples"] == 32


@pytest.mark.parametrize(("replicas", "count"), [(4, 33), (3, 33), (4, 2)])
def test_a_row_is_predicted_for_every_sample_in_order(replicas: int, count: int, one: Any) -> None:
    found, expected = (list(each.predict(lambda: X[:count])) for each in (over_all(one, replicas), one))
    assert len(found) == count
    for row, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(row["logits"], wanted["logits"], atol=1e-6)
        assert row["class"] == wanted["class"]
    logits = np.array([row["logits"] for row in found])
    assert np.isfinite(logits).all() and len(np.unique(logits[:, 0])) == count


def test_each_device_has_its_share(one: Any) -> None:
    shapes: list[Any] = []

    def model() -> ModelSpec:
        def apply(weights: Any, x: Any) -> Any:
            jax.debug.inspect_array_sharding(
                x, callback=lambda found: shapes.append(found.shard_shape(x.shape))
            )
            return x @ weights["kernel"] + weights["bias"]

        return ModelSpec(
            init=lambda key: {"kernel": jnp.zeros((5, 2)), "bias": jnp.zeros(2)},
            apply=apply,
            metrics={"accuracy": right},
            optimizer=optax.sgd(0.1),
        )

    small(one.model_dir, model, replicas=4).measure(data)
    assert shapes and set(shapes) == {(4, 5)}


def test_fewer_devices_than_replicas_are_enough_to_evaluate_and_predict(one: Any, tmp_path: Path) -> None:
    many = over_all(one, 64)
    assert many.measure(data) == pytest.approx(one.measure(data), rel=1e-6)
    assert len(list(many.predict(lambda: X[:5]))) == 5
    source = many._read_input(data, Mode.EVALUATE)
    assert many._job(Mode.EVALUATE, source).mesh.shape["replica"] == jax.device_count()


@pytest.mark.slow
def test_a_training_on_replicas_evaluates_on_them(tmp_path: Path) -> None:
    results = [
        train_and_evaluate(
            small(tmp_path / str(replicas), replicas=replicas, checkpoint_steps=10),
            TrainSpec(data, 20),
            EvalSpec(data),
        )
        for replicas in (1, 2)
    ]
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[0]["samples"] == 200


@pytest.mark.slow
def test_dropout_of_a_flax_module_is_the_same_for_every_split(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any):
            self.first, self.last = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(nnx.relu(self.first(x))))

    def train(replicas: int, accumulation: int) -> Any:
        model = lambda: ModelSpec(module=lambda rngs: Net(rngs), optimizer=optax.sgd(0.1))  # noqa: E731
        folder = tmp_path / f"{replicas}{accumulation}"
        return weights(
            small(folder, model, replicas=replicas, accumulation=accumulation).train(data, steps=12)
        )

    one = train(1, 1)
    for split in ((4, 1), (1, 4), (2, 2)):
        assert_close(train(*split), one, 2e-6)
