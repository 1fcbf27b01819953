"""Batch and group normalisation against float64, in values, gradients and statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.layers.norm import EPSILON, batch_norm, group_norm, normalise

GENERATOR = np.random.default_rng(0)
SHAPE = (3, 4, 5, 6)


def images(shape=SHAPE, mean=0.0):
    return GENERATOR.normal(mean, 1 + GENERATOR.random(shape[-1]), shape)


def channels(count=SHAPE[-1]):
    return GENERATOR.normal(size=count)


def plain_batch_norm(x, scale, offset):
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(variance + EPSILON) * scale + offset, mean, variance


def plain_group_norm(x, scale, offset, groups):
    split = x.reshape(*x.shape[:3], groups, -1)
    mean, variance = split.mean((1, 2, 4), keepdims=True), split.var((1, 2, 4), keepdims=True)
    return ((split - mean) / jnp.sqrt(variance + EPSILON)).reshape(x.shape) * scale + offset


def weighed(function, weights):
    """One number of all that a function returns, for gradients."""
    return lambda *arguments: sum(
        (w * out).sum() for w, out in zip(weights, jax.tree.leaves(function(*arguments)), strict=True)
    )


def test_batch_norm_and_its_gradient_through_every_output_equal_the_textbook_form():
    arguments = (images(), channels(), channels())
    weights = (images(), channels(), channels())
    with jax.enable_x64(True):
        for function in (lambda f: f, lambda f: jax.grad(weighed(f, weights), argnums=(0, 1, 2))):
            ours, wanted = (jax.jit(function(f))(*arguments) for f in (batch_norm, plain_batch_norm))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), ours, wanted)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_and_its_gradient_equal_the_textbook_form(groups):
    arguments, weights = (images(), channels(), channels()), (images(),)
    with jax.enable_x64(True):
        for function in (lambda f: f, lambda f: jax.grad(weighed(f, weights), argnums=(0, 1, 2))):
            ours, wanted = (
                jax.jit(function(lambda *a, f=f: f(*a, groups)))(*arguments)
                for f in (group_norm, plain_group_norm)
            )
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), ours, wanted)


@pytest.mark.parametrize("mean", [0.0, 3e3, -3e3])
def test_one_pass_keeps_the_variance_of_images_far_from_zero(mean):
    x = images((8, 9, 9, 4), mean).astype(np.float32)
    y, got_mean, variance = jax.jit(batch_norm)(x, jnp.ones(4), jnp.zeros(4))
    exact = x.astype(np.float64)
    np.testing.assert_allclose(got_mean, exact.mean((0, 1, 2)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(variance, exact.var((0, 1, 2)), rtol=1e-5)
    wanted = plain_batch_norm(jnp.asarray(exact - exact.mean((0, 1, 2))), 1, 0)[0]
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6 * max(1, abs(mean)))
    grouped = jax.jit(group_norm, static_argnums=3)(x, jnp.ones(4), jnp.zeros(4), 4)
    np.testing.assert_allclose(grouped.mean((1, 2)), 0, atol=1e-6 * max(1, abs(mean)))
    np.testing.assert_allclose(grouped.var((1, 2)), 1, rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_images_have_float32_statistics(dtype):
    x = jnp.asarray(images((8, 16, 16, 6)), dtype)
    scale, offset = (jnp.asarray(channels(), dtype) for _ in range(2))
    y, mean, variance = jax.jit(batch_norm)(x, scale, offset)
    exact = np.asarray(x, np.float64)
    assert (y.dtype, mean.dtype, variance.dtype) == (dtype, jnp.float32, jnp.float32)
    np.testing.assert_allclose(mean, exact.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(variance, exact.var((0, 1, 2)), rtol=1e-5)
    gradients = jax.jit(jax.grad(weighed(batch_norm, (1.0, 0.0, 0.0)), argnums=(0, 1, 2)))(x, scale, offset)
    assert all(gradient.dtype == dtype for gradient in gradients)
    assert group_norm(x, scale, offset, 2).dtype == dtype


def test_given_statistics_of_the_batch_give_the_batch_norm():
    x, scale, offset = (a.astype(np.float32) for a in (images(), channels(), channels()))
    y, mean, variance = jax.jit(batch_norm)(x, scale, offset)
    np.testing.assert_array_equal(jax.jit(normalise)(x, scale, offset, mean, variance), y)


def test_a_constant_channel_becomes_the_offset():
    x = np.full(SHAPE, 7.25, np.float32)
    offset = channels().astype(np.float32)
    y, mean, variance = jax.jit(batch_norm)(x, np.ones(6, np.float32), offset)
    np.testing.assert_array_equal(y, np.broadcast_to(offset, SHAPE))
    np.testing.assert_array_equal((mean, variance), [[7.25] * 6, [0] * 6])
