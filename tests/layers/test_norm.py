"""Batch and group normalisation against float64, in values, gradients and statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from hotloop.layers.norm import EPSILON, ReplicaGroups, batch_norm, group_norm, normalise
from hotloop.layers.paths import force_path

GENERATOR = np.random.default_rng(0)
SHAPE = (3, 4, 5, 6)
START = GENERATOR.bit_generator.state


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order_of_tests():
    GENERATOR.bit_generator.state = START


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


def values_and_gradients(function, weights):
    """What a function returns, and the gradients of one number made of all of it."""

    def one_number(*arguments):
        outputs = jax.tree.leaves(function(*arguments))
        return sum((w * out).sum() for w, out in zip(weights, outputs, strict=True)), outputs

    return jax.jit(jax.grad(one_number, argnums=(0, 1, 2), has_aux=True))


def assert_close(ours, wanted, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), ours, wanted)


@pytest.mark.parametrize("path", ["default", "unshifted"])
def test_batch_norm_and_its_gradient_through_every_output_equal_the_textbook_form(path):
    arguments, weights = (images(mean=0.5), channels(), channels()), (images(), channels(), channels())
    with jax.enable_x64(True), force_path(path):
        ours, wanted = (values_and_gradients(f, weights)(*arguments) for f in (batch_norm, plain_batch_norm))
    assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("path", ["default", "unshifted"])
@pytest.mark.parametrize("size", [2, 4])
def test_replicas_that_share_statistics_normalise_as_one_that_has_all_their_images(size, path):
    """Values, statistics and gradients through every output; the images of the groups lie far apart."""
    count, shape = 4 // size, (4, *SHAPE)
    places = tuple(tuple(range(first, first + size)) for first in range(0, 4, size))
    x = images(shape) + np.arange(4).reshape(4, 1, 1, 1, 1)
    scale, offset = channels(), channels()
    weights = images(shape), channels(), channels()

    def share(x, weight):
        shared = ReplicaGroups("replica", places)
        (dx, dscale, doffset), values = values_and_gradients(
            lambda *arguments: batch_norm(*arguments, EPSILON, shared), (weight[0], *weights[1:])
        )(x[0], scale, offset)
        return jax.tree.map(lambda leaf: leaf[None], ((dx, dscale, doffset), values))

    replica = PartitionSpec("replica")
    with jax.enable_x64(True), force_path(path):
        mesh = jax.make_mesh((4,), ("replica",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
        mapped = jax.shard_map(share, mesh=mesh, in_specs=replica, out_specs=replica, check_vma=False)
        gradients, values = jax.device_get(jax.jit(mapped)(x, weights[0]))
        # Each replica of a group has the statistics in its loss, so that they count `size` times in the merged one.
        merged = [
            jax.device_get(
                values_and_gradients(plain_batch_norm, (each, size * weights[1], size * weights[2]))(
                    together, scale, offset
                )
            )
            for each, together in zip(
                *(array.reshape(count, -1, *SHAPE[1:]) for array in (weights[0], x)), strict=True
            )
        ]
    for group, (wanted, outputs) in enumerate(merged):
        own = slice(group * size, (group + 1) * size)
        assert_close(gradients[0][own].reshape(wanted[0].shape), wanted[0], rtol=1e-11, atol=1e-11)
        for ours, theirs in zip(gradients[1:], wanted[1:], strict=True):
            assert_close(ours[own].sum(0), theirs, rtol=1e-11, atol=1e-11)
            assert np.abs(theirs).min() > 1e-3
        assert_close(values[0][own].reshape(outputs[0].shape), outputs[0], rtol=1e-11, atol=1e-11)
        for ours, theirs in zip(values[1:], outputs[1:], strict=True):
            assert_close(ours[own], np.tile(theirs, (size, 1)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("path", ["default", "unshifted"])
@pytest.mark.parametrize("groups", [1, 3])
def test_group_norm_and_its_gradient_equal_the_textbook_form(groups, path):
    arguments, weights = (images(mean=0.5), channels(), channels()), (images(),)
    with jax.enable_x64(True), force_path(path):
        ours, wanted = (
            values_and_gradients(lambda *a, f=f: f(*a, groups), weights)(*arguments)
            for f in (group_norm, plain_group_norm)
        )
    assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("path", ["default", "unshifted"])
@pytest.mark.parametrize("mean", [5.0, 300.0, -3e3])
def test_one_pass_keeps_the_variance_of_images_far_from_zero(mean, path):
    shape = (8, 9, 9, 4)
    x = images(shape, mean).astype(np.float32)
    scale, offset, weights = np.ones(4, np.float32), np.zeros(4, np.float32), (images(shape), 0, 0)
    with force_path(path):
        gradients, (y, centre, variance) = values_and_gradients(batch_norm, weights)(x, scale, offset)
        grouped = jax.jit(group_norm, static_argnums=3)(x, scale, offset, 4)
    exact = x.astype(np.float64)
    # Half a unit in float32's last place, times two, for 648 summands as for a random walk.
    digits = 2**-23 * 648**0.5
    place = digits * max(1, abs(mean))
    np.testing.assert_allclose(centre, exact.mean((0, 1, 2)), atol=place)
    # What is subtracted from the mean square: without a shift up to 100 variances, else the middle pixel's distance.
    distance = ((exact[0, 4, 4] - exact.mean((0, 1, 2))) ** 2 / exact.var((0, 1, 2))).max()
    lost = digits * (1 + (100 if path == "unshifted" else distance))
    np.testing.assert_allclose(variance, exact.var((0, 1, 2)), rtol=lost)
    with jax.enable_x64(True):
        wanted, (unit, _, _) = values_and_gradients(plain_batch_norm, weights)(exact, scale, offset)
    np.testing.assert_allclose(y, unit, rtol=5e-5, atol=place)
    np.testing.assert_allclose(gradients[0], wanted[0], rtol=1e-4, atol=place)
    np.testing.assert_allclose(
        gradients[1], wanted[1], rtol=1e-4, atol=place * np.abs(weights[0]).sum((0, 1, 2)).max()
    )
    np.testing.assert_allclose(grouped.mean((1, 2)), 0, atol=place)
    np.testing.assert_allclose(grouped.var((1, 2)), 1, rtol=2e-4)


def test_a_cpu_sums_the_images_themselves():
    x, vector = np.ones(SHAPE, np.float32), np.ones(6, np.float32)
    traced = jax.jit(batch_norm).trace(x, vector, vector)
    reductions = [
        traced.lower(lowering_platforms=(name,)).as_text().count("stablehlo.reduce(")
        for name in ("cpu", "cuda")
    ]
    assert reductions[0] > reductions[1] == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_images_have_float32_statistics(dtype):
    x = jnp.asarray(images((8, 16, 16, 6)), dtype)
    scale, offset = (jnp.asarray(channels(), dtype) for _ in range(2))
    gradients, (y, mean, variance) = values_and_gradients(batch_norm, (1.0, 0.0, 0.0))(x, scale, offset)
    exact = np.asarray(x, np.float64)
    assert (y.dtype, mean.dtype, variance.dtype) == (dtype, jnp.float32, jnp.float32)
    np.testing.assert_allclose(mean, exact.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(variance, exact.var((0, 1, 2)), rtol=1e-5)
    assert all(gradient.dtype == dtype for gradient in gradients)
    assert jax.eval_shape(lambda *a: group_norm(*a, 2), x, scale, offset).dtype == dtype


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
