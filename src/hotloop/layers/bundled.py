"""Which grouped convolutions are one kernel on a Hopper card, and what it is given.

Groups are multiplied by bundles: the kernels of some neighbouring groups become one matrix for each tap, zero between
groups. Calls with the same kernels in one turn of a loop share that.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from hotloop.layers.bundled_job import Job
from hotloop.layers.conv import Pads, spread_edges
from hotloop.layers.paths import CardKernel

TYPES = (jnp.float16, jnp.bfloat16)
BUNDLE = 32  # channels; of fewer the matrix unit makes no more use, of more it multiplies more zeros
PARTS = 4  # warpgroups of a block
SIZES = (3, 3)
INPUTS = (4,)  # channels of a group
LEAST_SHARE = 0.5  # of the pixels that a block multiplies; measured with 0.88, and images of 7 x 7 have 0.19


def forward(x: Array, kernel: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    from hotloop.layers.bundled_kernel import run

    return run(_make_job(x, kernel, pads), x, join_kernels(kernel, groups, BUNDLE))


def _make_job(x: Any, kernel: Any, pads: Pads) -> Job:
    images, height, width, channels = x.shape
    (above, below), (left, right) = pads
    kh, kw = kernel.shape[:2]
    size = height + above + below - kh + 1, width + left + right - kw + 1
    return Job(images, *size, channels, (kh, kw), (above, left), BUNDLE, PARTS, x.dtype)


def input_gradient(x: Array, kernel: Array, dy: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """The same of the cotangent, with each group's kernel turned round."""
    kh, kw, inputs, outputs = kernel.shape
    turned = jnp.flip(kernel, (0, 1)).reshape(kh, kw, inputs, groups, -1).swapaxes(2, 4)
    edges = spread_edges(x, kernel, dy, stride, pads)
    return forward(dy, turned.reshape(kh, kw, outputs // groups, -1), groups=groups, stride=1, pads=edges)


def join_kernels(kernel: Array, groups: int, channels: int) -> Array:
    """[kh, kw, c, O] as [bundle, tap, to, from], zero between groups."""
    kh, kw, inputs, outputs = kernel.shape
    few = channels // inputs  # groups of a bundle
    taps = kernel.reshape(kh * kw, inputs, groups // few, few, outputs // groups)
    own = jnp.eye(few, dtype=bool)
    # tap, from group, from, bundle, to group, to
    spread = jnp.where(own[:, None, None, :, None], taps[:, None], 0)
    return spread.transpose(3, 0, 4, 5, 1, 2).reshape(groups // few, kh * kw, channels, channels)


def _blocks(x: Any, kernel: Any, *dy: Any, groups: int, stride: int, pads: Pads) -> int | None:
    """1, as no block waits for another; None for a convolution that was not measured, or is unlike those that were."""
    inputs = kernel.shape[2]
    is_known = all(isinstance(size, int) and size > 0 for size in x.shape[:3])  # no symbol, as exports have
    is_square = kernel.shape[3] == groups * inputs and x.shape[3] % BUNDLE == 0 and BUNDLE % inputs == 0
    has_types = x.dtype in TYPES and all(array.dtype == x.dtype for array in (kernel, *dy))
    is_measured = kernel.shape[:2] == SIZES and stride == 1 and inputs in INPUTS
    # Of one bundle a row of an image is one piece of memory, which Mosaic copies without regard to the image's end:
    # rows below it would be written over the next image (seen with 7 x 7 pixels on a card).
    has_pieces = x.shape[3] > BUNDLE
    if not (is_known and is_square and has_types and is_measured and has_pieces):
        return None
    job = _make_job(x, kernel, pads)
    # Mosaic leaves out an axis of one row or column, and with it where that begins and ends.
    is_flat = min(*x.shape[1:3], job.height, job.width) < 2
    if dy:
        job = job._replace(height=x.shape[1], width=x.shape[2])
    return 1 if not is_flat and job.share >= LEAST_SHARE else None


FORWARD = CardKernel(forward, _blocks)
INPUT_GRADIENT = CardKernel(input_gradient, _blocks)
