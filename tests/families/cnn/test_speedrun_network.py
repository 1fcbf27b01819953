"""The speedrun's network: whitening against numpy, each layer against its plain form, the whole against PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.families.cnn.speedrun import network
from hotloop.families.cnn.speedrun.config import Recipe
from hotloop.layers import conv

SMALL = Recipe(batch_size=6, widths=(8, 12, 12))
IMAGES = np.random.default_rng(0).normal(size=(6, 32, 32, 3)).astype(np.float32)


def smooth_images(count, seed=0):
    """Neighbouring pixels alike, as in photographs."""
    noise = np.random.default_rng(seed).normal(size=(count, 33, 33, 3))
    return (noise[:, 1:, 1:] + noise[:, :-1, 1:] + noise[:, 1:, :-1] + noise[..., :1][:, 1:, 1:]).astype(
        np.float32
    )


def patches_of(images):
    return np.stack([images[:, i : i + 31, j : j + 31] for i in range(2) for j in range(2)], 3).reshape(
        -1, 12
    )


def test_filters_are_the_eigenvectors_of_the_patches_over_the_roots_of_their_values():
    images = smooth_images(20)
    found = np.asarray(network.whitening_filters(images, 5e-4), np.float64).reshape(12, 12)
    patches = patches_of(images.astype(np.float64))
    moments = patches.T @ patches / len(patches)
    values, vectors = np.linalg.eigh(moments)
    expected = vectors / np.sqrt(values + 5e-4)
    signs = np.sign((found * expected).sum(0))
    np.testing.assert_allclose(found * signs, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    np.testing.assert_allclose(
        found @ found.T, np.linalg.inv(moments + 5e-4 * np.eye(12)), rtol=1e-3, atol=1e-3
    )


def test_what_the_filters_see_has_variance_one_and_no_correlation():
    images = smooth_images(20)
    filters = network.whitening_filters(images, 0.0)
    seen = np.asarray(conv.conv2d(jnp.asarray(images), filters, padding="VALID"), np.float64).reshape(-1, 12)
    np.testing.assert_allclose(seen.T @ seen / len(seen), np.eye(12), rtol=0, atol=2e-3)


def test_fresh_kernels_pass_their_inputs_on_and_the_head_has_deviation_one():
    params, statistics = jax.jit(network.init, static_argnums=0)(Recipe(), jax.random.key(0))
    shapes = {name: kernel.shape for name, kernel in params["kernel"].items()}
    assert shapes == {
        "group0_first": (3, 3, 24, 64),
        "group0_second": (3, 3, 64, 64),
        "group1_first": (3, 3, 64, 256),
        "group1_second": (3, 3, 256, 256),
        "group2_first": (3, 3, 256, 256),
        "group2_second": (3, 3, 256, 256),
    }
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == (
        9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256) + 24 + 2 * (64 + 256 + 256) + 256 * 10
    )
    first = np.asarray(params["kernel"]["group1_first"])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 5, 64)), jnp.float32)
    np.testing.assert_array_equal(np.asarray(conv.conv2d(x, jnp.asarray(first)))[..., :64], x)
    limit = (9 * 64) ** -0.5
    rest = first[..., 64:]
    assert 0.99 * limit < np.abs(rest).max() <= limit and rest.std() == pytest.approx(
        limit / 3**0.5, rel=0.02
    )
    assert float(params["head"]["weight"].std(ddof=1)) == pytest.approx(1)
    assert (
        np.abs(params["whitening"]["bias"]).max()
        <= 12**-0.5
        < 1.2 * np.abs(params["whitening"]["bias"]).max()
    )
    assert all(np.all(each["mean"] == 0) and np.all(each["variance"] == 1) for each in statistics.values())


@pytest.mark.parametrize("size", [(31, 31), (15, 15), (8, 6)])
def test_a_convolution_for_a_pool_leaves_out_what_the_pool_would_drop(size):
    generator = np.random.default_rng(1)
    x, kernel = generator.normal(size=(2, *size, 3)), generator.normal(size=(3, 3, 3, 4))
    with jax.enable_x64(True):
        found = network.convolve_for_pool(jnp.asarray(x), jnp.asarray(kernel))
        whole = conv.conv2d(jnp.asarray(x), jnp.asarray(kernel))
        assert found.shape[1:3] == tuple(extent // 2 * 2 for extent in size)
        np.testing.assert_allclose(found, whole[:, : found.shape[1], : found.shape[2]], rtol=0, atol=1e-12)


def test_the_pool_and_its_gradient_are_those_of_the_other_pool_even_among_equals():
    generator = np.random.default_rng(2)
    x = jnp.asarray(generator.integers(0, 3, (3, 6, 8, 5)), jnp.float32)
    dy = jnp.asarray(generator.normal(size=(3, 3, 4, 5)), jnp.float32)
    found, back = jax.vjp(network.max_pool, x)
    expected, expected_back = jax.vjp(lambda x: conv.max_pool(x, 2, 2, 0), x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(back(dy)[0], expected_back(dy)[0])


def test_norm_and_silu_have_the_gradient_of_their_plain_form():
    generator = np.random.default_rng(3)
    x, offset = 3 + 2 * generator.normal(size=(4, 3, 5, 6)), generator.normal(size=6)
    weight = generator.normal(size=x.shape)

    def plain(x, offset):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        y = (x - mean) / jnp.sqrt(variance + 1e-12) + offset
        return (weight * y * jax.nn.sigmoid(y)).sum(), (mean, variance)

    def own(x, offset):
        y, mean, variance = network.norm_silu(x, offset)
        return (weight * y).sum(), (mean, variance)

    with jax.enable_x64(True):
        arrays = jnp.asarray(x), jnp.asarray(offset)
        expected, found = (
            jax.jit(jax.value_and_grad(fn, (0, 1), has_aux=True))(*arrays) for fn in (plain, own)
        )
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9), found, expected
    )


def test_values_of_a_channel_are_counted_at_each_norm():
    counts = network.count_values(Recipe(batch_size=2), (32, 32))
    sizes = {"group0": 15, "group1": 7, "group2": 3}
    assert counts == {
        f"{group}_{layer}": 2 * size**2 for group, size in sizes.items() for layer in ("first", "second")
    }


@pytest.mark.slow
def test_logits_and_gradients_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    from speedrun_in_torch import InTorch

    generator = np.random.default_rng(4)
    with jax.enable_x64(True):
        params, statistics = jax.tree.map(
            lambda leaf: np.asarray(leaf + 0.05 * generator.normal(size=leaf.shape)),
            jax.jit(network.init, static_argnums=0)(SMALL, jax.random.key(1)),
        )
        filters = network.whitening_filters(jnp.asarray(smooth_images(9), jnp.float64), 5e-4)
        images, weight = jnp.asarray(IMAGES, jnp.float64), generator.normal(size=(6, 10))

        def apply(params, train):
            return network.apply(params, statistics, filters, images, jnp.float64, train=train)

        def total(params):
            logits, found = apply(params, train=True)
            return (logits * weight).sum(), (logits, found)

        (_, (trained, found)), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        tested, nothing = jax.jit(apply, static_argnums=1)(params, False)
    other = InTorch(SMALL, 6, params, statistics, filters)
    # Before the other, which moves its running statistics. Logits are rounded to float32.
    np.testing.assert_allclose(tested, other.logits(images, False).detach().numpy(), rtol=2e-6, atol=1e-7)
    expected = other.logits(images, True)
    np.testing.assert_allclose(trained, expected.detach().numpy(), rtol=2e-6, atol=1e-7)
    (expected * torch.tensor(weight)).sum().backward()
    for own, theirs in (
        (gradients["whitening"]["bias"], other.bias.grad),
        (gradients["head"]["weight"], other.head.grad),
        *((gradients["offset"][name], each.grad) for name, each in other.offsets.items()),
        *((gradients["kernel"][name], each.grad.permute(2, 3, 1, 0)) for name, each in other.kernels.items()),
    ):
        np.testing.assert_allclose(own, theirs.numpy(), rtol=0, atol=2e-6 * float(theirs.abs().max()))
    assert set(found) == set(statistics) and nothing == {}
