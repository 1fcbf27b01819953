"""Random parts cut on the device: the host's resampling, the host's rule, and draws that belong to samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.data.image_stores import no_boxes
from hotloop.data.resample import SamplingGrid, resample
from hotloop.families.cnn.photographs import random_crop
from hotloop.families.cnn.random_parts import Parts, cut_random_parts, draw_parts, resample_parts

SIDE, SIZE, COUNT = 36, 32, 4096


@pytest.fixture(scope="module")
def drawn():
    keys = jax.random.split(jax.random.key(3), COUNT)
    return jax.tree.map(np.asarray, jax.jit(lambda keys: draw_parts(keys, SIDE))(keys))


def test_parts_lie_in_the_image_and_have_the_aspects_and_areas_of_the_rule(drawn):
    eps = 1e-4
    assert (drawn.left >= 0).all() and (drawn.top >= 0).all()
    assert (drawn.left + drawn.width <= SIDE + eps).all() and (drawn.top + drawn.height <= SIDE + eps).all()
    aspects, areas = drawn.width / drawn.height, drawn.width * drawn.height / SIDE**2
    assert 0.75 - eps <= aspects.min() < 0.76 and 1.32 < aspects.max() <= 1.33 + eps
    assert 0.1 - eps <= areas.min() < 0.11 and 0.9 < areas.max() <= 1 + eps
    assert abs(drawn.mirrored.mean() - 0.5) < 5 * 0.5 / COUNT**0.5


def test_parts_are_distributed_as_those_that_the_host_cuts(drawn):
    """Of a large square, whose whole pixels do not show: means of every side within 5 standard errors."""
    generator, large = np.random.default_rng(0), 4000
    found = np.array([random_crop(generator, large, large, no_boxes()) for _ in range(COUNT)]) / large
    ours = np.stack([drawn.left, drawn.top, drawn.width, drawn.height], 1) / SIDE
    error = np.sqrt((found.var(0) + ours.var(0)) / COUNT)
    np.testing.assert_array_less(np.abs(found.mean(0) - ours.mean(0)), 5 * error)


@pytest.mark.parametrize("mirrored", [False, True])
def test_resampling_is_the_hosts_pixel_for_pixel(mirrored):
    draws = np.random.default_rng(1)
    images = draws.integers(0, 256, (6, SIDE, SIDE, 3), np.uint8)
    # Steps that float32 has exactly: one that it has not could fall on the other side of a whole number.
    sides = np.array([36.0, 32.0, 20.0, 18.0, 12.5, 33.0])
    parts = Parts(
        *(jnp.asarray(each, jnp.float32) for each in ((36 - sides) / 2, (36 - sides) / 4, sides, sides)),
        jnp.full(6, mirrored),
    )
    found = np.asarray(jax.jit(lambda images, parts: resample_parts(images, parts, SIZE))(images, parts))
    for image, side, ours in zip(images, sides, found, strict=True):
        grid = SamplingGrid((36 - side) / 2, (36 - side) / 4, side / SIZE, side / SIZE)
        np.testing.assert_array_equal(ours, resample(image, grid, SIZE, mirrored).astype(np.uint8))


def test_a_sample_gets_the_same_part_however_the_batch_is_split():
    images = np.random.default_rng(2).integers(0, 256, (8, SIDE, SIDE, 3), np.uint8)
    keys = jax.random.split(jax.random.key(0), 8)
    cut = jax.jit(cut_random_parts, static_argnums=2)
    whole = np.asarray(cut(images, keys, SIZE))
    halves = [np.asarray(cut(images[half], keys[half], SIZE)) for half in (slice(0, 4), slice(4, 8))]
    np.testing.assert_array_equal(np.concatenate(halves), whole)
    assert not np.array_equal(whole[0], np.asarray(cut(images, keys[::-1], SIZE))[0])
