"""`--freeze`: which layers it names, an optimiser that leaves them alone, norms that go by what they have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cnn_words import job_of

from hotloop.engine import optim
from hotloop.engine.keys import seed_key
from hotloop.errors import OptionError
from hotloop.families.cnn import model
from hotloop.families.cnn.freezing import count_weights, find_frozen, leave_out
from hotloop.families.cnn.network import NormChoice, build
from hotloop.families.cnn.options import MODELS
from hotloop.families.cnn.speed import training_flops
from hotloop.options import Params

WORDS = ("--model", "toy_model_bn", "--precision", "32.32", "--seed", "1", "--micro-batch-size", "4")


def network_of(model):
    return build(model, (64, 64, 3) if model.startswith("resnet") else (32, 32, 3), 10)


@pytest.mark.parametrize(
    ("model", "freeze", "last", "first"),
    [
        ("resnet18", "stem", "conv1_bn", "conv2_block1_0_conv"),
        ("resnet18", "stages:1", "conv2_block2_2_bn", "conv3_block1_0_conv"),
        ("resnet50", "stages:3", "conv4_block6_3_bn", "conv5_block1_0_conv"),
        ("resnet50", "stages:4", "conv5_block3_3_bn", "predictions"),
        ("resnet50", "all-but-classifier", "conv5_block3_3_bn", "predictions"),
        ("cifar_resnet20", "stem", "conv1_bn", "conv2_block1_layer1_conv"),
        ("cifar_resnet20", "stages:2", "conv3_block3_layer2_bn", "conv4_block1_layer1_conv_ds"),
        ("toy_model", "stem", "conv2d_0", "conv2d_1"),
        ("toy_model_bn", "stages:1", "bn_1", "dense"),
    ],
)
def test_the_first_layers_up_to_a_stage_are_frozen(model, freeze, last, first):
    network = network_of(model)
    frozen = find_frozen(network, freeze)
    layers = [node.name for node in network.nodes if node.parameters]
    assert [name in frozen for name in layers] == [place < len(frozen) for place in range(len(layers))]
    assert layers[len(frozen) - 1 : len(frozen) + 1] == [last, first]


@pytest.mark.parametrize("model", [*MODELS, "cifar_resnet14"])
def test_the_classifier_of_every_model_is_always_trained(model):
    network = network_of(model)
    trained, every = count_weights(network, find_frozen(network, "all-but-classifier"))
    assert trained == network.nodes[-1].weights and every == sum(node.weights for node in network.nodes)


def test_group_norms_belong_to_stages_too():
    network = build("resnet18", (64, 64, 3), 10, NormChoice("group", groups=4))
    assert {"conv1_conv", "conv1_gn"} == find_frozen(network, "stem")


def test_more_stages_than_there_are_name_the_most():
    with pytest.raises(
        OptionError, match=r"--freeze stages:5: resnet18 has 4 stages; stages:4 is all of them"
    ):
        find_frozen(network_of("resnet18"), "stages:5")


def test_nothing_goes_back_into_frozen_layers_in_what_is_told_about_speed():
    network = network_of("toy_model")
    first, second, last = (node.flops for node in network.nodes if node.flops)
    assert training_flops(network) == 3 * (first + second + last)
    assert training_flops(network, find_frozen(network, "stem")) == first + 3 * (second + last)
    assert training_flops(network, find_frozen(network, "all-but-classifier")) == first + second + 3 * last


RULES = {
    "sgd": Params(momentum=0.9),
    "lars": Params(momentum=0.9, weight_decay=1e-2, eeta=0.1, epsilon=1e-8),
    "adamw": Params(weight_decay=0.1),
    "muon": Params(),
}


@pytest.mark.parametrize("name", RULES)
def test_the_optimiser_steps_the_others_as_if_the_frozen_were_not_there(name):
    chain = optim.make(name, RULES[name], weight_decay=0.1, l2=0.1, global_batch_size=4)
    draws = np.random.default_rng(0)
    weights, gradients = (
        {layer: {"kernel": jnp.asarray(draws.normal(size=(3, 2)), jnp.float32)} for layer in "abc"}
        for _ in range(2)
    )
    weights["a"]["kernel"] = weights["a"]["kernel"].at[0, 0].set(-0.0)
    partly, alone = leave_out(chain, frozenset("a")), {name: weights[name] for name in "bc"}
    ours, theirs = partly.init(weights), chain.init(alone)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    moved = weights
    for _ in range(3):
        steps, ours = partly.update(gradients, ours, moved, rate=0.1)
        wanted, theirs = chain.update({name: gradients[name] for name in "bc"}, theirs, alone, rate=0.1)
        moved, alone = jax.tree.map(jnp.add, moved, steps), jax.tree.map(jnp.add, alone, wanted)
    found, wanted = (
        jax.tree.leaves(each) for each in ((moved["b"], moved["c"], ours), (*alone.values(), theirs))
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.asarray(moved["a"]["kernel"]).tobytes() == np.asarray(weights["a"]["kernel"]).tobytes()
    assert not np.array_equal(moved["b"]["kernel"], weights["b"]["kernel"])


def test_a_frozen_norm_goes_by_its_statistics_in_training():
    """As in evaluation, which knows no batch; and no statistics of the batch come back."""
    network = network_of("toy_model_bn")
    params, statistics = network.init(jax.random.key(0))
    draws = np.random.default_rng(5)
    statistics = jax.tree.map(
        lambda leaf: jnp.asarray(draws.uniform(0.5, 2, leaf.shape), jnp.float32), statistics
    )
    images = jnp.asarray(draws.normal(size=(4, 32, 32, 3)), jnp.float32)
    kept = {"bn_0": statistics["bn_0"], "bn_1": statistics["bn_1"]}
    found, batch = network.apply(params, {}, images, train=True, frozen=kept)
    wanted, _ = network.apply(params, statistics, images, train=False)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert batch == {}
    _, batch = network.apply(params, {}, images, train=True, frozen={"bn_0": statistics["bn_0"]})
    assert set(batch) == {"bn_1"}


def updated(devices, *words):
    """A state before and after two updates on random images."""
    job = job_of(*WORDS, *words, devices=devices)
    draws = np.random.default_rng(0)
    before = model.start(job, seed_key(1))
    state, update = before, jax.jit(model.update(job))
    for number in range(2):
        batch = {
            "image": draws.integers(0, 256, (job.batch.global_, 32, 32, 3), np.uint8),
            "label": draws.integers(0, 10, job.batch.global_, np.int32),
        }
        state, figures = update(state, batch, jax.random.key(number))
    assert np.isfinite(figures["loss"])
    return model.gather(before), model.gather(state)


SPLITS = {
    "one device": (1, ()),
    "accumulated": (1, ("--gradient-accumulation", "3")),
    "three replicas": (3, ("--num-replicas", "3")),
    "two stages": (2, ("--pipeline-splits", "conv2d_1", "--gradient-accumulation", "4")),
    "frozen stage": (2, ("--pipeline-splits", "dense", "--gradient-accumulation", "4")),
    "recomputed": (1, ("--pipeline-splits", "conv2d_1", "--device-mapping", "0", "0", "--recomputation")),
}


@pytest.mark.parametrize("way", SPLITS)
def test_frozen_layers_keep_every_bit_and_the_others_move(way):
    devices, words = SPLITS[way]
    freeze = "all-but-classifier" if way == "frozen stage" else "stem"
    decays = ("--weight-decay", "0.1", "--optimizer-params", "{momentum: 0.9}")
    before, after = updated(devices, "--freeze", freeze, *decays, *words)
    frozen = {"conv2d_0", "bn_0"} if freeze == "stem" else {"conv2d_0", "bn_0", "conv2d_1", "bn_1"}
    for part in ("params", "statistics"):
        for layer, leaves in before[part].items():
            for leaf, value in leaves.items():
                same = np.asarray(value).tobytes() == np.asarray(after[part][layer][leaf]).tobytes()
                assert same == (layer in frozen), f"{part} {layer} {leaf}"
    names = {name for path, _ in jax.tree.leaves_with_path(after["optimiser"]) for name in map(str, path)}
    assert not any(layer in name for layer in frozen for name in names)


def weights_of(network, seed=5):
    """Float32 parameters, and statistics that are not those that norms begin with."""
    params, statistics = jax.tree.map(np.asarray, network.init_on_host(jax.random.key(seed)))
    draws = np.random.default_rng(seed)
    return params, jax.tree.map(lambda leaf: draws.uniform(0.5, 2, leaf.shape).astype(np.float32), statistics)


@pytest.mark.parametrize("split", [(1, "--gradient-accumulation", "2"), (2, "--num-replicas", "2")])
def test_with_all_but_the_classifier_frozen_an_update_is_a_logistic_regression_on_features_of_evaluation(
    split,
):
    """In float64, from features that norms made by the statistics that they were given."""
    words = ("--dataset", "mnist", "--freeze", "all-but-classifier", *split[1:])
    job = job_of(*WORDS, *words, devices=split[0])
    network, (params, statistics) = job.network, weights_of(job.network)
    draws = np.random.default_rng(1)
    labels, images = draws.integers(0, 10, 8, np.int32), draws.integers(0, 256, (8, 28, 28, 1), np.uint8)
    state = model.start(job, seed_key(1), (params, statistics))
    after, _ = jax.jit(model.update(job))(state, {"image": images, "label": labels}, jax.random.key(2))
    seen = jnp.asarray(images / np.float32(255), jnp.float32)
    trees, last = jax.tree.map(jnp.asarray, (params, statistics)), len(network.nodes) - 1
    values, _ = network.run(*trees, {"images": seen}, 0, last, train=False)
    features = np.asarray(next(iter(values.values())), np.float64)
    kernel, bias = (params["dense"][name].astype(np.float64) for name in ("kernel", "bias"))
    logits = features @ kernel + bias
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    apart = (shares - np.eye(10)[labels]) / 8
    rate = float(job.rate(0))
    moved = model.gather(after)["params"]["dense"]
    assert np.abs(rate * features.T @ apart).max() > 1e-5
    np.testing.assert_allclose(moved["kernel"] - kernel, -rate * features.T @ apart, atol=1e-7)
    np.testing.assert_allclose(moved["bias"] - bias, -rate * apart.sum(0), atol=1e-7)


def test_stages_begin_with_the_weights_that_they_are_given():
    job = job_of(*WORDS, "--pipeline-splits", "conv2d_1", devices=2)
    given = weights_of(job.network)
    state = model.gather(model.start(job, seed_key(1), given))
    for part, tree in zip(("params", "statistics"), given, strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, state[part], tree))
