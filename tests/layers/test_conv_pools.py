"""The gradients of max pooling as a CPU and a GPU compute them: against the built-in one, with equal values
everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hotloop.layers import conv
from hotloop.layers.paths import force_path


def compare_with_built_in(shape, size, stride, padding, values=None):
    """On `values` different numbers, so that most windows have several largest."""
    with jax.enable_x64(True):
        generator = np.random.default_rng(0)
        x = generator.integers(0, values, shape) if values else generator.permutation(np.prod(shape))
        x = jnp.asarray(x.reshape(shape), np.float64)
        dy = jnp.asarray(generator.normal(size=conv._of_windows(x, size, stride, padding).shape))
        found = {}
        for path in ("default", "phases", conv.PLACES):

            @jax.jit
            def pool(x, dy):
                y, back = jax.vjp(lambda x: conv.max_pool(x, size, stride, padding), x)
                return y, *back(dy)

            with force_path(path):
                found[path] = pool(x, dy)
        for path in ("phases", conv.PLACES):
            np.testing.assert_array_equal(found[path][0], found["default"][0])
            np.testing.assert_allclose(found[path][1], found["default"][1], rtol=1e-13, atol=1e-13)
        assert np.abs(found["default"][1]).max() > 0


@pytest.mark.parametrize("values", [None, 3], ids=["all different", "equal ones"])
@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 3, 0), (2, 3, 1), (3, 1, 1)]
)
def test_it_is_the_built_in_gradient_that_the_first_of_equal_values_takes(size, stride, padding, values):
    compare_with_built_in((2, 7, 8, 3), size, stride, padding, values)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    images=st.integers(1, 2), height=st.integers(1, 9), width=st.integers(1, 9), size=st.integers(1, 5),
    stride=st.integers(1, 4), padding=st.integers(0, 2), values=st.sampled_from([2, 4]),
)  # fmt: skip
def test_any_geometry_has_the_built_in_gradient(images, height, width, size, stride, padding, values):
    assume(padding < size <= min(height, width) + 2 * padding)
    compare_with_built_in((images, height, width, 2), size, stride, padding, values)


@pytest.mark.slow
def test_windows_of_more_places_than_a_byte_counts_find_theirs():
    compare_with_built_in((1, 18, 17, 1), 17, 1, 0)


@pytest.mark.parametrize("path", ["phases", conv.PLACES])
def test_of_equal_largest_values_nothing_is_lost(path):
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, 0, 0] = x[0, 0, 1] = 2
    dy = np.float32([[[[6.0], [0.5]], [[0.25], [1.0]]]])
    with force_path(path):
        found = jax.grad(lambda x: (conv.max_pool(x, 3, 2, 1) * dy).sum())(jnp.asarray(x))[0, :, :, 0]
    # Window (0, 0) holds both 2s, window (0, 1) the second of them, the others zeros alone.
    assert (found[0, 0], found[0, 1]) == (6.0, 0.5)
    np.testing.assert_allclose(found.sum(), dy.sum(), rtol=1e-6)
