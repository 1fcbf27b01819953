"""hotloop-native's networks with Bernoulli outputs: log-likelihoods and their gradients against float64."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.families.vcd import networks
from hotloop.layers import native, native_bernoulli, paths
from native_calls import child, draw


def make_network(widths):
    """Weights and biases of layers of these widths, the first that of the input."""
    weights = draw(1, *pairwise(widths))
    biases = draw(2, *[(width,) for width in widths[1:]])
    return tuple({"w": w / np.sqrt(len(w)), "b": b} for w, b in zip(weights, biases, strict=True))


def run(network, images, z):
    layers = [jnp.asarray(array) for layer in network for array in (layer["w"], layer["b"], layer["w"].T)]
    return jax.jit(native_bernoulli.likelihood_and_gradient)(jnp.asarray(images), jnp.asarray(z), *layers)


def reference(network, images, z):
    """Values and gradients in float64, and how near a hidden unit comes to the ReLU's kink in each row."""
    x, near, active = np.float64(z), np.full(len(z), np.inf), []
    for layer in network[:-1]:
        x = x @ np.float64(layer["w"]) + layer["b"]
        near = np.minimum(near, abs(x).min(1))
        active.append(x > 0)
        x = np.maximum(x, 0)
    logits = x @ np.float64(network[-1]["w"]) + network[-1]["b"]
    values = (images * logits - np.logaddexp(0, logits)).sum(1)
    back = images - 1 / (1 + np.exp(-logits))
    for layer, mask in zip(network[:0:-1], reversed(active), strict=True):
        back = (back @ np.float64(layer["w"]).T) * mask
    return values, back @ np.float64(network[0]["w"]).T, near


def check(rows, widths):
    network = make_network(widths)
    z, pixels = draw(3, (rows, widths[0]), (rows, widths[-1]))
    images = np.float32(pixels > 0)
    values, gradients = run(network, images, z)
    right, slopes, near = reference(network, images, z)
    np.testing.assert_allclose(values, right, rtol=1e-5, atol=1e-5)
    # Where rounding decides on which side of a kink a unit lies, the slope is one or the other.
    sure = near > 1e-5
    size = max(1, abs(slopes).max())
    np.testing.assert_allclose(gradients[sure], slopes[sure], rtol=0, atol=1e-5 * size)


WIDTHS = st.sampled_from((1, 2, 15, 16, 31, 32, 33, 100, 520))


@settings(max_examples=5)
@given(st.integers(1, 70), st.lists(WIDTHS, min_size=2, max_size=4))
def test_values_and_gradients_are_the_mathematics_of_it(rows, widths):
    check(rows, widths)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(1, 300), st.lists(WIDTHS, min_size=2, max_size=5))
def test_values_and_gradients_are_the_mathematics_of_it_over_many_shapes(rows, widths):
    check(rows, widths)


def test_the_decoder_of_vcd_with_more_pixels_than_one_product_of_factors_holds():
    check(100, (10, 200, 200, 784))
    check(3, (2, 5000))


def test_large_logits_have_finite_values_and_a_row_of_nan_stays_one():
    network = ({"w": np.full((1, 40), 1e4, np.float32), "b": np.zeros(40, np.float32)},)
    z = np.float32([[1], [-1], [np.nan]])
    values, gradients = run(network, np.zeros((3, 40), np.float32), z)
    np.testing.assert_allclose(values[:2], [-4e5, 0], atol=1e-3)
    assert np.isnan(values[2])
    assert np.isnan(gradients[2])
    assert np.isfinite(gradients[:2]).all()


def test_the_sampler_asks_for_it_and_rows_mapped_over_are_one_call(monkeypatch):
    monkeypatch.setattr(paths, "is_rival_faster", lambda *choice: True)
    decoder = networks.init(jax.random.key(0), 10, (40,))["decoder"]

    def target(image, z):
        return networks.value_and_gradient(decoder, image[None])(z[None])

    z, images = map(jnp.asarray, draw(3, (6, 10), (6, 784)))
    with native.use_native(True):
        mapped = jax.jit(jax.vmap(target)).lower(images, z)
    assert mapped.as_text().count("@hotloop_bernoulli_gradient(") == 1
    with native.use_native(False):
        plain = jax.jit(networks.value_and_gradient(decoder, images))(z)
    for ours, theirs in zip(mapped.compile()(images, z), plain, strict=True):
        np.testing.assert_allclose(np.reshape(ours, theirs.shape), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("images", "z"),
    [((784,), (10,)), ((1, 784), (3, 10)), ((2, 3, 784), (2, 3, 10)), ((0, 784), (0, 10))],
    ids=["one row", "one image for all", "rows of rows", "no rows"],
)
def test_what_is_no_rows_that_belong_together_is_computed_all_the_same(monkeypatch, images, z):
    monkeypatch.setattr(paths, "is_rival_faster", lambda *choice: True)
    decoder = networks.init(jax.random.key(0), 10, (40,))["decoder"]
    images, z = map(jnp.asarray, draw(3, images, z))
    both = []
    for wanted in (True, False):
        with native.use_native(wanted):
            both.append(jax.jit(networks.value_and_gradient(decoder, images))(z))
    for ours, plain in zip(*both, strict=True):
        assert ours.shape == plain.shape
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [4, 0])
def test_single_rows_are_mapped_over_as_without_the_package(count):
    decoder = networks.init(jax.random.key(0), 10, (40,))["decoder"]
    images, z = map(jnp.asarray, draw(3, (count, 784), (count, 10)))
    with native.use_native(True):
        value, gradient = jax.vmap(lambda image, z: networks.value_and_gradient(decoder, image)(z))(images, z)
    assert (value.shape, gradient.shape) == ((count,), (count, 10))
    with native.use_native(True):
        value, gradient = jax.vmap(
            lambda image, z: networks.value_and_gradient(decoder, image[None])(z[None])
        )(images, z)
    assert (value.shape, gradient.shape) == ((count, 1), (count, 1, 10))


WRONG = {
    "images of another width": lambda arrays: arrays[0][:, 1:],
    "fewer images": lambda arrays: arrays[0][1:],
}


@pytest.mark.parametrize("fault", WRONG)
def test_sizes_that_do_not_agree_are_refused(fault):
    network = make_network((10, 40, 70))
    images, z = np.zeros((5, 70), np.float32), np.zeros((5, 10), np.float32)
    with pytest.raises(Exception, match=r"sizes of a network's layers, images and inputs do not agree"):
        jax.block_until_ready(run(network, WRONG[fault]((images, z)), z))


OLDER = """
import test_native_bernoulli as tests

for rows, widths in ((1, (1, 1)), (57, (10, 33, 70)), (20, (3, 520, 16, 40))):
    tests.check(rows, widths)
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_older_processors_have_the_same_mathematics(isa):
    child(OLDER, HOTLOOP_NATIVE_ISA=isa)
