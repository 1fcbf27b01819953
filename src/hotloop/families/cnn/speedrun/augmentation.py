"""Bytes to what the speedrun's network sees, in training and in the test. It knows no network.

Crops and colours are drawn for a sample's place in the batch of its update. Every image is mirrored in every second
pass, half of them in the even ones: each is seen both ways, and alike twice in a row by none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine.keys import sample_keys, stream
from hotloop.families.cnn.images import crop_and_flip, draw_crops
from hotloop.families.cnn.speedrun.config import Recipe

MEAN, DEVIATION = np.array((0.4914, 0.4822, 0.4465)), np.array((0.2470, 0.2435, 0.2616))
"""Of CIFAR-10's training images, for pixels between 0 and 1."""
VIEWS = 6


def normalise(images: Any) -> Any:
    """Bytes in float32, minus the mean colour, over its deviations."""
    factor, offset = (1 / (255 * DEVIATION)).astype(np.float32), (-MEAN / DEVIATION).astype(np.float32)
    return images.astype(np.float32) * factor + offset


def augment(recipe: Recipe, images_NHWC: Array, mirrored: Array, key: Array) -> Array:
    """A batch of bytes for training: shifted by up to `translation` pixels into its reflection, mirrored as told,
    brighter or darker, with more or less contrast."""
    count = len(images_NHWC)
    row, column, _ = draw_crops(sample_keys(stream(key, "crop", 0), 0, count), recipe.translation)
    shifted = crop_and_flip(images_NHWC, (row, column, mirrored), recipe.translation, "reflect")
    keys = sample_keys(stream(key, "colour", 0), 0, count)
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (2, 1, 1, 1), minval=-1, maxval=1))(keys)
    brightness, contrast = recipe.brightness * drawn[:, 0], 1 + recipe.contrast * drawn[:, 1]
    changed: Array = (normalise(shifted) + brightness) * contrast
    return changed


def further_views(images_NHWC: Array) -> Array:
    """[5, N, H, W, C]: the mirror image, and the image shifted by one pixel to both ends of a diagonal into its
    reflection, each with its mirror image."""
    height, width = images_NHWC.shape[1:3]
    padded = jnp.pad(images_NHWC, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
    views = [images_NHWC, padded[:, :height, :width], padded[:, 2:, 2:]]
    return jnp.stack([*views[1:], *(view[:, :, ::-1] for view in views)])
