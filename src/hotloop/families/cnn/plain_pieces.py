"""The pieces without parameters: ReLU, sum, the CIFAR networks' shortcut, pools and flattening."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import jax
import numpy as np
from jax import Array, lax

from hotloop.families.cnn.piece import Leaves, Plain, Shape
from hotloop.layers.dense import wide
from hotloop.layers.paths import materialise_on_cpu
from hotloop.layers.pools import max_pool


class Relu(Plain):
    """max(x, 0)."""

    kind = "relu"

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        """Cut off at zero."""
        return jax.nn.relu(xs[0])


class Add(Plain):
    """The sum of two inputs of one shape."""

    kind = "add"

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        """Add."""
        return xs[0] + xs[1]


@dataclass(frozen=True)
class PadShortcut(Plain):
    """The shortcut without parameters: every second row and column, and as many zero channels as there are."""

    kind: ClassVar[str] = "shortcut"

    def shape(self, *shapes: Shape) -> Shape:
        """Half the rows and columns (rounded up), twice the channels."""
        rows, columns, channels = shapes[0]
        return -(-rows // 2), -(-columns // 2), 2 * channels

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        """Pick and pad."""
        thinned = xs[0][:, ::2, ::2]
        zero = np.zeros((), thinned.dtype)
        return lax.pad(thinned, zero, [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, thinned.shape[-1], 0)])


@dataclass(frozen=True)
class MaxPool(Plain):
    """The largest value of each window; padding never wins."""

    size: int
    stride: int
    padding: int = 0
    kind: ClassVar[str] = "max pool"

    def shape(self, *shapes: Shape) -> Shape:
        """Only whole windows of the padded image."""
        rows, columns = ((size + 2 * self.padding - self.size) // self.stride + 1 for size in shapes[0][:2])
        return rows, columns, shapes[0][2]

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        """Pool."""
        return max_pool(xs[0], self.size, self.stride, self.padding)


class MeanPool(Plain):
    """The mean of each channel over the image, summed in float32."""

    kind = "mean pool"

    def shape(self, *shapes: Shape) -> Shape:
        """The channels."""
        return shapes[0][2:]

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        """Average, rounded once to the type of the input."""
        (x,) = xs
        if x.dtype != wide(x.dtype):
            # Fused with the sum and ReLU before it, jaxlib 0.11.2 makes NaN of bfloat16 on a CPU with AMX.
            x = materialise_on_cpu(x)
        return x.mean((1, 2), dtype=wide(x.dtype)).astype(x.dtype)


class Flatten(Plain):
    """All values of an image in one row."""

    kind = "flatten"

    def shape(self, *shapes: Shape) -> Shape:
        """One axis."""
        return (prod(shapes[0]),)

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        """Reshape."""
        return xs[0].reshape(len(xs[0]), -1)
