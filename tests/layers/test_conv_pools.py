"""The gradient of max pooling as a CPU computes it: against the built-in one, and on ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.layers import conv

SETTINGS = {"size": 3, "stride": 2, "padding": 1}
SLICES = jax.jit(lambda x, dy: conv._gradient_of(conv._of_slices)(x, dy, **SETTINGS))


@pytest.mark.parametrize("size", [8, 9])
def test_without_ties_it_is_the_built_in_gradient(size):
    generator = np.random.default_rng(0)
    x = jnp.float32(generator.permutation(2 * size * size * 3).reshape(2, size, size, 3))
    dy = jnp.float32(generator.normal(size=conv._of_windows(x, 3, 2, 1).shape))
    built_in = conv._gradient_of(conv._of_windows)(x, dy, **SETTINGS)
    np.testing.assert_allclose(SLICES(x, dy), built_in, rtol=1e-6, atol=1e-6)


def test_of_equal_largest_values_nothing_is_lost():
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, 0, 0] = x[0, 0, 1] = 2
    dy = np.float32([[[[6.0], [0.5]], [[0.25], [1.0]]]])
    found = np.asarray(SLICES(x, dy))[0, :, :, 0]
    # Window (0, 0) holds both 2s, window (0, 1) the second of them, the others zeros alone.
    assert (found[0, 0], found[0, 1]) == (3.0, 3.5)
    np.testing.assert_allclose(found.sum(), dy.sum(), rtol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_windows_side_by_side_give_to_the_first_of_equal_values_as_the_built_in_gradient_does(size):
    generator = np.random.default_rng(1)
    x = jnp.float32(generator.integers(0, 3, (2, 7, 8, 3)))  # ties everywhere, and rows and columns left over
    dy = jnp.float32(generator.normal(size=(2, 7 // size, 8 // size, 3)))
    settings = {"size": size, "stride": size, "padding": 0}
    found = jax.jit(lambda x, dy: conv._side_by_side(x, dy, size))(x, dy)
    np.testing.assert_array_equal(found, conv._gradient_of(conv._of_windows)(x, dy, **settings))
