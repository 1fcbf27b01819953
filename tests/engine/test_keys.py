"""Named streams never share a key, and a sample's draw does not depend on how the batch is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.keys import sample_keys, stream

NAMES = ("update", "transform", "init", "epoch", "evaluate", "dropout", "noise", "shuffle")


def data(key: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))


def test_no_two_places_of_any_streams_share_a_key() -> None:
    places = jnp.arange(2_000)
    keys = [data(jax.vmap(lambda n, name=name: stream(jax.random.key(0), name, n))(places)) for name in NAMES]
    flat = np.concatenate(keys)
    assert len(np.unique(flat, axis=0)) == len(flat) == len(NAMES) * 2_000


def test_a_stream_differs_from_folding_the_number_alone() -> None:
    key = jax.random.key(1)
    assert not np.array_equal(data(stream(key, "update", 3)), data(jax.random.fold_in(key, 3)))


def test_a_traced_number_gives_the_key_of_the_same_python_number() -> None:
    key = jax.random.key(2)
    traced = jax.jit(lambda n: stream(key, "update", n))
    for n in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        np.testing.assert_array_equal(data(traced(np.uint32(n))), data(stream(key, "update", np.uint32(n))))


def test_seeds_give_other_streams() -> None:
    assert not np.array_equal(
        data(stream(jax.random.key(1), "a", 0)), data(stream(jax.random.key(2), "a", 0))
    )


@pytest.mark.parametrize("parts", [(12,), (4, 4, 4), (1, 11), (5, 7), (1,) * 12])
def test_any_split_of_a_batch_draws_the_same_numbers(parts: tuple[int, ...]) -> None:
    key = stream(jax.random.key(3), "update", 7)
    starts = np.cumsum((0, *parts[:-1]))
    draw = jax.vmap(lambda k: jax.random.normal(k, (3,)))
    split = np.concatenate(
        [draw(sample_keys(key, first, count)) for first, count in zip(starts, parts, strict=True)]
    )
    np.testing.assert_array_equal(split, draw(sample_keys(key, 0, 12)))


def test_a_traced_first_sample_works_inside_a_compiled_program() -> None:
    key = jax.random.key(4)
    inside = jax.jit(lambda first: sample_keys(key, first, 2))(6)
    np.testing.assert_array_equal(data(inside), data(sample_keys(key, 6, 2)))
