"""The GRU with the reset gate after the product, against its formula written plainly in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.layers.recurrent import gru_reset_after

T, B, INPUTS, H = 11, 3, 5, 7


def plain(params, x_TBI):
    """One step after the other, differentiated by JAX."""

    def step(h, x):
        (zr, zu, zc) = jnp.split(x @ params["input"] + params["bias"], 3, 1)
        (r, u, c) = jnp.split(h @ params["recurrent"], 3, 1)
        reset, update = 1 / (1 + jnp.exp(-(zr + r))), 1 / (1 + jnp.exp(-(zu + u)))
        h = update * h + (1 - update) * jnp.tanh(zc + reset * c)
        return h, h

    return jax.lax.scan(step, jnp.zeros((x_TBI.shape[1], H), x_TBI.dtype), x_TBI)[1]


def case(timesteps):
    rng = np.random.default_rng(0)
    shapes = {"input": (INPUTS, 3 * H), "recurrent": (H, 3 * H), "bias": (3 * H,)}
    params = {name: jnp.array(rng.normal(size=shape)) for name, shape in shapes.items()}
    return params, jnp.array(rng.normal(size=(timesteps, B, INPUTS))), rng.normal(size=(timesteps, B, H))


@pytest.mark.parametrize("timesteps", [1, pytest.param(5, marks=pytest.mark.slow), T])
def test_outputs_and_gradients_equal_the_plain_formula(timesteps):
    with jax.enable_x64(True):
        params, x, weights = case(timesteps)

        def loss(layer):
            return lambda params, x: (layer(params, x) * weights).sum()

        def fused(params, x):
            return gru_reset_after(params, x)[0]

        @partial(jax.jit, static_argnums=0)
        def run(layer, params, x):
            return layer(params, x), jax.grad(loss(layer), (0, 1))(params, x)

        (y, ours), (expected, theirs) = run(fused, params, x), run(plain, params, x)
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), ours, theirs)


def test_a_given_state_continues_the_sequence():
    with jax.enable_x64(True):
        params, x, _ = case(T)
        layer = jax.jit(gru_reset_after)
        whole, last = layer(params, x)
        first, state = layer(params, x[:4])
        second, end = layer(params, x[4:], state)
        np.testing.assert_allclose(jnp.concatenate([first, second]), whole, rtol=1e-12)
        np.testing.assert_allclose(end, last, rtol=1e-12)
