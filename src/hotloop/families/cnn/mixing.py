"""Mixup and cutmix: every training image with another one of its global batch in it, and their labels alike.

Mixup (Zhang et al., 2017) adds a share of the other image to all of this one; cutmix (Yun et al., 2019) puts a part of
the other one in its place. How much, where, and which of the two is drawn from a sample's own key, and its partner is
the one as far from the end of the global batch as it is from the beginning, so that no split changes anything. Draws
pick from tables that are made on the host, and are whole numbers: every device picks the same.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from hotloop.engine.keys import stream
from hotloop.families.cnn.options import TrainConfig

QUANTILES = 4096  # of a beta distribution, all as likely: 12 bits draw one
OTHER = "other_"  # before the names of a partner's arrays in a batch


class Mixing(NamedTuple):
    """For each sample: the share of its own label, and the part in which the other image stands, or how much of all."""

    share: Array  # [N] float32
    is_cut: Array  # [N] bool
    top: Array  # [N] and so on, int32: rows from top to before bottom, columns from left to before right
    bottom: Array
    left: Array
    right: Array


def is_mixed(config: TrainConfig) -> bool:
    return bool(config.mixup or config.cutmix)


def add_partners(batch: Mapping[str, Array]) -> dict[str, Array]:
    """The global batch with every sample's partner beside it: the batch from its end."""
    return {**batch, **{OTHER + name: leaf[::-1] for name, leaf in batch.items()}}


def partner_keys(keys: Array) -> Array:
    """What a partner draws its own crop and so on from; not what it draws as a sample of its own place."""
    return jax.vmap(lambda key: stream(key, "partner", 0))(keys)


@cache
def beta_quantiles(alpha: float) -> NDArray[np.float32]:
    """Values of Beta(alpha, alpha), each as likely as the others: the middles of so many equal slices."""
    from scipy.special import betaincinv

    slices = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return betaincinv(alpha, alpha, slices).astype(np.float32)  # type: ignore[no-any-return]


def draw_mixing(config: TrainConfig, keys: Array, height: int, width: int) -> Mixing:
    """What each sample draws for itself."""
    bits = jax.vmap(lambda key: jax.random.bits(stream(key, "mixing", 0), (4,), jnp.uint32))(keys)
    place = bits[:, 0] >> 20
    is_cut = jnp.full(len(bits), bool(config.cutmix))
    if config.mixup and config.cutmix:
        is_cut = bits[:, 1] >> 31 != 0
    share = jnp.ones(len(bits), jnp.float32)
    if config.mixup:
        share = jnp.asarray(beta_quantiles(config.mixup))[place]
    top, bottom, left, right = _draw_boxes(config.cutmix, place, bits[:, 2], bits[:, 3], height, width)
    # What lies outside of the image is not cut out, so that the label goes by the box that is left.
    left_over = height * width - (bottom - top) * (right - left)
    of_box = left_over.astype(jnp.float32) * np.float32(1 / (height * width))
    return Mixing(jnp.where(is_cut, of_box, share), is_cut, top, bottom, left, right)


def _draw_boxes(
    alpha: float, place: Array, row: Array, column: Array, height: int, width: int
) -> tuple[Array, ...]:
    """Boxes of an area of 1 - Beta(alpha, alpha), as the image is formed, around any pixel; cut off at its edges."""
    if not alpha:
        return (jnp.zeros(len(place), jnp.int32),) * 4
    sides = np.sqrt(1 - beta_quantiles(alpha).astype(np.float64))
    edges: list[Array] = []
    for length, bits in ((height, row), (width, column)):
        half = jnp.asarray((length * sides).astype(np.int32) // 2)[place]
        centre = ((bits >> 16) * jnp.uint32(length) >> 16).astype(jnp.int32)
        edges += [jnp.maximum(centre - half, 0), jnp.minimum(centre + half, length)]
    return tuple(edges)


def mix(mixing: Mixing, images_NHWC: Array, others_NHWC: Array) -> Array:
    """The images with their partners in them."""
    height, width = images_NHWC.shape[1:3]

    def between(first: Array, last: Array, count: int) -> Array:
        places = jnp.arange(count)
        return (places >= first[:, None]) & (places < last[:, None])

    rows, columns = between(mixing.top, mixing.bottom, height), between(mixing.left, mixing.right, width)
    inside = (rows[:, :, None] & columns[:, None, :])[..., None]
    share = jnp.where(
        mixing.is_cut[:, None, None, None],
        jnp.where(inside, 0, 1).astype(images_NHWC.dtype),
        mixing.share[:, None, None, None].astype(images_NHWC.dtype),
    )
    return share * images_NHWC + (1 - share) * others_NHWC


def mean_of_both(own: Array, other: Array, share: Array) -> Any:
    """A value for each sample by its own label and by its partner's, in their shares."""
    return share * own + (1 - share) * other
