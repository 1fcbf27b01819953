"""The sampler's random numbers: jax's own generator, uniform, normal, and nothing but their place decides them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from hotloop.mcmc import random_bits

FLOAT32 = jnp.dtype("float32")


def test_the_words_are_those_of_jax() -> None:
    key, count = jnp.array([3, 0xDEADBEEF], jnp.uint32), 100
    low, high = jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 7, jnp.uint32)
    expected = threefry_2x32(key, jnp.concatenate([low, high]))
    found = jax.jit(random_bits.threefry)(key, low, high)
    np.testing.assert_array_equal(jnp.concatenate(found), expected)


@pytest.mark.parametrize("x64", [False, True])
def test_numbers_are_uniform_and_normal_of_the_type_asked_for(x64: bool) -> None:
    with jax.enable_x64(x64):
        dtype = jnp.dtype("float64" if x64 else "float32")
        words = random_bits.words_of(jax.random.key(1))
        normal, uniform = jax.jit(
            lambda words: random_bits.momenta_and_uniforms(words, jnp.uint32(5), 7, 20001, dtype)
        )(words)
        normal, uniform = np.asarray(normal), np.asarray(uniform)
    assert normal.shape == (7, 20001) and uniform.shape == (20001,)
    assert normal.dtype == uniform.dtype == dtype
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    assert stats.kstest(normal.ravel(), "norm").pvalue > 1e-3
    assert uniform.min() > 0 and uniform.max() < 1 and np.isfinite(normal).all()
    correlations = np.corrcoef(np.concatenate([normal, uniform[None]]))
    assert np.abs(correlations - np.eye(8)).max() < 5 / np.sqrt(20001)


def test_draws_and_keys_differ_and_the_ends_are_never_reached() -> None:
    words = [random_bits.words_of(jax.random.key(seed)) for seed in (0, 1)]
    found = [
        np.asarray(random_bits.uniforms(key, jnp.uint32(n), 64, FLOAT32)) for key in words for n in (0, 1)
    ]
    assert len({each.tobytes() for each in found}) == 4
    np.testing.assert_array_equal(found[0], random_bits.uniforms(words[0], jnp.uint32(0), 64, FLOAT32))
