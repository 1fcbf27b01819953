"""Grouped convolutions of few channels a group on a GPU, as sums that XLA's compiler makes one kernel of.

cuDNN's kernels for them are made for large images and cost a slow start each: ten depthwise layers of 56x56x64 took
71 us so, and 24 as fusions. NHWC; any padding and stride; long sums are made in float32.
"""

from itertools import product

import jax.numpy as jnp
from jax import Array, lax

from hotloop.layers.conv import Pads, spread_edges
from hotloop.layers.dense import wide
from hotloop.layers.paths import materialise

NO_PADS = ((0, 0), (0, 0))


def forward(x: Array, kernel: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """The sum over taps and a group's channels of a shifted image times one filter row."""
    kh, kw, inputs, outputs = kernel.shape
    images = _by_group(x, groups, pads)
    filters = kernel.reshape(kh, kw, inputs, groups, outputs // groups).astype(images.dtype)
    taps = product(range(kh), range(kw), range(inputs))
    terms = [
        _shifted(images, kernel, i, j, stride)[..., place, None] * filters[i, j, place]
        for i, j, place in taps
    ]
    y = sum(terms[1:], terms[0])
    return y.reshape(*y.shape[:3], outputs).astype(x.dtype)


def input_gradient(x: Array, kernel: Array, dy: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """The same sums over the cotangent, spread by the stride, with each group's filters turned round."""
    kh, kw, inputs, outputs = kernel.shape
    turned = jnp.flip(kernel, (0, 1)).reshape(kh, kw, inputs, groups, -1).transpose(0, 1, 4, 3, 2)
    turned = turned.reshape(kh, kw, outputs // groups, groups * inputs)
    rows, columns = spread_edges(x, kernel, dy, stride, pads)
    edges = [(0, 0, 0), (*rows, stride - 1), (*columns, stride - 1), (0, 0, 0)]
    spread = lax.pad(dy, jnp.zeros((), dy.dtype), edges)
    return forward(spread, turned, groups=groups, stride=1, pads=NO_PADS)


def kernel_gradient(x: Array, kernel: Array, dy: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """For each tap and channel of a group the sum over all pixels of shifted image times cotangent: first along the
    rows, then over them, as one sum over few channels would keep two multiprocessors busy."""
    kh, kw, inputs, outputs = kernel.shape
    images, dys = _by_group(x, groups, pads), _by_group(dy, groups, NO_PADS)
    taps = product(range(kh), range(kw), range(inputs))
    rows = jnp.stack(
        [
            (_shifted(images, kernel, i, j, stride)[..., place, None] * dys).sum(2).reshape(-1, outputs)
            for i, j, place in taps
        ]
    )
    dw: Array = materialise(rows).sum(1).reshape(kernel.shape).astype(kernel.dtype)
    return dw


def _by_group(x: Array, groups: int, pads: Pads) -> Array:
    padded = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    return padded.reshape(*padded.shape[:3], groups, -1).astype(wide(x.dtype))


def _shifted(images: Array, kernel: Array, i: int, j: int, stride: int) -> Array:
    """What the tap at row i and column j of a kernel meets: [N, rows, columns, groups, channels]."""
    kh, kw = kernel.shape[:2]
    rows, columns = ((images.shape[1] - kh) // stride + 1, (images.shape[2] - kw) // stride + 1)
    last = (images.shape[0], i + stride * (rows - 1) + 1, j + stride * (columns - 1) + 1, *images.shape[3:])
    return lax.slice(images, (0, i, j, 0, 0), last, (1, stride, stride, 1, 1))
