"""The example's images: CIFAR-10, its stand-in, or random ones for timing; and their augmentation on the device.

Whole-pixel shifts and mirroring, bytes in and bytes out. Every sample draws from a key of its own, so that a batch is
augmented alike however it is split.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.data.catalogue import known_set
from hotloop.data.dataset import IMAGE_SETS, Dataset, LabelledImages, read_images
from hotloop.data.load import load as load_set
from hotloop.data.local_files import find_set
from hotloop.engine.keys import sample_keys
from hotloop.engine.progress import Console
from hotloop.families.estimator.cifar.config import CifarConfig

NAME = "cifar10"
SHAPE, CLASSES = (32, 32, 3), 10
Fill = Literal["edge", "constant"]
REACH: dict[str, tuple[int, Fill]] = {"shift": (3, "edge"), "crop": (4, "constant")}
"""How far each augmentation moves an image, and what comes in from beyond its border: the nearest pixel, or black."""
NamedBatch = dict[str, Any]


def load_images(config: CifarConfig, console: Console) -> Dataset:
    """What is trained and tested on; where it comes from is said."""
    if config.generated_data:
        data = generate_images(config.seed)
        console.say(f"data: {len(data.train):,} + {len(data.test):,} random images with random labels")
        return data
    with console.progress("loading images"):
        return load_set(NAME, config.dataset_path, console.say, console.progress)


def generate_images(seed: int) -> Dataset:
    """As many random images and labels as CIFAR-10 has; nothing can be learnt from them."""
    generator = np.random.default_rng(seed)
    train, test = (
        LabelledImages(
            generator.integers(0, 256, (count, *SHAPE), np.uint8),
            generator.integers(0, CLASSES, count, np.int32),
        )
        for count in IMAGE_SETS[NAME]
    )
    return Dataset(name="generated", source="random", classes=CLASSES, train=train, test=test)


def count_training_images(config: CifarConfig) -> int:
    """How many there are where the files are here already, else how many CIFAR-10 has: nothing is fetched."""
    known = known_set(NAME)
    found = None if config.generated_data else find_set(known, config.dataset_path)
    if found and found.loadable:
        return len(read_images(found).train)
    return IMAGE_SETS[NAME][0]


@cache
def find_transform(augmentation: str) -> Callable[[NamedBatch, Array], NamedBatch] | None:
    """What an augmentation does to a batch, always the same function; None where it does nothing."""
    if augmentation not in REACH:
        return None
    reach, fill = REACH[augmentation]

    def transform(batch: NamedBatch, key: Array) -> NamedBatch:
        moves = draw_moves(sample_keys(key, 0, len(batch["features"])), reach)
        return {**batch, "features": shift_and_mirror(batch["features"], *moves, reach, fill)}

    return transform


def draw_moves(keys: Array, reach: int) -> tuple[Array, Array, Array]:
    """For each key a row and a column between 0 and 2 `reach`, all as likely, and whether to mirror; [N] each."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
    places = jnp.uint32(2 * reach + 1)
    row, column = (bits[:, 0] >> 16) * places >> 16, (bits[:, 0] & 0xFFFF) * places >> 16
    return row.astype(jnp.int32), column.astype(jnp.int32), bits[:, 1] >> 31 != 0


def shift_and_mirror(
    images: Array, row: Array, column: Array, mirrored: Array, reach: int, fill: Fill
) -> Array:
    """Images [N, H, W, C] cut at (row, column) out of themselves with a border of `reach` pixels, then mirrored."""
    edges = ((0, 0), (reach, reach), (reach, reach), (0, 0))
    padded = jnp.pad(images, edges, fill)

    def cut(image: Array, y: Array, x: Array) -> Array:
        return lax.dynamic_slice(image, (y, x, 0), images.shape[1:])

    crops = jax.vmap(cut)(padded, row, column)
    return jnp.where(mirrored[:, None, None, None], crops[:, :, ::-1], crops)
