"""A bias and its gradient: the same by a sum and by a product with ones."""

import jax
import numpy as np
import pytest

from hotloop.layers.dense import column_sums, with_bias
from hotloop.layers.paths import force_path

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("path", ["default", "ones"])
@pytest.mark.parametrize("shape", [(1, 5), (64, 33), (3, 4, 7)])
def test_the_gradient_is_the_sum_over_rows(path, shape):
    x = GENERATOR.normal(size=shape).astype(np.float32)
    weights = GENERATOR.normal(size=shape).astype(np.float32)
    bias = GENERATOR.normal(size=shape[-1]).astype(np.float32)
    with force_path(path):
        (dx, db), y = jax.jit(
            lambda x, b: (
                jax.grad(lambda x, b: (weights * with_bias(x, b)).sum(), argnums=(0, 1))(x, b),
                with_bias(x, b),
            )
        )(x, bias)
    np.testing.assert_array_equal(y, x + bias)
    np.testing.assert_array_equal(dx, weights)
    wanted = weights.astype(np.float64).reshape(-1, shape[-1]).sum(0)
    np.testing.assert_allclose(db, wanted, rtol=1e-5, atol=1e-5)


def test_a_cpu_takes_the_product():
    x = np.ones((4, 3), np.float32)
    assert column_sums.paths == ("default", "ones")
    assert "dot" in jax.jit(lambda x: column_sums(x)).trace(x).lower(lowering_platforms=("cpu",)).as_text()
    assert (
        "dot" not in jax.jit(lambda x: column_sums(x)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    )
