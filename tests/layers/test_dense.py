"""The matrix product and the dense layer: both paths of the gradients, roundings, and shapes that are checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from hotloop.layers.conv import conv2d
from hotloop.layers.dense import FEW_ROWS, dense, init_dense, prepare_transposed, product
from hotloop.layers.paths import force_path


def arrays(seed, *shapes, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("path", ["default", "outer"])
@pytest.mark.parametrize("rows", [(), (1,), (5,), (2, 4), (FEW_ROWS + 1,), (3, 5, 2)])
def test_gradients_equal_those_of_the_plain_product(path, rows):
    with jax.enable_x64(True), force_path(path):
        x, kernel, dy = arrays(0, (*rows, 6), (6, 4), (*rows, 4))
        y, back = jax.vjp(product, x, kernel)
        expected, expected_back = jax.vjp(lambda x, k: x @ k, x, kernel)
        np.testing.assert_allclose(y, expected, rtol=1e-13)
        for ours, theirs in zip(back(dy), expected_back(dy), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_turned_kernel_multiplies_by_the_transpose(platform, rows):
    with jax.enable_x64(True):
        kernel, dy = arrays(0, (6, 4), (rows, 4))
        np.testing.assert_allclose(prepare_transposed(kernel, rows, platform)(dy), dy @ kernel.T, rtol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_are_summed_in_float32(dtype):
    ones = jnp.ones((1, 4096), dtype)
    assert product(ones, jnp.ones((4096, 1), dtype)).dtype == jnp.float32
    assert product(ones, jnp.ones((4096, 1), dtype)) == 4096
    assert product(ones, jnp.full((4096, 1), 1 / 3, dtype)) == pytest.approx(
        4096 * float(dtype(1 / 3)), rel=1e-6
    )


def test_dense_is_product_plus_bias_in_the_type_of_its_input():
    params = init_dense(jax.random.key(0), 6, 4, jnp.bfloat16)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in params.items()} == {
        "kernel": ((6, 4), jnp.bfloat16),
        "bias": ((4,), jnp.bfloat16),
    }
    params["bias"] += 2
    x = jnp.ones((3, 6), jnp.bfloat16)
    exact = x.astype(jnp.float32) @ params["kernel"].astype(jnp.float32) + 2
    assert dense(params, x).dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(dense(params, x)), exact, rtol=2**-8)


def test_the_dense_kernel_keeps_the_variance_of_its_input():
    kernel = init_dense(jax.random.key(0), 400, 600)["kernel"]
    assert float(kernel.var()) == pytest.approx(2 / 1000, rel=0.02)


@pytest.mark.parametrize(
    ("layer", "bad"),
    [
        (product, (jnp.ones((2, 3)), jnp.ones((4, 5)))),
        (conv2d, (jnp.ones((1, 4, 4, 3)), jnp.ones((3, 3, 2, 4)))),
    ],
)
def test_annotated_shapes_are_true(layer, bad):
    function = getattr(layer, "__wrapped__", layer)
    with pytest.raises(TypeCheckError):
        jaxtyped(typechecker=beartype)(function)(*bad)
