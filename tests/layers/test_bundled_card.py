"""Grouped convolutions as one kernel on a Hopper card, against float64 on the CPU:
`JAX_PLATFORMS=cuda,cpu pytest tests/layers/test_bundled_card.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hotloop.layers import paths
from hotloop.layers.grouped_conv import grouped_conv2d

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < paths.CARD_JAX
    or not any(getattr(device, "compute_capability", None) == paths.CARD for device in jax.devices()),
    reason="needs a card of NVIDIA's Hopper generation and jax 0.11.2",
)
BOUNDS = {jnp.float16: 5e-4, jnp.bfloat16: 4e-3}
# Images, height, width, channels: rows of one warpgroup and of several, halves of an image, edges of all kinds.
SHAPES = [
    (4, 56, 56, 128),
    (3, 28, 28, 256),
    (2, 14, 14, 64),
    (1, 5, 112, 64),
    (1, 5, 63, 64),
    (2, 66, 79, 64),
    (1, 33, 61, 96),
]
# Rows of one bundle would be written over the next image; few pixels, a row and a column are no shape for it.
PLAIN = [(5, 7, 7, 32), (5, 7, 7, 64), (2, 1, 60, 64), (2, 60, 1, 64)]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, *PLAIN], ids=str)
def test_outputs_and_gradients_are_those_of_float64(shape, dtype):
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    kernel = jnp.asarray(rng.standard_normal((3, 3, 4, shape[3])) / 6, dtype)
    groups = shape[3] // 4

    def both(x, kernel, dy):
        y, back = jax.vjp(lambda x, kernel: grouped_conv2d(x, kernel, groups), x, kernel)
        return y, *back(dy)

    lowered = jax.jit(both).lower(x, kernel, dy)
    assert lowered.as_text().count("@mosaic_gpu") == (0 if shape in PLAIN else 2)  # chosen, not forced
    for found, expected in zip(lowered.compile()(x, kernel, dy), exact(x, kernel, dy, groups), strict=True):
        difference = np.linalg.norm(np.asarray(found, np.float64) - expected)
        assert difference < BOUNDS[dtype] * np.linalg.norm(expected)


def exact(x, kernel, dy, groups):
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(array, np.float64)) for array in (x, kernel, dy)]
        y, back = jax.vjp(
            lambda x, kernel: lax.conv_general_dilated(
                x,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            ),
            *wide[:2],
        )
        return [np.asarray(array) for array in (y, *back(wide[2]))]


def test_images_keep_to_themselves():
    """What a block reads beyond its image is zero, whatever lies there in memory."""
    x = jnp.stack([jnp.full((56, 56, 64), number, jnp.float16) for number in (1.0, jnp.inf, 2.0)])
    y = jax.jit(lambda x: grouped_conv2d(x, jnp.ones((3, 3, 4, 64), jnp.float16), 16))(x)
    alone = np.full((56, 56), 36.0)
    alone[[0, -1]] = 24
    alone[:, [0, -1]] *= 2 / 3
    np.testing.assert_array_equal(np.asarray(y[0, ..., 5], np.float32), alone)
    np.testing.assert_array_equal(np.asarray(y[2, ..., 5], np.float32), 2 * alone)
