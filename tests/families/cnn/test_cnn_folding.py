"""Batch norms folded into convolutions: the same function, no less exact in sixteen bits."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine import precision
from hotloop.families.cnn.network import NormChoice, build, fold_norms, inference_logits

SHAPE = (32, 32, 3)
QUICK = {"xla_backend_optimization_level": 0}


def lively(network, seed=0):
    """Parameters and statistics as training might leave them: no scale is 0, no mean either."""
    params, statistics = network.init(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    for name, seen in statistics.items():
        size = seen["mean"].shape
        params[name] = {"scale": rng.uniform(0.5, 1.5, size), "offset": rng.normal(0, 0.3, size)}
        statistics[name] = {"mean": rng.normal(0, 0.5, size), "variance": rng.uniform(0.3, 3, size)}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (params, statistics))


def images(count=4):
    return np.random.default_rng(1).normal(size=(count, *SHAPE)).astype(np.float32)


@cache
def applied(network):
    """Compiled once for each network and type of its weights."""
    return jax.jit(lambda *a: network.apply(*a, train=False)[0], compiler_options=QUICK)


def plain(network, params, statistics, seen):
    return np.asarray(applied(network)(params, statistics, seen), np.float64)


def by_folding(network, params, statistics, seen):
    def run(params, statistics, seen):
        return network.apply(*fold_norms(network, params, statistics), seen, train=False)[0]

    return np.asarray(jax.jit(run, compiler_options=QUICK)(params, statistics, seen), np.float64)


@pytest.mark.parametrize(
    "model", ["cifar_resnet8", "toy_model_bn", pytest.param("resnet50", marks=pytest.mark.slow)]
)
def test_it_is_the_same_function(model):
    network = build(model, SHAPE, 10)
    weights = lively(network)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), weights)
        wanted = plain(network, *exact, jnp.asarray(images(), jnp.float64))
        found = by_folding(network, *exact, jnp.asarray(images(), jnp.float64))
    np.testing.assert_allclose(
        found, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max()
    )  # logits are float32


def test_every_norm_of_a_resnet_is_folded_and_no_other():
    for model, left in (("resnet50", 0), ("cifar_resnet20", 0), ("toy_model_bn", 2)):
        network = build(model, SHAPE, 10)
        forms = jax.eval_shape(network.init, jax.random.key(0))
        params, statistics = jax.eval_shape(lambda *a, of=network: fold_norms(of, *a), *forms)
        assert len(statistics) == left
        biased = [name for name, leaves in params.items() if set(leaves) == {"bias"}]
        assert len(biased) == len(forms[1]) - left
    network = build("cifar_resnet8", SHAPE, 10, NormChoice("group", groups=4))
    params, statistics = network.init(jax.random.key(0))
    assert fold_norms(network, params, statistics) == (params, {})


def test_a_convolution_that_something_else_reads_keeps_its_kernel():
    network = build("cifar_resnet8", SHAPE, 10)
    conv, norm = network.nodes[:2]
    params, statistics = network.init(jax.random.key(0))
    own = {norm.name: statistics[norm.name]}
    for others, left in ((), {}), ((replace(norm, name="other", kind="relu"),), own):
        cut = SimpleNamespace(nodes=(conv, norm, *others), epsilon=network.epsilon)
        assert fold_norms(cut, params, own)[1] == left


def test_bfloat16_is_no_further_from_the_exact_logits_than_without_folding():
    network = build("cifar_resnet8", SHAPE, 10)
    policy, seen = precision.parse("16.32", "bfloat16"), images(16)
    run = jax.jit(lambda state: inference_logits(network, policy, state, jnp.asarray(seen)))
    ratios = []
    for seed in range(3):
        params, statistics = lively(network, seed)
        exact = plain(network, params, statistics, seen)
        half = policy.to_compute(params)
        without = plain(network, half, statistics, policy.to_compute(jnp.asarray(seen)))
        found = np.asarray(run({"params": params, "statistics": statistics}), np.float64)
        ratios.append(np.std(found - exact) / np.std(without - exact))
    assert np.mean(ratios) < 1.3, ratios


def test_sixteen_bit_weights_are_scaled_in_float32():
    network = build("cifar_resnet8", SHAPE, 10)
    params, statistics = lively(network)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    made, _ = fold_norms(network, half, statistics)
    assert {leaf.dtype for name in statistics for leaf in made[name].values()} == {jnp.dtype("float32")}
