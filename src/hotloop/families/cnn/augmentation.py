"""What a network sees of a training image: cropped and mirrored, changed by TrivialAugment, normalised, partly erased.

Every draw is made from the sample's own key, whatever the split of a batch. Mixing with others is in mixing.py.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from hotloop.engine.keys import stream
from hotloop.families.cnn import images, mixing
from hotloop.families.cnn.options import FOLDER, TrainConfig
from hotloop.families.cnn.random_parts import cut_random_parts
from hotloop.families.cnn.trivial_augment import change, draw_changes

AREAS, RATIOS = (0.02, 1 / 3), (0.3, 1 / 0.3)
"""Of what is erased: its share of the image, and its height over its width (Zhong et al., 2017)."""
STEPS = 64  # of each of the two


def see(
    config: TrainConfig, pixels: Array, keys: Array, *, side: int | None = None, cropped: bool = True
) -> Array:
    """Images [N, H, W, C] as the network takes them, in float32. Those of an own set that stay on the device are larger
    than the network's `side`, which sees random parts of them."""
    if cropped:
        pixels = images.crop(config.dataset, pixels, keys)
    if side is not None and config.dataset == FOLDER and pixels.shape[1] != side:
        pixels = cut_random_parts(pixels, keys, side)
    if config.trivial_augment:
        pixels = change(_to_bytes(pixels), draw_changes(keys))
    seen: Array = images.preprocess(config.dataset, pixels)
    return erase(seen, config.random_erasing, keys) if config.random_erasing else seen


def see_mixed(
    config: TrainConfig,
    pixels: Array,
    others: Array,
    keys: Array,
    *,
    side: int | None = None,
    cropped: bool = True,
) -> Array:
    """The same with the partners of the images in them."""
    own = see(config, pixels, keys, side=side, cropped=cropped)
    other = see(config, others, mixing.partner_keys(keys), side=side, cropped=cropped)
    return mixing.mix(mixing.draw_mixing(config, keys, *own.shape[1:3]), own, other)


def _to_bytes(pixels: Array) -> Array:
    """Photographs may come as floats of the range of bytes."""
    if pixels.dtype == jnp.uint8:
        return pixels
    return jnp.clip(jnp.round(pixels), 0, 255).astype(jnp.uint8)


@cache
def erased_sizes(height: int, width: int) -> NDArray[np.int32]:
    """[K, 2]: rows and columns of what may be erased, each as likely: every area with every form that fits."""
    middles = (np.arange(STEPS) + 0.5) / STEPS
    area = (AREAS[0] + (AREAS[1] - AREAS[0]) * middles)[:, None] * height * width
    ratio = np.exp(np.log(RATIOS[0]) + np.log(RATIOS[1] / RATIOS[0]) * middles)[None]
    sizes = np.stack([np.round(np.sqrt(area * ratio)), np.round(np.sqrt(area / ratio))], -1).reshape(-1, 2)
    fits = (sizes < (height, width)).all(-1) & (sizes > 0).all(-1)
    return sizes[fits].astype(np.int32)


def erase(seen_NHWC: Array, probability: float, keys: Array) -> Array:
    """Zeros (the mean colour, as images are normalised) in a part of as many of the images as `probability` says."""
    height, width = seen_NHWC.shape[1:3]
    bits = jax.vmap(lambda key: jax.random.bits(stream(key, "erasing", 0), (4,), jnp.uint32))(keys)
    high = bits >> 16
    sizes = jnp.asarray(erased_sizes(height, width))[
        high[:, 1] * jnp.uint32(len(erased_sizes(height, width))) >> 16
    ]
    is_erased = high[:, 0] < jnp.uint32(round(probability * 2**16))

    def within(length: int, size: Array, drawn: Array) -> Array:
        first = (drawn * (length - size + 1).astype(jnp.uint32) >> 16).astype(jnp.int32)
        places = jnp.arange(length)
        return (places >= first[:, None]) & (places < (first + size)[:, None])

    rows, columns = within(height, sizes[:, 0], high[:, 2]), within(width, sizes[:, 1], high[:, 3])
    gone = rows[:, :, None] & columns[:, None, :] & is_erased[:, None, None]
    return jnp.where(gone[..., None], 0, seen_NHWC)
