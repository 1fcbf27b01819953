"""The family as the engine sees it, how it begins, what it draws, and numbers at their limits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.families.vcd import model, networks
from hotloop.families.vcd.config import VcdModel

QUICK = {"xla_backend_optimization_level": 0}
"""Half the time to compile, for programs that run once."""
TINY = VcdModel(z_dim=2, hidden=(5,), hmc_steps=2, leapfrog_steps=2, shared_updates=3, micro_batch_size=4)


def bits(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2, (count, 784), dtype=np.uint8)


def test_a_job_has_the_published_number_of_weights():
    state = jax.eval_shape(lambda key: model.init(model.Job(VcdModel(), 50_000), key), jax.random.key(0))
    counts = {
        name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(net))
        for name, net in state["params"].items()
    }
    assert counts == {"mean": 199_210, "spread": 199_210, "decoder": 199_984}
    assert state["variate"]["own"].shape == (50_000,)


def test_weights_and_biases_begin_with_the_scale_of_their_layer():
    """Hidden layers 1 / sqrt(their width), output layers 1; nothing shared between the networks."""
    params = jax.jit(networks.init, static_argnums=(1, 2), compiler_options=QUICK)(
        jax.random.key(0), 30, (200, 50)
    )
    widths = {"mean": (200, 50, 1), "spread": (200, 50, 1), "decoder": (50, 200, 1)}
    for name, scales in widths.items():
        for layer, width in zip(params[name], scales, strict=True):
            for leaf in layer.values():
                values = np.asarray(leaf, np.float64).ravel() * math.sqrt(width)
                assert abs(values.mean()) < 4 / math.sqrt(values.size)
                assert abs(values.std() - 1) < 4 / math.sqrt(2 * values.size)
    assert not np.allclose(params["mean"][0]["w"], params["spread"][0]["w"])


def test_each_row_draws_by_its_place_alone():
    draws = jax.jit(model.draw_noise, static_argnums=(0, 2), compiler_options=QUICK)
    few, many = (draws(TINY, jax.random.key(3), rows) for rows in (6, 4000))
    np.testing.assert_array_equal(few.start, many.start[:6])
    np.testing.assert_array_equal(few.momenta, many.momenta[:, :6])
    np.testing.assert_array_equal(few.uniforms, many.uniforms[:, :6])
    assert many.momenta.shape == (2, 4000, 2) and many.uniforms.shape == (2, 4000)
    normals = np.concatenate([many.start[None], many.momenta]).astype(np.float64)
    columns = normals.transpose(1, 0, 2).reshape(4000, -1)
    correlations = np.corrcoef(np.concatenate([columns, np.asarray(many.uniforms).T], 1), rowvar=False)
    assert np.abs(correlations - np.eye(len(correlations))).max() < 4.5 / math.sqrt(4000)
    np.testing.assert_allclose(columns.mean(0), 0, atol=4 / math.sqrt(4000))
    np.testing.assert_allclose(columns.std(0), 1, atol=4 / math.sqrt(8000))
    assert 0 <= many.uniforms.min() < 0.01 < 0.99 < many.uniforms.max() < 1


@pytest.mark.parametrize("float64", [False, True])
def test_a_spread_has_a_floor_and_a_finite_slope_everywhere(float64):
    """log(exp(a) + exp(1e-4)) for a in [-1e4, 1e4], where a naive one overflows beyond 88."""
    with jax.enable_x64(float64):
        raw = jnp.asarray(
            np.concatenate([np.linspace(-1e4, 1e4, 4001), np.linspace(-100, 100, 4001), [0, 1e-4]])
        )
        value, slope = jax.jit(jax.vmap(jax.value_and_grad(networks.spread)))(raw)
        assert (np.asarray(value) >= np.asarray(1e-4, value.dtype)).all() and np.isfinite(value).all()
        assert np.isfinite(slope).all() and (slope >= 0).all() and (slope <= 1).all()
        a = np.asarray(raw, np.float64)
        np.testing.assert_allclose(value, np.logaddexp(a, 1e-4), rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(slope, np.exp(-np.logaddexp(0, 1e-4 - a)), rtol=2e-6, atol=1e-30)


def test_likelihood_and_gradient_stay_finite_for_logits_of_ten_thousand():
    """One latent that is the logit of every pixel: half of the pixels are as sure as wrong."""
    decoder = ({"w": jnp.ones((1, 784)), "b": jnp.zeros(784)},)
    z = np.float32([[-1e4], [-100], [-88], [0], [88], [100], [1e4]])
    images = np.tile(np.float32(np.arange(784) % 2), (len(z), 1))
    value, gradient = jax.jit(networks.value_and_gradient(decoder, images))(z)
    assert np.isfinite(value).all() and np.isfinite(gradient).all()
    logits = z.astype(np.float64)
    expected = 392 * (logits - 2 * np.logaddexp(0, logits)) - 0.5 * (logits**2 + math.log(2 * math.pi))
    np.testing.assert_allclose(value, expected[:, 0], rtol=1e-6)
    sigmoid = np.exp(-np.logaddexp(0, -logits))
    np.testing.assert_allclose(gradient, 392 - 784 * sigmoid - logits, rtol=1e-6, atol=1e-4)
    weights = jax.jit(jax.grad(lambda d: networks.log_joint(d, images, z).sum()))(decoder)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(weights))
