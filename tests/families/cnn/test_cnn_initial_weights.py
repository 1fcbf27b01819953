"""`--init-from`: what is taken over from where, what is drawn anew, and what is refused by the name of the leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cnn_words import typed
from safetensors.numpy import load_file, save_file
from timm_files import drawn, write_timm

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepAll
from hotloop.engine.model_folder import write_model
from hotloop.errors import DataError, HotloopError, OptionError
from hotloop.families.cnn.export import from_run
from hotloop.families.cnn.initial_weights import begin_with, check_origin, find_variant
from hotloop.families.cnn.job import check_before_devices
from hotloop.families.cnn.network import NormChoice, build
from hotloop.families.cnn.presets import FAMILY
from hotloop.families.cnn.saved_network import SavedNetwork

KEY = jax.random.key(9)


@pytest.fixture(scope="module")
def timm(tmp_path_factory):
    _, params, statistics = drawn("resnet18", 7)
    return (
        write_timm(tmp_path_factory.mktemp("timm") / "r18.safetensors", params, statistics),
        params,
        statistics,
    )


def config_of(path, *words, model="resnet18"):
    return typed("--model", model, "--init-from", str(path), *words).config


def checkpoint(folder, network, classes=(), seed=4):
    params, statistics = network.init(jax.random.key(seed))
    SavedNetwork(network, "folder", "32.32", "bfloat16", 1.0, own_classes=classes).write(folder)
    with Checkpoints(folder, KeepAll(), family=FAMILY) as checkpoints:
        checkpoints.save(3, {"params": params, "statistics": statistics}, position={})
        checkpoints.wait()
    return params, statistics


def same(found, wanted, but=()):
    for layer in wanted:
        for leaf in wanted[layer]:
            equal = np.array_equal(found[layer][leaf], wanted[layer][leaf])
            assert equal == (layer not in but), f"{layer}/{leaf}"


@pytest.mark.parametrize("classes", [7, 4])
def test_a_file_of_timm_is_taken_over_and_the_classifier_where_the_classes_are_as_many(timm, classes):
    path, params, statistics = timm
    network = build("resnet18", (32, 32, 3), classes, variant="torch")
    config = config_of(path)
    assert find_variant(config) == "torch"
    check_origin(config, network)
    (found, kept), said = begin_with(config, network, (), KEY)
    assert set(found) == {node.name for node in network.nodes if node.parameters}
    same(kept, statistics)
    if classes == 7:
        same(found, params)
        assert said == f"weights from {path}"
    else:
        same({**found, "predictions": params["predictions"]}, params)
        assert found["predictions"]["kernel"].shape == (512, 4)
        np.testing.assert_array_equal(
            found["predictions"]["kernel"], network.init_on_host(KEY)[0]["predictions"]["kernel"]
        )
        assert said.endswith("the classifier predictions is drawn anew: 4 classes, 7 there")


def test_a_checkpoint_is_taken_over_and_the_classifier_where_the_classes_have_the_same_names(tmp_path):
    network = build("toy_model_bn", (32, 32, 3), 3)
    params, statistics = checkpoint(tmp_path / "old", network, ("a", "b", "c"))
    config = config_of(tmp_path / "old", model="toy_model_bn")
    (found, kept), said = begin_with(config, network, ("a", "b", "c"), KEY)
    same(found, params)
    same(kept, statistics)
    assert "anew" not in said
    (found, _), said = begin_with(config, network, ("a", "c", "d"), KEY)
    assert not np.array_equal(found["dense"]["kernel"], params["dense"]["kernel"])
    assert said.endswith("the classifier dense is drawn anew: the classes have other names there")
    larger = build("toy_model_bn", (64, 64, 3), 3)
    (found, _), said = begin_with(config, larger, ("a", "b", "c"), KEY)
    assert found["dense"]["kernel"].shape == (larger.nodes[-1].parameters["kernel"].shape)
    assert said.endswith("drawn anew: images of 64 x 64, 32 x 32 there")


def test_an_exported_model_is_taken_over_where_its_norms_are_frozen(tmp_path):
    """Its norms have become biases: the same logits, by norms that do nothing but add them."""
    network = build("cifar_resnet8", (32, 32, 3), 3)
    params, _ = checkpoint(tmp_path / "old", network)
    model, _ = write_model(from_run(tmp_path / "old"), tmp_path / "exported", ladder=(1,))
    frozen = config_of(model, "--freeze", "all-but-classifier", model="cifar_resnet8")
    check_origin(frozen, network)
    (found, kept), _ = begin_with(frozen, network, (), KEY)
    images = jax.random.normal(KEY, (2, 32, 32, 3))
    logits = [
        network.apply(*jax.tree.map(jnp.asarray, (each, moving)), images, train=False)[0]
        for each, moving in ((found, kept), (params, network.init(KEY)[1]))
    ]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="an exported model has its norms folded into its kernels"):
        check_origin(config_of(model, "--freeze", "stages:1", model="cifar_resnet8"), network)


def broken(timm, path, change):
    arrays = load_file(timm[0])
    change(arrays)
    save_file(arrays, path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("layer2.0.bn1.bias"), r"tensors of resnet18 are missing, layer2\.0\.bn1\.bias first"),
        (lambda a: a.update({"layer1.0.se.weight": np.zeros(3, "f4")}), r"'layer1\.0\.se\.weight' first"),
        (lambda a: a.update({"conv1.weight": np.zeros((8, 8, 3, 3), "f4")}), r"conv1\.weight has shape \[8, 8, 3, 3\]"),
        (lambda a: a.pop("fc.bias"), "holds none of resnet18"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(timm, tmp_path, change, message):
    path = broken(timm, tmp_path / "x.safetensors", change)
    network = build("resnet18", (32, 32, 3), 4, variant="torch")
    with pytest.raises(DataError, match=rf"^--init-from .*{message}"):
        begin_with(config_of(path), network, (), KEY)


def test_leaves_of_another_network_are_named(timm, tmp_path):
    grey = build("resnet18", (32, 32, 1), 4, variant="torch")
    with pytest.raises(
        OptionError, match=r"conv1_conv/kernel has shape \[7, 7, 3, 64\], and \[7, 7, 1, 64\] is needed"
    ):
        check_origin(config_of(timm[0]), grey)
    groups = build("resnet18", (32, 32, 3), 4, NormChoice("group", groups=4), variant="torch")
    with pytest.raises(OptionError, match="has conv1_bn/offset, which resnet18 has not with group norm"):
        check_origin(config_of(timm[0]), groups)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: None, "no such file or folder; give a .safetensors file"),
        (lambda at: at.mkdir(), r"no network\.json there"),
        (lambda at: at.write_bytes(b"1234567890"), "not a whole safetensors file"),
    ],
)
def test_a_path_with_nothing_of_use_is_refused_before_a_device_is_opened(tmp_path, make, message):
    make(tmp_path / "path")
    with pytest.raises(HotloopError, match=rf"^--init-from .*{message}"):
        check_before_devices(config_of(tmp_path / "path"))


def test_another_model_is_named(timm):
    with pytest.raises(OptionError, match="holds a resnet18, and --model is resnet50; give --model resnet18"):
        check_before_devices(config_of(timm[0], model="resnet50"))
    with pytest.raises(
        OptionError, match="holds a resnet18, and --model is toy_model; give --model resnet18"
    ):
        check_before_devices(config_of(timm[0], model="toy_model"))


def test_without_a_training_there_is_nothing_to_begin(timm):
    with pytest.raises(OptionError, match="there is no training to begin; leave it out"):
        config_of(timm[0], "--training", "False")
