"""A network as it is exported: what `predict` computes, norms folded once, the step that was asked for."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.checkpoint import Checkpoints, named_leaves
from hotloop.engine.checkpoint_folder import KeepAll
from hotloop.engine.exportable import FULL, HALF
from hotloop.errors import CheckpointError, OptionError
from hotloop.families.cnn import export, images
from hotloop.families.cnn.network import build, inference_logits
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.saved_network import FAMILY, SavedNetwork


def write_checkpoints(folder, precision="32.32"):
    """Steps 5 and 10 of a network with norms to fold, for tiny grey images; the weights of both."""
    saved = SavedNetwork(build("toy_model_bn", (28, 28, 1), 10), "mnist", precision, "bfloat16", 5.0)
    saved.write(folder)
    generator, states = np.random.default_rng(0), {}
    with Checkpoints(folder, KeepAll(), family=FAMILY) as checkpoints:
        for step in (5, 10):
            states[step] = jax.tree.map(
                lambda form: np.asarray(generator.uniform(0.1, 1, form.shape), form.dtype), saved.weights()
            )
            checkpoints.save(step, states[step], position={})
    return saved, states


@pytest.mark.parametrize("precision", ["32.32", "16.16"])
def test_answers_are_those_of_the_network_with_its_norms(precision, tmp_path):
    saved, states = write_checkpoints(tmp_path, precision)
    model = export.from_run(tmp_path, top=3)
    pixels = model.examples["image"]
    found = jax.jit(model.function)(model.weights, model.examples)
    seen = images.preprocess("mnist", jnp.asarray(pixels))
    logits = jax.jit(partial(inference_logits, saved.network, saved.policy))(states[10], seen)
    shares = np.asarray(jax.nn.softmax(logits))
    assert model.tolerance == (FULL if precision == "32.32" else HALF)
    np.testing.assert_allclose(found["probabilities"], shares, atol=model.tolerance / 10)
    order = np.argsort(-np.asarray(found["probabilities"]), kind="stable")[:, :3]
    assert found["classes"].tolist() == order.tolist()
    np.testing.assert_array_equal(
        found["scores"], np.take_along_axis(np.asarray(found["probabilities"]), order, 1)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(model.weights["params"])} == {saved.policy.compute}


def test_a_step_is_chosen_and_one_that_is_not_there_named(tmp_path):
    _, states = write_checkpoints(tmp_path)
    assert export.from_run(tmp_path).source["step"] == 10
    older = export.from_run(tmp_path, step=5)
    assert older.source["step"] == 5
    np.testing.assert_array_equal(
        older.weights["params"]["dense"]["kernel"], states[5]["params"]["dense"]["kernel"]
    )
    with pytest.raises(CheckpointError, match=r"no step 7 in .*complete steps: \[5, 10\]"):
        export.from_run(tmp_path, step=7)
    with pytest.raises(CheckpointError, match=r"no validation of a checkpoint"):
        export.from_run(tmp_path, best=True)
    with pytest.raises(OptionError, match="top=11: there are only 10 classes"):
        export.from_run(tmp_path, top=11)


def test_a_model_is_made_again_from_what_its_folder_says(tmp_path):
    write_checkpoints(tmp_path)
    model = export.from_run(tmp_path, top=4)
    about = json.loads(json.dumps({"config": model.config, "classes": model.classes, "source": {}}))
    weights = {name: value for name, value in model.weights.items() if name != "statistics"}
    again = export.rebuild(about, weights | {"statistics": model.weights["statistics"]}, model.examples)
    assert again.signature == model.signature and again.classes == model.classes
    both = [jax.jit(each.function)(each.weights, model.examples) for each in (model, again)]
    np.testing.assert_array_equal(both[0]["probabilities"], both[1]["probabilities"])


def test_without_a_checkpoint_weights_are_random_and_that_is_loud():
    config = TrainConfig(model_name="toy_model", precision="32.32", seed=3)
    model, again = (export.from_options(config) for _ in range(2))
    assert model.warnings and "RANDOM WEIGHTS" in model.warnings[0]
    assert model.source["run"] is None and "random" in model.source["data"]
    for name, leaf in named_leaves(model.weights).items():
        np.testing.assert_array_equal(leaf, named_leaves(again.weights)[name])
