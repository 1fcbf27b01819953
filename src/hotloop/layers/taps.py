"""Grouped convolution with few channels a group, as sums of shifted elementwise products.

The input is cut into planes, one for each place within a group, so that the groups lie side by side in memory and
every product runs over whole vectors. What XLA:CPU turns into fast loops was found by trial (docs/layers.md):
padding must be written out first, each output plane must be its own sum, and the kernel's gradient must go row by
row. Which convolutions come here is decided in grouped_conv.py.
"""

import jax.numpy as jnp
from jax import Array, lax

from hotloop.layers.conv import Pads, spread_edges
from hotloop.layers.materialise import materialised
from hotloop.layers.product import wide

NO_PADS = ((0, 0), (0, 0))
LANES = 256  # floats that one turn of the kernel gradient's sums works on at once: 8 vectors of 32, 4 of 64


def taps_forward(x: Array, kernel: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """Each output plane is the sum, over taps and input planes, of a shifted plane times one filter row."""
    kh, kw, c, outputs = kernel.shape
    planes = _planes(x, groups, pads)
    filters_hwcog = kernel.reshape(kh, kw, c, groups, -1).swapaxes(3, 4)
    filters_hwcog = materialised(filters_hwcog.astype(planes.dtype))
    rows, columns = ((planes.shape[2] - kh) // stride + 1, (planes.shape[3] - kw) // stride + 1)

    def shifted(place: int, i: int, j: int) -> Array:
        start = (place, 0, i, j, 0)
        last = (place + 1, x.shape[0], i + stride * (rows - 1) + 1, j + stride * (columns - 1) + 1, groups)
        return lax.slice(planes, start, last, (1, 1, stride, stride, 1))[0]

    def summed(o: int) -> Array:
        terms = [
            shifted(place, i, j) * filters_hwcog[i, j, place, o]
            for i in range(kh)
            for j in range(kw)
            for place in range(c)
        ]
        plane: Array = materialised(sum(terms[1:], terms[0]))
        return plane

    ys = jnp.stack([summed(o) for o in range(outputs // groups)], -1)
    y: Array = materialised(ys.reshape(x.shape[0], rows, columns, outputs).astype(x.dtype))
    return y


def taps_input_gradient(x: Array, kernel: Array, dy: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """The same sums over the cotangent, spread by the stride, with each group's filters turned round."""
    kh, kw, c, outputs = kernel.shape
    turned = jnp.flip(kernel, (0, 1)).reshape(kh, kw, c, groups, -1).transpose(0, 1, 4, 3, 2)
    turned = turned.reshape(kh, kw, outputs // groups, groups * c)
    rows, columns = spread_edges(x, kernel, dy, stride, pads)
    edges = [(0, 0, 0), (*rows, stride - 1), (*columns, stride - 1), (0, 0, 0)]
    spread = lax.pad(dy, jnp.zeros((), dy.dtype), edges)
    return taps_forward(spread, turned, groups=groups, stride=1, pads=NO_PADS)


def taps_kernel_gradient(
    x: Array, kernel: Array, dy: Array, *, groups: int, stride: int, pads: Pads
) -> Array:
    """For each pair of an input and an output plane, the sums over all rows of shifted row times cotangent row."""
    kh, kw, c, outputs = kernel.shape
    n, rows, columns, _ = dy.shape
    per_group = outputs // groups
    xs, dys = _planes(x, groups, pads), _planes(dy, groups, NO_PADS)
    side_by_side = max(d for d in range(1, columns + 1) if columns % d == 0 and d <= max(1, LANES // groups))
    shape = (columns // side_by_side, side_by_side * groups)

    def pair(carry: None, which: Array) -> tuple[None, Array]:
        def row(at: Array, sums: list[Array]) -> list[Array]:
            image, h = at // rows, at % rows
            window = lax.dynamic_slice(
                xs, (which // per_group, image, h * stride, 0, 0), (1, 1, kh, *xs.shape[3:])
            )[0, 0]
            dy_row = lax.dynamic_slice(
                dys, (which % per_group, image, h, 0, 0), (1, 1, 1, columns, groups)
            ).reshape(shape)
            taps = [(i, j) for i in range(kh) for j in range(kw)]
            return [
                total
                + (window[i, j : j + stride * (columns - 1) + 1 : stride].reshape(shape) * dy_row).sum(0)
                for total, (i, j) in zip(sums, taps, strict=True)
            ]

        sums = lax.fori_loop(0, n * rows, row, [jnp.zeros(shape[1], xs.dtype)] * (kh * kw))
        return carry, jnp.stack(sums).reshape(kh, kw, side_by_side, groups).sum(2)

    _, dw_pairs = lax.scan(pair, None, jnp.arange(c * per_group))
    dw = dw_pairs.reshape(c, per_group, kh, kw, groups).transpose(2, 3, 0, 4, 1)
    return dw.reshape(kernel.shape).astype(kernel.dtype)


def _planes(x: Array, groups: int, pads: Pads) -> Array:
    """[N, H, W, groups * c] as [c, N, H + edges, W + edges, groups]."""
    n, h, w, channels = x.shape
    planes = x.reshape(n, h, w, groups, channels // groups).transpose(4, 0, 1, 2, 3)
    planes = planes.astype(wide(x.dtype))  # so that long sums of 16-bit numbers are rounded once
    padded: Array = materialised(jnp.pad(planes, ((0, 0), (0, 0), *pads, (0, 0))))
    return padded
