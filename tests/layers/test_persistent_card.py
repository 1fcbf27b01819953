"""Persistent recurrences on a Hopper card, every shape of the table, against float32: `JAX_PLATFORMS=cuda pytest`."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def case(cell, batch, hidden, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    params = getattr(recurrent, f"init_{cell}")(keys[0], hidden, hidden, dtype)
    noise = jax.random.normal(keys[1], (3 * hidden,), jnp.float32) * 0.1
    if cell == "gru_reset_after":
        params |= {"recurrent_bias": noise.astype(dtype)}
    x = jax.random.normal(keys[2], (T, batch, hidden), jnp.float32).astype(dtype)
    dy = jax.random.normal(keys[3], (T, batch, hidden), jnp.float32).astype(dtype)
    return params, x, dy


def run(cell, params, x, dy):
    """The inference's outputs, the training's, and all gradients; the state is given in training alone."""
    layer = getattr(recurrent, cell)
    h = jnp.full(x.shape[1:], 0.25, x.dtype)
    state = (h, h) if cell == "lstm" else h

    def train(params, x, state):
        y, last = layer(params, x, state)
        weighted = (y.astype(jnp.float32) * dy).sum()
        return weighted + sum(part.astype(jnp.float32).sum() for part in jax.tree.leaves(last)), y

    (_, y), gradients = jax.value_and_grad(train, (0, 1, 2), has_aux=True)(params, x, state)
    return layer(params, x)[0], y, gradients


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("cell", "batch", "hidden"), SHAPES)
def test_values_and_gradients_are_those_of_float32(cell, batch, hidden, dtype):
    given = case(cell, batch, hidden, dtype)
    has_way_back = (cell, batch, hidden) in persistent_tiles.BACKWARD or (
        batch,
        hidden,
    ) in persistent_tiles.ALONE
    # Both types take the kernels that are chosen for float16; a way back that has none stays plain.
    with paths.force_path(paths.PERSISTENT) if has_way_back else nullcontext():
        lowered = jax.jit(run, static_argnums=0).lower(cell, *given)
    if has_way_back or dtype in persistent.TYPES:
        assert lowered.as_text().count("@mosaic_gpu") == 2 + has_way_back
    ours = lowered.compile()(*given)
    with paths.force_path("default"), jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda array: array.astype(jnp.float32), given)
        theirs = jax.jit(run, static_argnums=0)(cell, *wide)
    for ours_y, theirs_y in zip(ours[:2], theirs[:2], strict=True):
        assert np.abs(np.asarray(ours_y, np.float32) - theirs_y).max() < VALUES[dtype]
    for mine, exact in zip(jax.tree.leaves(ours[2]), jax.tree.leaves(theirs[2]), strict=True):
        difference = np.linalg.norm(np.asarray(mine, np.float32) - exact) / np.linalg.norm(exact)
        assert difference < GRADIENTS[dtype]
