"""`hotloop cnn predict` and `import`: a checkpoint used alone, and somebody else's weights made into one."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cnn_command import called

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepAll
from hotloop.families.cnn import images, prediction, saved_network
from hotloop.families.cnn.network import build
from pictures import encoded, picture


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two steps of a toy network for CIFAR-10, and the second's weights."""
    pytest.importorskip("PIL")
    folder, generator = tmp_path_factory.mktemp("toy"), np.random.default_rng(0)
    about = saved_network.SavedNetwork(
        build("toy_model_bn", (32, 32, 3), 10), "cifar10", "32.32", "bfloat16", 5.0
    )
    about.write(folder)
    params, statistics = jax.eval_shape(about.network.init, jax.random.key(0))
    forms = {"params": params, "statistics": statistics}
    with Checkpoints(folder, KeepAll(), family=saved_network.FAMILY) as checkpoints:
        for step in (5, 10):
            state = jax.tree.map(lambda form: np.float32(generator.uniform(0.1, 1, form.shape)), forms)
            checkpoints.save(step, {**state, "optimiser": np.zeros(3, np.float32)}, position={})
    return folder, about, state


def test_predictions_are_the_softmax_of_the_networks_logits(checkpoint, tmp_path):
    folder, about, state = checkpoint
    paths = [tmp_path / "one.png", tmp_path / "two.jpeg"]
    for n, path in enumerate(paths):
        path.write_bytes(encoded(32, 32, seed=n, kind="PNG"))
    status, result, said = called("predict", folder, *paths, "--top", "3")
    assert status == 0 and result["step"] == 10
    from PIL import Image

    pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
    weights, seen = jax.tree.map(jnp.asarray, (state, images.preprocess("cifar10", pixels)))
    logits, _ = about.network.apply(weights["params"], weights["statistics"], seen, train=False)
    wanted = np.asarray(jax.nn.softmax(logits))
    for path, row in zip(paths, wanted, strict=True):
        found = result["predictions"][str(path)]
        assert [each["class"] for each in found] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([each["probability"] for each in found], np.sort(row)[::-1][:3], rtol=1e-4)
        assert found[0]["name"] in said


def test_an_image_that_is_far_from_those_of_the_training_is_named(checkpoint, tmp_path):
    kinds = {
        "like.png": (encoded(40, 32, kind="PNG"), ""),
        "grey.jpeg": (encoded(32, 32, mode="L"), "grey, and they were in colour"),
        "large.png": (encoded(300, 200, kind="PNG"), "of 300 x 200 pixels, and they had 32 x 32"),
        "small.png": (
            encoded(12, 12, mode="L", kind="PNG"),
            "colour; of 12 x 12 pixels, and they had 32 x 32",
        ),
        "long.png": (encoded(50, 20, kind="PNG"), "of 50 x 20 pixels, and they had 32 x 32"),
    }
    for name, (data, _) in kinds.items():
        (tmp_path / name).write_bytes(data)
    status, result, said = called("predict", checkpoint[0], *(tmp_path / name for name in kinds))
    assert status == 0 and len(result["predictions"]) == len(kinds)
    for name, (_, reason) in kinds.items():
        lines = [line for line in said.splitlines() if f"{name}: unlike the images of the training" in line]
        assert len(lines) == bool(reason) and all(line.endswith(reason) for line in lines), name


@pytest.mark.parametrize(
    ("size", "mode", "shape", "dataset", "said"),
    [
        ((28, 28), "RGB", (28, 28, 1), "mnist", ["in colour, and they were grey"]),
        ((28, 28), "L", (28, 28, 1), "mnist", []),
        ((900, 300), "RGB", (224, 224, 3), "imagenet", []),
        ((500, 100), "RGB", (224, 224, 3), "imagenet", ["of 500 x 100 pixels, and they had 224 x 224"]),
        ((60, 50), "L", (224, 224, 3), "folder", []),
    ],
)
def test_photographs_may_be_large_and_digits_are_grey(size, mode, shape, dataset, said):
    pytest.importorskip("PIL")
    image = picture(*size, mode=mode).convert("RGB")
    assert prediction.unlike_training(image, shape, dataset) == said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--top", "11"], "--top 11: there are only 10 classes"),
        (["--step", "7"], "no step 7"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(checkpoint, tmp_path, words, reason):
    path = tmp_path / "one.png"
    path.write_bytes(encoded(32, 32, kind="PNG"))
    status, result, _ = called("predict", checkpoint[0], path, *words)
    assert status == 2 and reason in result["error"]


def test_a_broken_or_missing_image_and_a_folder_without_checkpoints_are_named(checkpoint, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(encoded(32, 32, kind="PNG")[:60])
    for words, reason in (
        ([checkpoint[0], broken], "broken.png: not a whole image"),
        ([checkpoint[0], tmp_path / "none.png"], "none.png: cannot be read"),
        ([tmp_path, broken], "no network.json there"),
    ):
        status, result, _ = called("predict", *words)
        assert status == 2 and reason in result["error"]


def test_an_older_step_is_not_used_in_silence_where_the_newest_is_damaged(checkpoint, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint[0], folder)
    (folder / "00000010" / "state" / "_METADATA").write_text("")
    (tmp_path / "one.png").write_bytes(encoded(32, 32, kind="PNG"))
    status, result, said = called("predict", folder, tmp_path / "one.png")
    assert (status, result["step"]) == (0, 5) and "warning: skipped step 10: " in said


def test_imported_weights_are_a_checkpoint_that_is_not_written_over(tmp_path, monkeypatch):
    network = build("resnet18", (224, 224, 3), 3, variant="torch")
    generator = np.random.default_rng(0)
    forms = jax.eval_shape(network.init, jax.random.key(0))
    weights = jax.tree.map(lambda form: np.float32(generator.normal(0, 0.1, form.shape)), forms)
    monkeypatch.setattr("hotloop.families.cnn.torch_weights.recognise", lambda path: network)
    monkeypatch.setattr("hotloop.families.cnn.torch_weights.load", lambda path, chosen: weights)
    status, result, _ = called("import", tmp_path / "r18.safetensors", tmp_path / "out")
    assert status == 0 and (result["model"], result["classes"]) == ("resnet18", 3)
    known = saved_network.read_saved_network(tmp_path / "out")
    assert known.network == network
    with saved_network.checkpoints_at(tmp_path / "out").open() as checkpoints:
        restored = checkpoints.restore(known.weights(), in_part=True)
    assert restored.step == 0
    for mine, theirs in zip(
        jax.tree.leaves(restored.state["params"]), jax.tree.leaves(weights[0]), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    status, result, _ = called("import", tmp_path / "r18.safetensors", tmp_path / "out")
    assert status == 2 and "holds checkpoints already" in result["error"]
