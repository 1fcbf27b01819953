"""A batch norm joined with the sum and the ReLU after it equals the three one after the other, without the package."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from hotloop.layers.norm import EPSILON, batch_norm, batch_norm_joined
from hotloop.layers.paths import force_path
from same_numbers import assert_same_numbers

SHAPE = (3, 4, 5, 6)
CASES = [(with_residual, relu) for with_residual in (False, True) for relu in (False, True)]


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def arguments(with_residual):
    x, scale, offset, residual = draw(0, SHAPE, SHAPE[-1:], SHAPE[-1:], SHAPE)
    return (2 * x + 0.5, scale, offset, *((residual,) if with_residual else ()))


def joined(relu, epsilon=EPSILON):
    def function(x, scale, offset, residual=None):
        return batch_norm_joined(x, scale, offset, residual, epsilon, relu)

    return function


def textbook(relu, epsilon=EPSILON):
    """By autodiff alone."""

    def function(x, scale, offset, residual=0.0):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        total = (x - mean) / jnp.sqrt(variance + epsilon) * scale + offset + residual
        return jax.nn.relu(total) if relu else total, mean, variance

    return function


def one_by_one(relu):
    """The layers of a network that is not joined."""

    def function(x, scale, offset, residual=None):
        y, mean, variance = batch_norm(x, scale, offset, EPSILON)
        total = y if residual is None else residual + y
        return jax.nn.relu(total) if relu else total, mean, variance

    return function


def values_and_gradients(function, weights, given):
    """What it returns, and the gradients by all it is given of one number made of all outputs."""

    def one_number(given):
        outputs = function(*given)
        return sum((w * out).sum() for w, out in zip(weights, outputs, strict=True)), outputs

    return jax.jit(jax.grad(one_number, has_aux=True))(given)


@pytest.mark.parametrize("path", ["default", "unshifted"])
@pytest.mark.parametrize(("with_residual", "relu"), CASES)
def test_values_and_gradients_through_every_output_equal_the_textbook_form(path, with_residual, relu):
    given, weights = arguments(with_residual), draw(1, SHAPE, SHAPE[-1:], SHAPE[-1:])
    with jax.enable_x64(True), force_path(path):
        found, wanted = (
            values_and_gradients(form(relu, 0.01), weights, given) for form in (joined, textbook)
        )
    assert_same_numbers(found, wanted, 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("with_residual", "relu"), CASES)
def test_in_shorter_types_it_equals_the_layers_one_by_one(dtype, with_residual, relu):
    given, weights = arguments(with_residual), draw(1, SHAPE, SHAPE[-1:], SHAPE[-1:])
    x, scale, offset, *residual = given
    given = (
        jnp.asarray(x, dtype),
        *(jnp.asarray(each, jnp.float32) for each in (scale, offset)),
        *(jnp.asarray(each, dtype) for each in residual),
    )
    weights = [jnp.asarray(weights[0], dtype), *(jnp.asarray(each, jnp.float32) for each in weights[1:])]
    found, wanted = (values_and_gradients(form(relu), weights, given) for form in (joined, one_by_one))
    assert found[1][0].dtype == found[0][0].dtype == dtype
    assert_same_numbers(found, wanted, 1e-6 if dtype == "float32" else 2**-7)


def test_where_the_sum_is_zero_no_gradient_comes_back():
    x, scale, offset = jnp.asarray(arguments(False)[0]), jnp.zeros(SHAPE[-1]), jnp.zeros(SHAPE[-1])
    for residual in ((), (jnp.zeros(SHAPE),)):
        gradients, _ = values_and_gradients(joined(relu=True), [1.0, 0.0, 0.0], (x, scale, offset, *residual))
        assert not any(np.any(each) for each in gradients)


def test_it_goes_under_vmap_and_as_each_devices_part():
    given = [np.stack([each, 2 * each + 1]).astype(np.float32) for each in arguments(True)]
    weights = [np.float32(1)] * 3

    def gradients(*given):
        return values_and_gradients(joined(relu=True), weights, given)

    wanted = jax.tree.map(
        lambda *rows: np.stack(rows), *(gradients(*row) for row in zip(*given, strict=True))
    )
    assert_same_numbers(jax.vmap(gradients)(*given), wanted, 1e-5)
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    own = jax.shard_map(
        lambda *given: jax.tree.map(lambda each: each[None], gradients(*(each[0] for each in given))),
        mesh=mesh,
        in_specs=PartitionSpec("rows"),
        out_specs=PartitionSpec("rows"),
        check_vma=False,
    )
    assert_same_numbers(jax.jit(own)(*given), wanted, 1e-5)
