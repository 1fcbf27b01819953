"""The example's network: its size, first values, dropout, and its numbers against numpy and torch in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.keys import sample_keys
from hotloop.families.estimator.cifar import network
from hotloop.families.estimator.cifar.config import LAYERS
from hotloop.families.estimator.cifar.network import KERAS, NETWORKS, TF2
from hotloop.layers.paths import force_path

GENERATOR = np.random.default_rng(0)
QUICK = {"xla_backend_optimization_level": 0}
IMAGES = GENERATOR.integers(0, 256, (3, 32, 32, 3), np.uint8)
KEYS = sample_keys(jax.random.key(5), 0, 4)
RESULT = GENERATOR.normal(size=(3, 10))  # weights of the logits in a loss whose gradient is compared


@pytest.fixture(scope="module")
def weights():
    drawn = jax.device_get(KERAS.init(jax.random.key(0)))
    # Biases that are not zero, so that a forgotten one is found.
    return {
        name: {**layer, "bias": GENERATOR.normal(size=layer["bias"].shape).astype(np.float32) / 5}
        for name, layer in drawn.items()
    }


def test_the_network_has_the_parameters_of_the_original():
    weights = KERAS.init(jax.random.key(0))
    sizes = {name: sum(leaf.size for leaf in layer.values()) for name, layer in weights.items()}
    assert sizes == {
        "conv1": 896, "conv2": 9_248, "conv3": 18_496, "conv4": 36_928, "dense1": 1_180_160, "dense2": 5_130,
    }  # fmt: skip
    assert sum(sizes.values()) == KERAS.parameters == 1_250_858
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {np.dtype(np.float32)}


def test_kernels_start_glorot_uniform_and_biases_at_zero():
    for name, layer in KERAS.init(jax.random.key(1)).items():
        *space, inputs, outputs = layer["kernel"].shape
        limit = (6 / (np.prod(space) * (inputs + outputs))) ** 0.5
        kernel = np.asarray(layer["kernel"], np.float64)
        assert abs(kernel).max() <= limit * (1 + 1e-6), name
        # The variance of n uniforms has a standard error of sqrt(4 / 45 n) limit^2.
        assert kernel.var() == pytest.approx(limit**2 / 3, abs=4 * limit**2 * (4 / 45 / kernel.size) ** 0.5)
        assert not layer["bias"].any()


def reference(weights, images):
    """The logits by numpy in float64, layer by layer as they are told in the docs."""

    def conv(name, x, pad):
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))
        y = np.einsum("nhwcij,ijco->nhwo", windows, weights[name]["kernel"]) + weights[name]["bias"]
        return np.maximum(y, 0)

    def pool(x):
        rows, columns = x.shape[1] // 2, x.shape[2] // 2
        return x[:, : 2 * rows, : 2 * columns].reshape(len(x), rows, 2, columns, 2, -1).max((2, 4))

    x = pool(conv("conv2", conv("conv1", images / 255.0, 1), 0))
    x = pool(conv("conv4", conv("conv3", x, 1), 0)).reshape(len(x), -1)
    x = np.maximum(x @ weights["dense1"]["kernel"] + weights["dense1"]["bias"], 0)
    return x @ weights["dense2"]["kernel"] + weights["dense2"]["bias"]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_logits_are_those_of_numpy_in_float64(weights, dtype):
    found = jax.jit(KERAS.apply, compiler_options=QUICK)(weights, IMAGES.astype(dtype))
    wide = jax.tree.map(np.float64, weights)
    np.testing.assert_allclose(found, reference(wide, IMAGES.astype(np.float64)), rtol=1e-4, atol=2e-5)
    assert found.dtype == np.float32


def test_half_precision_computes_in_its_type_and_answers_in_float32(weights):
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), weights)
    text = jax.jit(KERAS.apply).lower(half, IMAGES).as_text()
    convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert len(convolutions) >= 4 and all("bf16>) ->" in line for line in convolutions)
    found = jax.jit(KERAS.apply, compiler_options=QUICK)(half, IMAGES)
    assert found.dtype == np.float32
    exact = reference(jax.tree.map(np.float64, weights), IMAGES.astype(np.float64))
    np.testing.assert_allclose(found, exact, atol=0.03 * abs(exact).max())


def test_gradients_are_those_of_torch_in_float64(weights):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    leaves = jax.tree.map(lambda leaf: torch.tensor(np.float64(leaf), requires_grad=True), weights)

    def conv(name, x, pad):
        kernel, bias = leaves[name]["kernel"].permute(3, 2, 0, 1), leaves[name]["bias"]
        return torch.relu(functional.conv2d(x, kernel, bias, padding=pad))

    x = torch.tensor(IMAGES / 255.0).permute(0, 3, 1, 2)
    x = functional.max_pool2d(conv("conv2", conv("conv1", x, 1), 0), 2)
    x = functional.max_pool2d(conv("conv4", conv("conv3", x, 1), 0), 2)
    x = x.permute(0, 2, 3, 1).flatten(1)
    x = torch.relu(x @ leaves["dense1"]["kernel"] + leaves["dense1"]["bias"])
    logits = x @ leaves["dense2"]["kernel"] + leaves["dense2"]["bias"]
    (logits * torch.tensor(RESULT)).sum().backward()

    def loss(weights):
        return (KERAS.apply(weights, IMAGES) * RESULT).sum()

    with jax.enable_x64(True):
        ours = jax.jit(jax.grad(loss), compiler_options=QUICK)(jax.tree.map(np.float64, weights))
    for name, layer in leaves.items():
        for kind, leaf in layer.items():
            np.testing.assert_allclose(ours[name][kind], leaf.grad.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_dropout_drops_its_rate_and_scales_what_is_left(rate):
    samples, size = 64, 5_000
    (drawn,) = network.random_bytes(sample_keys(jax.random.key(3), 0, samples), [size])
    y = np.asarray(network.apply_dropout(jnp.ones((samples, size)), drawn, rate))
    assert set(np.unique(y)) == {0, np.float32(1 / (1 - rate))}
    error = (rate * (1 - rate) / y.size) ** 0.5
    assert (y == 0).mean() == pytest.approx(rate, abs=4 * error)
    # Neither a sample nor a place in it is dropped more often than the others.
    for axis, count in ((0, samples), (1, size)):
        shares = (y == 0).mean(axis)
        assert shares.var() == pytest.approx(rate * (1 - rate) / count, rel=0.1 if axis == 0 else 0.9)


def test_dropout_in_16_bits_rounds_the_product_once():
    values = jnp.arange(1, 257, dtype=jnp.bfloat16)[None]
    found = network.apply_dropout(values, jnp.full(values.shape, 255, jnp.uint8), 0.25)
    wanted = (np.asarray(values, np.float64) / 0.75).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, wanted)


def test_a_rate_that_bytes_cannot_express_is_refused():
    with pytest.raises(ValueError, match="multiple of 1/256"):
        network.apply_dropout(jnp.ones((1, 4)), jnp.zeros((1, 4), jnp.uint8), 0.3)


def test_the_bytes_of_different_dropouts_are_different_ones():
    first, second, third = network.random_bytes(sample_keys(jax.random.key(4), 0, 2), [6, 9, 2])
    (whole,) = network.random_bytes(sample_keys(jax.random.key(4), 0, 2), [17])
    np.testing.assert_array_equal(np.concatenate([first, second, third], 1), whole)


def test_dropout_is_only_in_training_and_a_samples_depends_on_its_key_alone(weights):
    keys = KEYS[:3]
    apply = jax.jit(KERAS.apply, static_argnames="train", compiler_options=QUICK)
    plain = apply(weights, IMAGES)
    np.testing.assert_array_equal(apply(weights, IMAGES, train=False, keys=keys), plain)
    dropped = apply(weights, IMAGES, train=True, keys=keys)
    assert (abs(np.asarray(dropped - plain)).max(1) > 1e-3).all()
    turned = apply(weights, IMAGES[::-1], train=True, keys=keys[::-1])
    np.testing.assert_allclose(turned[::-1], dropped, rtol=1e-5, atol=1e-6)


def test_training_without_keys_is_refused(weights):
    with pytest.raises(ValueError, match="a key for each image"):
        KERAS.apply(weights, IMAGES, train=True)


def test_each_of_the_three_dropouts_is_there(weights):
    apply = jax.jit(
        lambda weights, keys: KERAS.apply(weights, IMAGES[:1].repeat(4, 0), train=True, keys=keys),
        compiler_options=QUICK,
    )
    names = list(weights)
    for place in (2, 4, 5):  # the layers that read what a dropout leaves
        before = {name: jax.tree.map(np.zeros_like, weights[name]) for name in names[:place]}
        before[names[place - 1]]["bias"] += (
            1  # all that this dropout sees is ones, whatever was dropped before
        )
        logits = apply(before | {name: weights[name] for name in names[place:]}, KEYS)
        assert np.std(logits, 0).max() > 1e-3, names[place]


def flops(layers):
    """Multiplications and additions of one image, from the kernels and the sides that are left."""
    side, total = 32, 0
    for layer in layers:
        if layer.kind == "conv":
            side -= 0 if layer.padding == "SAME" else 2
            total += 2 * side**2 * np.prod(layer.kernel)
        elif layer.kind == "pool":
            side //= 2
        elif layer.kind == "dense":
            total += 2 * np.prod(layer.kernel)
    return total


def test_the_later_network_has_a_convolution_more():
    weights = TF2.init(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == TF2.parameters == 1_260_106
    assert [round(flops(each.layers) / 1e6, 1) for each in (KERAS, TF2)] == [41.5, 53.0]
    kinds = [layer.kind for layer in TF2.layers]
    assert len(kinds) == 18 and kinds[4:7] == ["conv", "pool", "dropout"]
    assert {name: len(each.layers) for name, each in NETWORKS.items()} == LAYERS


def test_the_later_networks_logits_are_those_of_its_layers_one_by_one():
    drawn = TF2.init(jax.random.key(0))
    weights = {
        name: {**layer, "bias": jnp.float32(GENERATOR.normal(size=layer["bias"].shape)) / 5}
        for name, layer in drawn.items()
    }
    found = jax.jit(TF2.apply, compiler_options=QUICK)(weights, IMAGES)
    x = IMAGES
    for place in range(len(TF2.layers)):  # alone, no convolution is pooled before its bias
        x = TF2.stage(place, place + 1)(weights, x)
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=2e-5)
    assert np.ptp(found) > 0.1
    without = {**weights, "conv3": jax.tree.map(jnp.zeros_like, weights["conv3"])}
    assert abs(jax.jit(TF2.apply, compiler_options=QUICK)(without, IMAGES) - x).max() > 1e-2


def test_every_cut_gives_what_the_whole_network_gives_with_the_same_dropout():
    weights, keys = TF2.init(jax.random.key(0)), KEYS[:3]
    whole = TF2.apply(weights, IMAGES, train=True, keys=keys)
    others = TF2.apply(weights, IMAGES, train=True, keys=KEYS[1:])
    assert abs(whole - others).max() > 1e-3
    for position in range(1, 18):
        x = IMAGES
        for stage in TF2.cut(position):
            x = stage(weights, x, train=True, keys=keys)
        np.testing.assert_allclose(x, whole, rtol=1e-5, atol=1e-6, err_msg=str(position))


@pytest.mark.parametrize("path", network.cut_words.paths)
def test_words_are_cut_into_the_same_bytes_on_every_path_a_first_word_of_zero_among_them(path):
    words = np.random.default_rng(0).integers(0, 2**32, (3, 5), np.uint32)
    for first in (words[0, 0], 0):
        words[0, 0] = first
        with force_path(path):
            found = jax.jit(network.cut_words)(words)
        np.testing.assert_array_equal(found, words.view(np.uint8))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@pytest.mark.parametrize("path", network.cut_words.paths)
def test_no_words_are_no_bytes_on_every_path(path, shape):
    with force_path(path):
        assert jax.jit(network.cut_words)(jnp.zeros(shape, jnp.uint32)).shape == (shape[0], 4 * shape[1])
