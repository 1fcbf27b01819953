"""A batch over replicas and parts: one mean, one draw for each sample, whatever the split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.device import replica_mesh
from hotloop.engine.split import average_replicas, mean_of_parts, on_replicas

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)}
KEY = jax.random.key(7)


def part(seen, taken, keys):
    """The mean of some samples, each times a number of its own; the carry is how many parts have been."""
    drawn = jax.vmap(jax.random.uniform)(keys)
    return {"x": (taken["x"] * drawn[:, None]).mean(0)}, seen + 1


def averaged(count, repeated, axis, batch, key):
    means, seen = mean_of_parts(part, jnp.int32(0), batch, key, count, axis, repeated=repeated)
    return average_replicas(means, axis), seen


def split(devices, count, batch=BATCH, *, repeated=False):
    if devices > jax.device_count():
        pytest.skip(f"{devices} devices")
    mesh = replica_mesh(devices) if devices > 1 else None
    return jax.jit(on_replicas(partial(averaged, count, repeated), mesh))(batch, KEY)


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (1, 4), (2, 2), (4, 1), (4, 4)])
def test_every_split_gives_the_mean_of_the_whole_and_each_sample_its_own_number(devices, count):
    means, seen = split(devices, count)
    np.testing.assert_allclose(means["x"], split(1, 1)[0]["x"], rtol=1e-5, atol=1e-7)
    assert int(seen) == count


def test_the_parts_are_not_all_the_same():
    assert (
        np.abs(part(0, {"x": BATCH["x"][:4]}, jax.random.split(KEY, 4))[0]["x"] - split(1, 1)[0]["x"]).max()
        > 0.01
    )


def test_a_batch_that_stands_for_all_parts_is_seen_by_each_with_other_keys():
    few = {"x": BATCH["x"][:4]}
    means, seen = split(1, 4, few, repeated=True)
    again = {"x": np.concatenate([few["x"]] * 4)}
    np.testing.assert_allclose(means["x"], split(1, 1, again)[0]["x"], rtol=1e-5, atol=1e-7)
    assert int(seen) == 4


@pytest.mark.parametrize(("devices", "count"), [(1, 4), (4, 1)])
def test_sixteen_bit_gradients_are_averaged_in_float32(devices, count):
    def halves(axis, batch, key):
        def part(carry, taken, keys):
            return taken["x"].mean(0).astype(jnp.bfloat16), carry

        return average_replicas(mean_of_parts(part, 0, batch, key, count, axis)[0], axis)

    if devices > jax.device_count():
        pytest.skip(f"{devices} devices")
    mesh = replica_mesh(devices) if devices > 1 else None
    parts = np.repeat(np.float32([256, 1, 1, 1]), 4)[:, None]  # each mean is a bfloat16, theirs is not
    found = jax.jit(on_replicas(halves, mesh))({"x": parts}, KEY)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [64.75])
