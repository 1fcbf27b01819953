"""Persistent recurrences on a Hopper card, every shape of the table, against float64 on the CPU:
`JAX_PLATFORMS=cuda,cpu pytest tests/layers/test_persistent_card.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrence_oracle as oracle

from hotloop.layers import paths, persistent, persistent_tiles, recurrent

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < paths.CARD_JAX
    or not any(getattr(device, "compute_capability", None) == paths.CARD for device in jax.devices()),
    reason="needs a card of NVIDIA's Hopper generation and jax 0.11.2",
)
T = 7
SHAPES = [*persistent_tiles.INFER, *(("rnn", *shape) for shape in persistent_tiles.ALONE)]
# bfloat16 rounds what a step reads and writes to 8 bits: its bounds are those of the kernel benchmark.
VALUES = {jnp.float16: 2e-3, jnp.bfloat16: 1.6e-2}
GRADIENTS = {jnp.float16: 1e-2, jnp.bfloat16: 4e-2}


def case(cell, batch, hidden, dtype, timesteps=T):
    rng = np.random.default_rng(0)

    def draw(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    params = getattr(recurrent, f"init_{cell}")(jax.random.key(0), hidden, hidden, dtype)
    if cell == "gru_reset_after":
        params |= {"recurrent_bias": draw(3 * hidden, scale=0.1)}
    return params, draw(timesteps, batch, hidden), draw(timesteps, batch, hidden)


def run(layer, params, x, state, gradients):
    """The inference's outputs and the training's, and all gradients; the state is given in training alone."""
    (y, _), back = oracle.differentiate(layer, params, x, state, gradients)
    return (layer(params, x)[0], y), back


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("cell", "batch", "hidden"), SHAPES)
def test_values_and_gradients_are_those_of_float64(cell, batch, hidden, dtype):
    params, x, dy = case(cell, batch, hidden, dtype)
    h, ones = (jnp.full(x.shape[1:], value, dtype) for value in (0.25, 1))
    state, d_last = ((h, h), (ones, ones)) if cell == "lstm" else (h, ones)
    given = params, x, state, (dy, d_last)
    is_alone = persistent.is_alone(cell, batch, hidden)
    has_way_back = is_alone or (cell, batch, hidden) in persistent_tiles.BACKWARD
    lowered = jax.jit(partial(run, getattr(recurrent, cell))).lower(*given)
    assert lowered.as_text().count("@mosaic_gpu") == 2 + has_way_back  # chosen, not forced
    values, gradients = lowered.compile()(*given)
    exact, right = oracle.in_float64(run, cell, *given)
    oracle.assert_values_near(values, exact, VALUES[dtype])
    oracle.assert_gradients_near(gradients, right, GRADIENTS[dtype])


@pytest.mark.parametrize("opening", [0.0, 6.0], ids=["as initialised", "nearly open"])
@pytest.mark.parametrize("cell", ["lstm", "gru_reset_after", "gru"])
def test_long_sequences_keep_what_they_should(cell, opening):
    """A thousand steps whose forget (or update) gate multiplies the state by nearly one: what a gate is off adds up."""
    hidden, timesteps = 512, 1000
    params, x, _ = case(cell, 64, hidden, jnp.float16, timesteps)
    # Of an LSTM the forget gate, of a GRU the update gate: the second third or fourth of the sums.
    params["bias"] = params["bias"].at[hidden : 2 * hidden].add(opening)
    layer = jax.jit(lambda params, x: getattr(recurrent, cell)(params, x)[0])
    lowered = layer.lower(params, x)
    assert "@mosaic_gpu" in lowered.as_text()
    ours = np.asarray(lowered.compile()(params, x), np.float64)
    exact = oracle.in_float64(lambda layer, params, x: layer(params, x)[0], cell, params, x)
    with paths.force_path("default"):
        plain = np.asarray(layer(params, x), np.float64)

    def largest(values):
        return np.abs(values - exact).max()

    def share(values):
        return np.linalg.norm(values - exact) / np.linalg.norm(exact)

    # An open LSTM is chaotic: over so many steps 16 bits go their own way, in the plain loop as well. Gate sums of 6
    # are rounded to 2^-8, and the share 1 - gate, of which a GRU's state is made, so to 4e-3.
    assert largest(ours) < max(VALUES[jnp.float16], 1.25 * largest(plain))
    assert share(ours) < max(5e-3, 1.25 * share(plain))
