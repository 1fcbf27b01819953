"""Wherever an Estimator takes a path it takes text: a model_dir, a checkpoint, data. Curves are one argument away."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import X, Y, data, same, small, weights

from hotloop import Estimator, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from hotloop.engine import sinks
from hotloop.errors import HotloopError, MissingExtra


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("paths")
    np.savez(folder / "train.npz", features=X, labels=Y)
    np.savez(folder / "other.npz", x=X)
    estimator = small(folder / "model", checkpoint_steps=10, voice={"quiet": True})
    return folder, estimator.train(str(folder / "train.npz"), steps=20)


def test_arrays_may_be_given_by_the_path_of_their_file(trained: Any, tmp_path: Path) -> None:
    folder, estimator = trained
    assert same(weights(estimator), weights(small(tmp_path, checkpoint_steps=10).train(data, steps=20)))
    file = folder / "train.npz"
    assert estimator.measure(str(file)) == estimator.measure(lambda: file) == estimator.measure(data)
    for path, said in (
        ("other.npz", "other.npz has x: it must have features"),
        ("train.csv", "train.csv: it may be that of an .npz file"),
        ("nothing.npz", "nothing.npz"),
    ):
        with pytest.raises(HotloopError, match=said):
            estimator.evaluate(str(folder / path))


def test_a_checkpoint_may_be_given_by_its_number_or_its_path(trained: Any, tmp_path: Path) -> None:
    folder, estimator = trained
    by_number = estimator.measure(data, checkpoint=10)
    for path in (folder / "model" / "checkpoints" / "00000010", f"{folder}/model/checkpoints/10"):
        assert estimator.measure(data, checkpoint=path) == by_number
    other = small(tmp_path)  # has none of its own
    assert other.measure(data, checkpoint=str(folder / "model")) == estimator.measure(data)
    first = next(other.predict(X, checkpoint=f"{folder}/model/checkpoints/10"))
    assert np.array_equal(first["logits"], next(estimator.predict(X, checkpoint=10))["logits"])


def test_folders_may_be_text(trained: Any, tmp_path: Path) -> None:
    folder, estimator = trained
    again = Estimator(estimator._model_fn, model_dir=f"{folder}/model", quiet=True)
    assert again.latest_checkpoint() == 20 and again.model_dir == folder / "model"
    config = RunConfig(f"{tmp_path}/warm", batch_size=16)
    warm = Estimator(
        estimator._model_fn, config, {"rate": 1e-30}, warm_start_from=f"{folder}/model", quiet=True
    )
    warm.train(data, steps=1)
    assert weights(warm)["kernel"] == pytest.approx(weights(estimator)["kernel"], rel=1e-6)


def read_tags(folder: Path) -> dict[str, list[int]]:
    """The updates of each curve, from the files of TensorBoard."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob("events.out.*")):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    return found


def test_curves_of_logs_and_evaluations_are_one_argument_away(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    spec = {"checkpoint_steps": 10, "log_steps": 5, "tensorboard": True}
    estimator = small(tmp_path, voice={"quiet": True}, **spec)
    train_and_evaluate(estimator, TrainSpec(data, 20), EvalSpec(data))
    estimator.evaluate(data, name="again", checkpoint=10)
    tags = read_tags(tmp_path / "tensorboard")
    assert (tags["log/loss"], tags["validation/accuracy"]) == ([5, 10, 15, 20], [10, 20])
    assert read_tags(tmp_path / "tensorboard" / "eval_again")["validation/loss"] == [10]
    assert json.loads((tmp_path / "config.json").read_text())["tensorboard"] is True


def test_curves_without_their_package_are_refused_before_any_work(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"needs tensorboardX: pip install 'hotloop\[tensorboard\]'"):
        small(tmp_path / "none", tensorboard=True)
    assert not (tmp_path / "none").exists()
