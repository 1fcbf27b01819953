"""2-D convolution, NHWC by HWIO, and max pooling, with backward passes that stay fast inside a loop on the CPU.

XLA:CPU brings a convolution into the layout of its fast kernel only in a program's entry computation, and the gradient
convolutions that autodiff makes are not in that layout: inside `lax.scan` they are tens of times slower. Here the
input's gradient is a convolution in the canonical layout, with a stride a matrix product, as is the kernel's. Other
platforms keep the built-in gradients. docs/layers.md has the measurements.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float

from hotloop.errors import OptionError
from hotloop.layers import native_conv
from hotloop.layers.dense import wide
from hotloop.layers.paths import Operation, materialise, vary_alike
from hotloop.layers.pool_places import find_largest, give_to_largest

Padding = Literal["SAME", "VALID"]
Pads = tuple[tuple[int, int], tuple[int, int]]
Convolve = Callable[..., Array]
LAYOUT = ("NHWC", "HWIO", "NHWC")
CACHE_BYTES = 3 << 20
"""What copies of images for one product may take; measured on two cores with 1 MiB of cache each and 32 together."""


def conv2d(
    x_NHWC: Float[Array, "N H W C"],
    kernel_HWIO: Float[Array, "kh kw C O"],
    *,
    stride: int = 1,
    padding: Padding = "SAME",
) -> Float[Array, "N Ho Wo O"]:
    """Convolve; `SAME` gives ceil(size / stride) rows and columns, `VALID` uses only whole windows."""
    check_kernel(kernel_HWIO)
    pads = padding_of(x_NHWC, kernel_HWIO, stride, padding)
    return conv2d_padded(*vary_alike(x_NHWC, kernel_HWIO), stride, pads)


def check_kernel(kernel_HWIO: Array) -> None:
    """OptionError for one without taps or channels, whose gradient would be no kernel."""
    if 0 in kernel_HWIO.shape:
        raise OptionError(f"a kernel of {list(kernel_HWIO.shape)} has nothing to convolve with")


def padding_of(x_NHWC: Array, kernel_HWIO: Array, stride: int, padding: Padding) -> Pads:
    """The rows and columns of zeros that `padding` stands for, as ((top, bottom), (left, right))."""
    rows, columns = lax.padtype_to_pads(x_NHWC.shape[1:3], kernel_HWIO.shape[:2], (stride, stride), padding)
    return rows, columns


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv2d_padded(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
    """Convolve with the padding given in rows and columns."""
    y: Array = forward(x, kernel, stride=stride, pads=pads)
    return y


def conv2d_biased(
    x_NHWC: Array,
    kernel_HWIO: Array,
    bias: Array,
    residual_NHWC: Array | None,
    *,
    stride: int,
    pads: Pads,
    relu: bool,
) -> Array:
    """Convolve, then add `bias` and `residual` and take the ReLU: in one pass where a kernel has them together."""
    residual = () if residual_NHWC is None else (residual_NHWC,)
    y: Array = biased(x_NHWC, kernel_HWIO, bias, *residual, stride=stride, pads=pads, relu=relu)
    return y


def _backward(stride: int, pads: Pads, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    settings = {"stride": stride, "pads": pads}
    dkernel, dy = in_turn(kernel_gradient(*saved, dy, **settings), dy)
    return input_gradient(*saved, dy, **settings), dkernel


conv2d_padded.defvjp(lambda x, kernel, *how: (conv2d_padded(x, kernel, *how), (x, kernel)), _backward)


def input_gradient_of(convolve: Convolve) -> Convolve:
    """`(x, kernel, dy) -> dx` for `convolve(x, kernel)`, as JAX derives it."""
    return lambda x, kernel, dy, **settings: jax.vjp(lambda x: convolve(x, kernel, **settings), x)[1](dy)[0]


def kernel_gradient_of(convolve: Convolve) -> Convolve:
    """`(x, kernel, dy) -> dkernel`, likewise."""
    return lambda x, kernel, dy, **settings: jax.vjp(partial(convolve, x, **settings), kernel)[1](dy)[0]


def _plain(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT)


def _biased(
    x: Array, kernel: Array, bias: Array, *residual: Array, stride: int, pads: Pads, relu: bool
) -> Array:
    total = sum(residual, start=conv2d_padded(x, kernel, stride, pads) + bias)
    return jax.nn.relu(total) if relu else total


def _is_product(kernel: Array, pads: Pads) -> bool:
    """A 1x1 kernel without padding is one matrix product over the channels of the pixels that the stride picks."""
    return kernel.shape[:2] == (1, 1) and pads == ((0, 0), (0, 0))


def _canonical_forward(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
    if _is_product(kernel, pads):
        picked = x[:, ::stride, ::stride]
        return (_rows(picked) @ kernel[0, 0]).reshape(*picked.shape[:3], -1)
    return _plain(x, kernel, stride=stride, pads=pads)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _padded(x: Array, *edges: tuple[int, int, int]) -> Array:
    """Zeros before, after and between the rows and columns; negative: cut off."""
    return lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])


def _canonical_dx(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> Array:
    """Convolve the cotangent with the kernel turned round and its channels swapped."""
    edges = spread_edges(x, kernel, dy, stride, pads)
    if _is_product(kernel, pads):
        picked = (_rows(dy) @ kernel[0, 0].T).reshape(*dy.shape[:3], -1)
        (_, below), (_, right) = edges
        return _padded(picked, (0, below, stride - 1), (0, right, stride - 1))
    if stride > 1:
        return _strided_dx(x, kernel, dy, stride, pads)
    turned = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    return lax.conv_general_dilated(dy, turned, (1, 1), edges, dimension_numbers=LAYOUT)


def _strided_dx(x: Array, kernel: Array, dy: Array, stride: int, pads: Pads) -> Array:
    """One product for all taps of the kernel, which are then added where they overlap.

    A convolution of the cotangent spread by the stride would multiply by the zeros between its pixels.
    """
    kh, kw, channels, filters = kernel.shape
    images, height, width, _ = dy.shape
    down, right = _further_windows(kh, stride), _further_windows(kw, stride)
    products = jnp.matmul(_rows(dy), kernel.reshape(-1, filters).T, preferred_element_type=wide(dy.dtype))
    taps = products.reshape(images, height, width, kh * kw, channels)

    def phase(row: int, column: int) -> Array:
        total = jnp.zeros((images, height + down, width + right, channels), taps.dtype)
        for i, j in product(range(row, kh, stride), range(column, kw, stride)):
            (above, left), tap = (i // stride, j // stride), taps[..., i * kw + j, :]
            total += _padded(tap, (above, down - above, 0), (left, right - left, 0))
        return total

    return _interleave(phase, stride, x, pads).astype(dy.dtype)


def _further_windows(size: int, stride: int) -> int:
    """How many windows that begin before it a pixel may lie in, beside the last one."""
    return -(-size // stride) - 1


def _interleave(phase: Callable[[int, int], Array], stride: int, x: Array, pads: Pads) -> Array:
    """An image of the size of `x` from its phases, pixels that lie alike in their windows, given with their padding."""
    rows = [jnp.stack([phase(row, column) for column in range(stride)], 3) for row in range(stride)]
    stacked = jnp.stack(rows, 2)
    images, height, _, width, _, channels = stacked.shape
    padded = stacked.reshape(images, height * stride, width * stride, channels)
    sizes = zip(pads, x.shape[1:3], padded.shape[1:3], strict=True)
    return _padded(padded, *((-low, low + size - covered, 0) for (low, _), size, covered in sizes))


def spread_edges(x: Array, kernel: Array, dy: Array, stride: int, pads: Pads) -> Pads:
    """Padding of the cotangent, spread by the stride, that leads back to the size of `x` in a VALID convolution."""
    edges = []
    for size, k, (low, _), out in zip(x.shape[1:3], kernel.shape[:2], pads, dy.shape[1:3], strict=True):
        before = k - 1 - low
        spread = (out - 1) * stride + 1
        edges.append((before, size + k - 1 - spread - before))
    return edges[0], edges[1]


def _canonical_dw(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> Array:
    """Matrix products over all pixels, in the form whose copies of the images stay in the caches."""
    if _is_product(kernel, pads):
        return (_rows(x[:, ::stride, ::stride]).T @ _rows(dy))[None, None]
    (kh, kw, channels, filters), (images, height, width, _) = kernel.shape, dy.shape
    shifts, size = -(-kw // stride), x.dtype.itemsize
    copies = images * height * (width + shifts - 1) * (stride * kh * channels + shifts * filters)
    fills = copies * size // CACHE_BYTES
    if stride > 1 and fills:
        return _dw_of_taps(x, kernel, dy, stride, pads)
    # A gradient that fills the caches itself would be read and written for each part; one of 16 bits, rounded.
    if fills > 7 and channels >= 16 and 4 * kernel.size * size < CACHE_BYTES and size > 2:
        return _dw_in_parts(x, kernel, dy, pads, least=min(fills, images))
    return _product_dw(x, kernel, dy, stride, pads)


def _dw_of_taps(x: Array, kernel: Array, dy: Array, stride: int, pads: Pads) -> Array:
    """A product for each tap of the kernel, of the pixels that it meets."""
    (kh, kw), (last_row, last_column) = kernel.shape[:2], ((size - 1) * stride for size in dy.shape[1:3])
    (top, _), (left, _) = pads
    bottom, right = last_row + kh - x.shape[1] - top, last_column + kw - x.shape[2] - left
    needed, outputs = _padded(x, (top, bottom, 0), (left, right, 0)), _rows(dy)
    taps = [
        _rows(needed[:, i : i + last_row + 1 : stride, j : j + last_column + 1 : stride]).T @ outputs
        for i, j in product(range(kh), range(kw))
    ]
    return jnp.stack(taps).reshape(kernel.shape)


def _dw_in_parts(x: Array, kernel: Array, dy: Array, pads: Pads, least: int) -> Array:
    """Part by part of the images, in twice as many parts at most; whole where that leaves a rest."""
    parts = next((parts for parts in range(least, 2 * least) if x.shape[0] % parts == 0), 1)

    def gradient(part: ArrayLike) -> Array:
        # Each has one image of so many neighbours, and devices that share the images have their own in all parts.
        x_part, dy_part = (
            lax.dynamic_index_in_dim(each.reshape(-1, parts, *each.shape[1:]), part, 1, keepdims=False)
            for each in (x, dy)
        )
        return _product_dw(x_part, kernel, dy_part, 1, pads)

    # Not from zeros: all devices of a `shard_map` would have those alike, and then each a sum of its own.
    first = gradient(0)
    return lax.scan(lambda total, part: (total + gradient(part), None), first, jnp.arange(1, parts))[0]


def _product_dw(x: Array, kernel: Array, dy: Array, stride: int, pads: Pads) -> Array:
    """One matrix product over all pixels: x beside itself for each row of the kernel, dy for each column.

    With a stride s as many neighbouring columns of x count as one of s times the channels, which moves no number;
    dy is shifted by whole strides only. Twice as fast as a convolution with the batch as its channels.
    """
    (kh, kw, channels, filters), (height, width) = kernel.shape, dy.shape[1:3]
    shifts = -(-kw // stride)
    last, wide = (height - 1) * stride, (width + shifts - 1) * stride
    (top, _), (left, _) = pads
    needed = _padded(x, (top, last + kh - x.shape[1] - top, 0), (left, wide - x.shape[2] - left, 0))
    by_row = jnp.concatenate([needed[:, i : i + last + 1 : stride] for i in range(kh)], -1)
    by_column = jnp.concatenate([_padded(dy, (0, 0, 0), (a, shifts - 1 - a, 0)) for a in range(shifts)], -1)
    sums = by_row.reshape(-1, stride * kh * channels).T @ _rows(by_column)
    taps = sums.reshape(stride, kh, channels, shifts, filters).transpose(1, 3, 0, 2, 4)
    return taps.reshape(kh, shifts * stride, channels, filters)[:, :kw]


def _folded(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
    """The same for a wide kernel two pixels apart over few channels: each 2x2 pixels become channels of one.

    A GPU's matrix units want many channels: a ResNet's first convolution, 7x7 over 3, becomes 4x4 over 12.
    """
    if stride != 2 or min(kernel.shape[:2]) < 5 or kernel.shape[2] > 4:
        return _plain(x, kernel, stride=stride, pads=pads)
    sizes = [size + size % 2 for size in kernel.shape[:2]]
    edges = []
    for size, k, even, (low, high) in zip(x.shape[1:3], kernel.shape[:2], sizes, pads, strict=True):
        needed = (size + low + high - k) // 2 * 2 + even
        edges.append((low, needed - size - low, 0))
    padded = _padded(x, *edges)
    more = [(0, even - k, 0) for even, k in zip(sizes, kernel.shape[:2], strict=True)]
    even_kernel = lax.pad(kernel, np.zeros((), kernel.dtype), [*more, (0, 0, 0), (0, 0, 0)])
    images, rows, columns, channels = padded.shape
    blocks = padded.reshape(images, rows // 2, 2, columns // 2, 2, channels).swapaxes(2, 3)
    taps = even_kernel.reshape(sizes[0] // 2, 2, sizes[1] // 2, 2, channels, -1).swapaxes(1, 2)
    return _plain(
        blocks.reshape(images, rows // 2, columns // 2, 4 * channels),
        taps.reshape(sizes[0] // 2, sizes[1] // 2, 4 * channels, -1),
        stride=1,
        pads=((0, 0), (0, 0)),
    )


forward = Operation(
    _plain, native_conv.FORWARD, cpu=("canonical", _canonical_forward), cuda=("folded", _folded)
)
input_gradient = Operation(
    input_gradient_of(_plain), native_conv.INPUT_GRADIENT, cpu=("canonical", _canonical_dx)
)
kernel_gradient = Operation(
    kernel_gradient_of(_plain),
    native_conv.KERNEL_GRADIENT,
    cpu=("canonical", _canonical_dw),
    cuda=("folded", kernel_gradient_of(_folded)),
)
biased = Operation(_biased, native_conv.BIASED)
# A GPU's schedule puts kernel gradients off until all input gradients are made, and keeps every layer's input and
# cotangent for them: what follows from the second waits for the first.
in_turn = Operation(
    lambda first, then: (first, then), cuda=("ordered", lambda first, then: materialise((first, then)))
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def max_pool(x_NHWC: Array, size: int, stride: int, padding: int) -> Array:
    """The largest value of each whole window of the image with `padding` pixels more on each side, which never win."""
    return _of_windows(x_NHWC, size, stride, padding)


# The built-in gradient scatters each value to its window's largest. That takes a CPU tens of times as long as to find
# the places of the largest and pick by them, and an H200 5.1 ms of kernels instead of 2.9 (512x112x112x64 in bfloat16,
# both ways, with the norm and the ReLU before it). Either way the first of equal values takes all of it.


def _of_windows(x: Array, size: int, stride: int, padding: int) -> Array:
    edges = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    pooled: Array = lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, window, strides, edges)
    return pooled


def _pool_forward(x: Array, size: int, stride: int, padding: int) -> tuple[Array, tuple[Array, Array]]:
    largest, place = pool_for_gradient(x, size=size, stride=stride, padding=padding)
    return largest, (x, place)


def _pool_backward(
    size: int, stride: int, padding: int, kept: tuple[Array, Array], dy: Array
) -> tuple[Array]:
    return (pool_gradient(*kept, dy, size=size, stride=stride, padding=padding),)


max_pool.defvjp(_pool_forward, _pool_backward)


def _pool_without_places(x: Array, *, size: int, stride: int, padding: int) -> tuple[Array, Array]:
    largest = _of_windows(x, size, stride, padding)
    return largest, jnp.zeros(largest.shape, np.min_scalar_type(size * size))


def _pool_with_places(x: Array, *, size: int, stride: int, padding: int) -> tuple[Array, Array]:
    # Written out, or the way back would look for the places again.
    found: tuple[Array, Array] = materialise(find_largest(x, size, stride, padding))
    return found


def _gradient_by_places(x: Array, place: Array, dy: Array, *, size: int, stride: int, padding: int) -> Array:
    return give_to_largest(place, dy, (x.shape[1], x.shape[2]), size, stride, padding)


def _gradient_of_windows(x: Array, place: Array, dy: Array, *, size: int, stride: int, padding: int) -> Array:
    dx: Array = jax.vjp(lambda x: _of_windows(x, size, stride, padding), x)[1](dy)[0]
    return dx


def _gradient_by_phases(x: Array, place: Array, dy: Array, *, size: int, stride: int, padding: int) -> Array:
    """Each pixel's sum over the few windows that reach it, of those whose largest value it is."""
    images, height, width, channels = dy.shape
    reach = _further_windows(size, stride)
    edge = (reach, reach, 0)
    # Written out, or each phase would find it again.
    place = materialise(find_largest(x, size, stride, padding)[1])
    place, dy = _padded(place, edge, edge), _padded(dy, edge, edge)
    shape = (images, height + reach, width + reach, channels)

    def given_by(i: int, j: int) -> Array:
        top, left = reach - i // stride, reach - j // stride
        here = (slice(None), slice(top, top + shape[1]), slice(left, left + shape[2]))
        return jnp.where(place[here] == i * size + j, dy[here], 0)

    def phase(row: int, column: int) -> Array:
        taps = product(range(row, size, stride), range(column, size, stride))
        return sum((given_by(*tap) for tap in taps), jnp.zeros(shape, dy.dtype))

    return _interleave(phase, stride, x, ((padding, padding), (padding, padding)))


PLACES = "places"
pool_for_gradient = Operation(_pool_without_places, cuda=(PLACES, _pool_with_places))
pool_gradient = Operation(
    _gradient_of_windows, cpu=("phases", _gradient_by_phases), cuda=(PLACES, _gradient_by_places)
)
