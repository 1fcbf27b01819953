"""From bytes to what a network sees: standardising, scaling, normalising, and CIFAR's random crop and flip.

All of it takes whole batches of uint8 images and gives float32, on numpy arrays on the host as on jax arrays on the
device; standardising counts in integers first, so that both give the same bits on a CPU.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.errors import OptionError
from hotloop.families.cnn.options import PHOTOGRAPHS

CIFAR = ("cifar10", "cifar100")  # images that are padded, cropped, mirrored and standardised
PADDING = 4
MEAN, STD = np.array((0.485, 0.456, 0.406)), np.array((0.229, 0.224, 0.225))
"""Of ImageNet's training images, for pixels between 0 and 1."""
_LARGEST = 2**15  # values of an image whose squares add up in 32 bits

CropDraws = tuple[Any, Any, Any]
"""Rows and columns that the crop starts at (0 to 8 of the padded image), and whether it is mirrored; each [B]."""


def augment(dataset: str, images: Array, keys: Array) -> Array:
    """Training images [B, H, W, C] for the network; each sample draws from its own key, however a batch is split."""
    return preprocess(dataset, crop(dataset, images, keys))  # type: ignore[no-any-return]


def crop(dataset: str, images: Array, keys: Array) -> Array:
    """CIFAR's images cropped and mirrored; digits stay as they are, and photographs were cropped on the host."""
    if dataset not in CIFAR:
        return images
    return crop_and_flip(images, draw_crops(keys))  # type: ignore[no-any-return]


def preprocess(dataset: str, images: Any) -> Any:
    """Images [B, H, W, C] for the network as they are: the part of the preprocessing that leaves nothing to chance."""
    if dataset in CIFAR:
        return standardise(images)
    if dataset in PHOTOGRAPHS:  # bytes, or floats of that range, minus the mean colour, over its deviations
        factor, offset = (1 / (255 * STD)).astype(np.float32), (-MEAN / STD).astype(np.float32)
        return images.astype(np.float32) * factor + offset
    if "mnist" in dataset:
        return images.astype(np.float32) * np.float32(1 / 255)
    raise OptionError(f"--dataset {dataset}: there is no preprocessing for it")


def draw_crops(keys: Array, reach: int = PADDING) -> CropDraws:
    """Row and column of each sample, from 0 to 2 `reach`, and whether to mirror it; from 64 bits of its key."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
    places = jnp.uint32(2 * reach + 1)
    row = (bits[:, 0] >> 16) * places >> 16
    column = (bits[:, 0] & 0xFFFF) * places >> 16
    return row.astype(jnp.int32), column.astype(jnp.int32), bits[:, 1] >> 31 != 0


def draw_crops_on_host(generator: np.random.Generator, count: int) -> CropDraws:
    """The same on the host, for `count` samples."""
    row, column = generator.integers(0, 2 * PADDING + 1, (2, count))
    return row, column, generator.integers(0, 2, count) != 0


def crop_and_flip(
    images: Any,
    drawn: CropDraws,
    reach: int = PADDING,
    fill: Literal["constant", "edge", "reflect"] = "constant",
) -> Any:
    """Images padded by `reach` pixels a side (black, the nearest, or a reflection), cropped to their old size, mirrored
    as drawn."""
    pads = ((0, 0), (reach, reach), (reach, reach), (0, 0))
    if isinstance(images, np.ndarray):
        on_host, out = np.pad(images, pads, fill), np.empty_like(images)
        height, width = images.shape[1:3]
        for sample, (y, x, is_mirrored) in enumerate(zip(*drawn, strict=True)):
            crop = on_host[sample, y : y + height, x : x + width]
            out[sample] = crop[:, ::-1] if is_mirrored else crop
        return out
    row, column, mirrored = drawn
    padded = jnp.pad(images, pads, fill)

    def cut(image: Array, y: Array, x: Array) -> Array:
        return jax.lax.dynamic_slice(image, (y, x, 0), images.shape[1:])

    # A slice for each sample: on a CPU twice as fast as picking pixels, and six times as a product with one-hot rows.
    crops = jax.vmap(cut)(padded, row, column)
    return jnp.where(mirrored[:, None, None, None], crops[:, :, ::-1], crops)


def standardise(images: Any) -> Any:
    """Each image minus its mean, over its standard deviation, which counts as at least 1/sqrt(values): an image of one
    colour becomes zeros. Sums of bytes around the rounded mean are exact in 32 bits."""
    xp = images.__array_namespace__()
    count = int(np.prod(images.shape[1:]))
    if count > _LARGEST:
        raise OptionError(f"images of {count} values cannot be standardised: at most {_LARGEST}")
    whole = images.astype(np.int32)
    # Times 1/n, not over n: a compiler makes that of a division by a constant, and the bits should agree.
    share = np.float32(1 / count)
    add_up = partial(xp.sum, axis=(1, 2, 3), dtype=np.int32, keepdims=True)
    centre = (add_up(whole) + np.int32(count // 2)) // np.int32(count)
    around = whole - centre
    total = add_up(around).astype(np.float32)
    squares = add_up(around * around).astype(np.float32)
    variance = (squares - total * total * share) * share
    deviation = xp.maximum(xp.sqrt(variance), np.float32(1 / np.sqrt(count)))
    return (around.astype(np.float32) - total * share) * (np.float32(1) / deviation)
