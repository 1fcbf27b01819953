"""A batch over replicas and parts: one mean, one draw for each sample, whatever the split."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hotloop.engine.device import device_mesh
from hotloop.engine.keys import sample_keys
from hotloop.engine.precision import (
    AutoScale,
    average_replicas,
    init_trained,
    mean_of_parts,
    on_replicas,
    parse,
    update_weights,
)
from same_numbers import assert_close, assert_same_but_for, with_moved_weight

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
    mesh = device_mesh(devices) if devices > 1 else None
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
    mesh = device_mesh(devices) if devices > 1 else None
    parts = np.repeat(np.float32([256, 1, 1, 1]), 4)[:, None]  # each mean is a bfloat16, theirs is not
    found = jax.jit(on_replicas(halves, mesh))({"x": parts}, KEY)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [64.75])


WEIGHTS = {"w": np.float32([0.3, -0.2, 0.1])}
WIDE = parse("32.32")


def square(weights, seen, samples, keys):
    """A squared error of some samples whose targets are drawn; the carry is the mean of what was seen."""
    drawn = jax.vmap(jax.random.uniform)(keys)
    x = samples["x"].astype(weights["w"].dtype)
    error = jnp.square((x @ weights["w"]).astype(jnp.float32) - drawn).mean()
    return error, (seen + samples["x"].mean(0), {"error": error})


OPTIMISER = optax.sgd(0.1, momentum=0.9)


@cache
def compiled(devices, count, policy, scale):
    settings = {"policy": policy, "optimiser": OPTIMISER, "scale": scale, "accumulation": count}
    settings |= {"mesh": device_mesh(devices) if devices > 1 else None}
    return jax.jit(lambda old, batch: update_weights(square, old, batch, KEY, jax.random.key(1), **settings))


def step(devices=1, count=1, policy=WIDE, scale=1.0, batch=BATCH, weights=WEIGHTS):
    """One update with a momentum, from weights as the policy keeps them."""
    if devices > jax.device_count():
        pytest.skip(f"{devices} devices")
    kept = np.zeros(3, np.float32)
    old = init_trained(policy, OPTIMISER, scale, jax.tree.map(jnp.asarray, weights), kept)
    return old, *compiled(devices, count, policy, scale)(old, batch)


def test_an_update_is_the_optimisers_step_by_the_gradient_of_the_mean_loss():
    def mean(weights):
        return square(weights, 0, BATCH, sample_keys(KEY, 0, 16))[0]

    old, new, figures = step()
    loss, gradients = jax.jit(jax.value_and_grad(mean))(WEIGHTS)
    steps, _ = optax.sgd(0.1, momentum=0.9).update(gradients, old.optimiser, WEIGHTS)
    np.testing.assert_array_equal(new.params["w"], optax.apply_updates(WEIGHTS, steps)["w"])
    np.testing.assert_array_equal(figures["error"], loss)
    np.testing.assert_allclose(new.kept, BATCH["x"].mean(0, np.float64), rtol=2e-6)


@pytest.mark.parametrize(("devices", "count"), [(1, 4), (2, 1), (2, 2), (4, 4)])
def test_an_update_is_the_same_for_every_split_and_what_is_kept_goes_through_the_parts(devices, count):
    (_, whole, figures), (_, new, others) = step(), step(devices, count)
    other = {"x": BATCH["x"] + np.eye(16, 3, dtype=np.float32)[:, :1]}  # one number of one sample
    label, weight = (
        step(devices, count, **change)[1].params
        for change in ({"batch": other}, {"weights": with_moved_weight(WEIGHTS, "w")})
    )
    assert_same_but_for(new.params, whole.params, 1e-6, label=label, weight=weight)
    assert_close(others, figures, 1e-6)
    np.testing.assert_allclose(new.kept, count * whole.kept, rtol=1e-5)


@pytest.mark.parametrize("mode", ["16.32", "16.16"])
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit_of_an_update(mode):
    policy = parse(mode, "float16")
    _, plain, _ = step(count=2, policy=policy)
    for scale in (64.0, AutoScale(initial=64.0)):
        _, new, _ = step(count=2, policy=policy, scale=scale)
        jax.tree.map(np.testing.assert_array_equal, (new.params, new.optimiser), plain[:2])
        assert float(new.scale.scale) == 64


@pytest.mark.parametrize("devices", [1, 2])
def test_an_update_that_overflows_leaves_everything_but_the_scale_as_it_was(devices):
    policy = parse("16.16", "float16")
    old, new, _ = step(devices, 2, policy, AutoScale(initial=2.0**100, most=2.0**120))
    jax.tree.map(np.testing.assert_array_equal, new[:3], old[:3])
    assert (float(new.scale.scale), int(new.scale.skipped)) == (2.0**99, 1)
    _, spoilt, _ = step(devices, 2, policy, 2.0**100)
    assert not np.isfinite(spoilt.params["w"]).all()
