"""A key made of the samples' keys draws for each what its own key draws, in whatever split of the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.keys import sample_keys
from hotloop.families.estimator.sample_draws import join_keys

KEYS = sample_keys(jax.random.key(7), 0, 8)
DRAWS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "uniform": jax.random.uniform,
    "normal": jax.random.normal,
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.3, shape),
    "randint": lambda key, shape: jax.random.randint(key, shape, 0, 1000),  # splits its key
    "folded": lambda key, shape: jax.random.uniform(jax.random.fold_in(key, 3), shape),
    "split": lambda key, shape: jax.random.uniform(jax.random.split(key, 2)[1], shape),
    "bytes": lambda key, shape: jax.random.bits(key, shape, jnp.uint8),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_each_row_is_drawn_by_its_sample_s_key(draw: str) -> None:
    found = DRAWS[draw](join_keys(KEYS), (8, 3))
    for row in range(8):
        assert np.array_equal(found[row], DRAWS[draw](KEYS[row], (3,)))
    assert len(np.unique(np.asarray(found), axis=0)) > 3


def test_a_part_of_the_batch_draws_what_the_whole_does() -> None:
    draw = jax.jit(lambda keys: jax.random.normal(join_keys(keys), (keys.shape[0], 5)))
    assert np.array_equal(np.concatenate([draw(KEYS[:4]), draw(KEYS[4:])]), draw(KEYS))


def test_what_has_no_row_for_each_sample_comes_from_the_first() -> None:
    assert np.array_equal(jax.random.uniform(join_keys(KEYS), (1, 4)), jax.random.uniform(KEYS[0], (1, 4)))
