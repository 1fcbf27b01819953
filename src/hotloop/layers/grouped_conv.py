"""Grouped 2-D convolution, NHWC, SAME padding: XLA:CPU has no fast kernel for it, so there it has paths of its own.

Few channels a group go as sums of shifted elementwise products (taps); more go as dense convolutions over bundles of
groups, whose kernels are zero between groups. For the taps the input is cut into planes, one for each place within a
group, so that every product runs over whole vectors. What XLA:CPU turns into fast loops was found by trial
(docs/layers.md): padding must be written out first, each output plane must be its own sum, and the kernel's gradient
must go row by row.
"""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from hotloop.errors import OptionError
from hotloop.layers import bundled, depthwise, native_conv
from hotloop.layers.conv import (
    LAYOUT,
    Convolve,
    Pads,
    check_kernel,
    conv2d_padded,
    input_gradient_of,
    kernel_gradient_of,
    padding_of,
    spread_edges,
)
from hotloop.layers.dense import wide
from hotloop.layers.paths import Operation, materialise, vary_alike

NO_PADS = ((0, 0), (0, 0))
LANES = 256  # floats that one turn of the kernel gradient's sums works on at once: 8 vectors of 32, 4 of 64


def taps_forward(x: Array, kernel: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """Each output plane is the sum, over taps and input planes, of a shifted plane times one filter row."""
    kh, kw, c, outputs = kernel.shape
    planes = _planes(x, groups, pads)
    filters_hwcog = kernel.reshape(kh, kw, c, groups, -1).swapaxes(3, 4)
    filters_hwcog = materialise(filters_hwcog.astype(planes.dtype))
    rows, columns = ((planes.shape[2] - kh) // stride + 1, (planes.shape[3] - kw) // stride + 1)

    def shifted(place: int, i: int, j: int) -> Array:
        start = (place, 0, i, j, 0)
        last = (place + 1, x.shape[0], i + stride * (rows - 1) + 1, j + stride * (columns - 1) + 1, groups)
        return lax.slice(planes, start, last, (1, 1, stride, stride, 1))[0]

    def summed(o: int) -> Array:
        taps = product(range(kh), range(kw), range(c))
        terms = [shifted(place, i, j) * filters_hwcog[i, j, place, o] for i, j, place in taps]
        plane: Array = materialise(sum(terms[1:], terms[0]))
        return plane

    ys = jnp.stack([summed(o) for o in range(outputs // groups)], -1)
    y: Array = materialise(ys.reshape(x.shape[0], rows, columns, outputs).astype(x.dtype))
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
            place = (which // per_group, image, h * stride, 0, 0)
            window = lax.dynamic_slice(xs, place, (1, 1, kh, *xs.shape[3:]))[0, 0]
            dy_row = lax.dynamic_slice(
                dys, (which % per_group, image, h, 0, 0), (1, 1, 1, columns, groups)
            ).reshape(shape)
            ends = [j + stride * (columns - 1) + 1 for j in range(kw)]
            taps = [window[i, j : ends[j] : stride] for i in range(kh) for j in range(kw)]
            return [
                total + (tap.reshape(shape) * dy_row).sum(0) for total, tap in zip(sums, taps, strict=True)
            ]

        zeros, _, _ = vary_alike(jnp.zeros(shape[1], xs.dtype), xs, dys)
        sums = lax.fori_loop(0, n * rows, row, [zeros] * (kh * kw))
        return carry, jnp.stack(sums).reshape(kh, kw, side_by_side, groups).sum(2)

    _, dw_pairs = lax.scan(pair, None, jnp.arange(c * per_group))
    dw = dw_pairs.reshape(c, per_group, kh, kw, groups).transpose(2, 3, 0, 4, 1)
    return dw.reshape(kernel.shape).astype(kernel.dtype)


def _planes(x: Array, groups: int, pads: Pads) -> Array:
    """[N, H, W, groups * c] as [c, N, H + edges, W + edges, groups]."""
    n, h, w, channels = x.shape
    planes = x.reshape(n, h, w, groups, channels // groups).transpose(4, 0, 1, 2, 3)
    planes = planes.astype(wide(x.dtype))  # so that long sums of 16-bit numbers are rounded once
    padded: Array = materialise(jnp.pad(planes, ((0, 0), (0, 0), *pads, (0, 0))))
    return padded


FEW_INPUTS, FEW_OUTPUTS, FEW_TERMS = 4, 8, 50  # a group's channels and a sum's terms, up to which taps win
SMALL_IMAGES = 2**21  # numbers in all of them, up to which a GPU's fused sums win
BUNDLE_CHANNELS = 16  # input channels of one dense convolution, where groups are bundled


def grouped_conv2d(
    x_NHWC: Float[Array, "N H W C"], kernel_HWIO: Float[Array, "kh kw c O"], groups: int, stride: int = 1
) -> Float[Array, "N Ho Wo O"]:
    """Convolve each of `groups` runs of C / groups channels with its own O / groups filters."""
    check_kernel(kernel_HWIO)
    channels, outputs = x_NHWC.shape[3], kernel_HWIO.shape[3]
    if groups < 1 or channels != groups * kernel_HWIO.shape[2] or outputs % groups:
        raise OptionError(
            f"groups={groups}: {channels} channels and {outputs} filters of {kernel_HWIO.shape[2]} do not go into them"
        )
    pads = padding_of(x_NHWC, kernel_HWIO, stride, "SAME")
    return _grouped(*vary_alike(x_NHWC, kernel_HWIO), groups, stride, pads)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _grouped(x: Array, kernel: Array, groups: int, stride: int, pads: Pads) -> Array:
    y: Array = forward(x, kernel, groups=groups, stride=stride, pads=pads)
    return y


def _backward(
    groups: int, stride: int, pads: Pads, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    settings = {"groups": groups, "stride": stride, "pads": pads}
    return input_gradient(*saved, dy, **settings), kernel_gradient(*saved, dy, **settings)


_grouped.defvjp(lambda x, kernel, *how: (_grouped(x, kernel, *how), (x, kernel)), _backward)


def _plain(x: Array, kernel: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT, feature_group_count=groups
    )


def _bundled(x: Array, kernel: Array, *, groups: int, stride: int, pads: Pads) -> Array:
    """Dense convolutions over bundles of groups; what a kernel has between its bundle's groups is zero."""
    inputs = kernel.shape[2]
    size = max(s for s in range(1, groups + 1) if groups % s == 0 and s <= max(1, BUNDLE_CHANNELS // inputs))
    parts = zip(jnp.split(x, groups // size, 3), jnp.split(kernel, groups // size, 3), strict=True)
    return jnp.concatenate(
        [conv2d_padded(part, _block_diagonal(block, size), stride, pads) for part, block in parts], 3
    )


def _block_diagonal(kernel: Array, groups: int) -> Array:
    """One kernel over all channels of `groups` groups, zero between them.

    Blocks are padded into place, so that the gradient cuts them out. As a product with an identity it would be a sum
    over the groups, which XLA:CPU hands to YNNPACK for kernels of 5x5 and more, and that ends the process now and then
    (jaxlib 0.10.2 and 0.11.0; docs/layers.md has a reproduction).
    """
    width, padded = kernel.shape[3] // groups, []
    for g, block in enumerate(jnp.split(kernel, groups, 3)):
        edges = [(0, 0, 0)] * 3 + [(g * width, (groups - 1 - g) * width, 0)]
        padded.append(lax.pad(block, np.zeros((), kernel.dtype), edges))
    return jnp.concatenate(padded, 2)


def _taps_or_bundles(bundled: Convolve, taps: Convolve) -> tuple[str, Convolve]:
    """On a CPU: taps for few channels a group and few terms a sum."""

    def choose(x: Array, kernel: Array, *dy: Array, groups: int, **settings: Any) -> Array:
        path = taps if _are_few(kernel, groups, FEW_INPUTS) else bundled
        return path(x, kernel, *dy, groups=groups, **settings)

    return "taps or bundles", choose


def _fused_or_library(library: Convolve, fused: Convolve, few_inputs: int) -> tuple[str, Convolve]:
    """On a GPU: sums of taps for small images of few channels a group; cuDNN reads large ones less often."""

    def choose(x: Array, kernel: Array, *dy: Array, groups: int, **settings: Any) -> Array:
        is_small = isinstance(x.size, int) and 0 < x.size <= SMALL_IMAGES  # no symbol, as exports have
        path = fused if is_small and _are_few(kernel, groups, few_inputs) else library
        return path(x, kernel, *dy, groups=groups, **settings)

    return "fused or library", choose


def _are_few(kernel: Array, groups: int, few_inputs: int) -> bool:
    kh, kw, inputs, outputs = *kernel.shape[:3], kernel.shape[3] // groups
    return inputs <= few_inputs and outputs <= FEW_OUTPUTS and kh * kw * max(inputs, outputs) <= FEW_TERMS


forward = Operation(
    _plain,
    native_conv.FORWARD,
    bundled.FORWARD,
    cpu=_taps_or_bundles(_bundled, taps_forward),
    cuda=_fused_or_library(_plain, depthwise.forward, 4),
)
input_gradient = Operation(
    input_gradient_of(_plain),
    native_conv.INPUT_GRADIENT,
    bundled.INPUT_GRADIENT,
    cpu=_taps_or_bundles(input_gradient_of(_bundled), taps_input_gradient),
    cuda=_fused_or_library(input_gradient_of(_plain), depthwise.input_gradient, 2),
)
kernel_gradient = Operation(
    kernel_gradient_of(_plain),
    native_conv.KERNEL_GRADIENT,
    cpu=_taps_or_bundles(kernel_gradient_of(_bundled), taps_kernel_gradient),
    cuda=_fused_or_library(kernel_gradient_of(_plain), depthwise.kernel_gradient, 2),
)
