"""The layers that networks are made of: each knows its output's shape, its parameters, its cost and how to compute it.

A layer computes in the type of its parameters. It knows neither its name nor its neighbours.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jax import Array, lax

from hotloop.layers import conv, initial, norm
from hotloop.layers.dense import product, wide, with_bias
from hotloop.layers.initial import Spec
from hotloop.layers.paths import materialise_on_cpu
from hotloop.layers.pools import max_pool

Shape = tuple[int, ...]  # of one image's value: rows, columns, channels; or features
Leaves = dict[str, Array]


class NetworkLayer:
    """What every layer offers; this one has neither parameters nor products, and keeps its input's shape.

    `shape` is that of the first input [rows, columns, channels] or [features], `xs` are the inputs [N, ...].
    """

    kind: ClassVar[str]  # one word for tables

    def shape(self, shape: Shape) -> Shape:
        """The output's."""
        return shape

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        """As what they start from."""
        return {}

    def flops(self, shape: Shape) -> int:
        """Two for each multiply-add of products and convolutions, for one image."""
        return 0

    def __call__(self, leaves: Leaves, *xs: Array) -> Any:
        raise NotImplementedError


class Relu(NetworkLayer):
    kind = "relu"

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return jax.nn.relu(xs[0])


class Add(NetworkLayer):
    """The sum of two inputs of one shape."""

    kind = "add"

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return xs[0] + xs[1]


@dataclass(frozen=True)
class PadShortcut(NetworkLayer):
    """The shortcut without parameters: every second row and column, and as many zero channels as there are."""

    kind: ClassVar[str] = "shortcut"

    def shape(self, shape: Shape) -> Shape:
        rows, columns, channels = shape
        return -(-rows // 2), -(-columns // 2), 2 * channels

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        thinned = xs[0][:, ::2, ::2]
        zero = np.zeros((), thinned.dtype)
        return lax.pad(thinned, zero, [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, thinned.shape[-1], 0)])


@dataclass(frozen=True)
class MaxPool(NetworkLayer):
    """The largest value of each window; padding never wins, and only whole windows count."""

    size: int
    stride: int
    padding: int = 0
    kind: ClassVar[str] = "max pool"

    def shape(self, shape: Shape) -> Shape:
        rows, columns = ((size + 2 * self.padding - self.size) // self.stride + 1 for size in shape[:2])
        return rows, columns, shape[2]

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return max_pool(xs[0], self.size, self.stride, self.padding)


class MeanPool(NetworkLayer):
    """The mean of each channel over the image, summed in float32 and rounded once to the type of the input."""

    kind = "mean pool"

    def shape(self, shape: Shape) -> Shape:
        return shape[2:]

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        (x,) = xs
        if x.dtype != wide(x.dtype):
            # Fused with the sum and ReLU before it, jaxlib 0.11.2 makes NaN of bfloat16 on a CPU with AMX.
            x = materialise_on_cpu(x)
        return x.mean((1, 2), dtype=wide(x.dtype)).astype(x.dtype)


class Flatten(NetworkLayer):
    kind = "flatten"

    def shape(self, shape: Shape) -> Shape:
        return (prod(shape),)

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return xs[0].reshape(len(xs[0]), -1)


@dataclass(frozen=True)
class Conv(NetworkLayer):
    """A square convolution, padded by a number of pixels on each side or by a rule; bias and ReLU go together."""

    filters: int
    size: int
    stride: int = 1
    padding: conv.Padding | int = "SAME"
    start: Literal["truncated", "glorot"] = "truncated"
    biased_relu: bool = False
    kind: ClassVar[str] = "conv"

    def shape(self, shape: Shape) -> Shape:
        rows, columns = (
            (size + low + high - self.size) // self.stride + 1
            for size, (low, high) in zip(shape, self._pads(shape), strict=False)
        )
        return rows, columns, self.filters

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        """Kernel [kh, kw, C, O], and a bias if there is one."""
        kernel = (self.size, self.size, shape[2], self.filters)
        start = (
            initial.truncated_normal(kernel) if self.start == "truncated" else initial.glorot_uniform(kernel)
        )
        return {"kernel": start} | ({"bias": initial.constant((self.filters,))} if self.biased_relu else {})

    def flops(self, shape: Shape) -> int:
        """Every output pixel is a product of the window with the kernel."""
        return 2 * prod(self.shape(shape)) * self.size**2 * shape[2]

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        y = conv.conv2d_padded(xs[0], leaves["kernel"], self.stride, self._pads(xs[0].shape[1:3]))
        return jax.nn.relu(with_bias(y, leaves["bias"])) if self.biased_relu else y

    def _pads(self, shape: Shape) -> conv.Pads:
        if isinstance(self.padding, int):
            return (self.padding, self.padding), (self.padding, self.padding)
        window, strides = (self.size, self.size), (self.stride, self.stride)
        rows, columns = lax.padtype_to_pads(shape[:2], window, strides, self.padding)
        return rows, columns


@dataclass(frozen=True)
class BatchNorm(NetworkLayer):
    """Batch normalisation; called, it uses the batch and hands its statistics back too."""

    gamma: float
    epsilon: float
    kind: ClassVar[str] = "batch norm"

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        return _scale_and_offset(shape, self.gamma)

    def __call__(self, leaves: Leaves, *xs: Array) -> tuple[Array, Leaves]:
        """Normalise by the batch; also its float32 mean and biased variance."""
        y, mean, variance = norm.batch_norm(xs[0], leaves["scale"], leaves["offset"], self.epsilon)
        return y, {"mean": mean, "variance": variance}

    def normalise_by(self, statistics: Leaves, leaves: Leaves, x: Array) -> Array:
        mean, variance = statistics["mean"], statistics["variance"]
        return norm.normalise(x, leaves["scale"], leaves["offset"], mean, variance, self.epsilon)

    def add_bias(self, leaves: Leaves, x: Array) -> Array:
        """What is left of a norm whose slope is in the kernel before it: added in the images' own type."""
        return x + leaves["bias"].astype(x.dtype)


@dataclass(frozen=True)
class GroupNorm(NetworkLayer):
    """Normalises each image by its groups of channels."""

    groups: int
    gamma: float
    epsilon: float
    kind: ClassVar[str] = "group norm"

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        return _scale_and_offset(shape, self.gamma)

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        return norm.group_norm(xs[0], leaves["scale"], leaves["offset"], self.groups, self.epsilon)


def _scale_and_offset(shape: Shape, gamma: float) -> dict[str, Spec]:
    return {"scale": initial.constant(shape[-1:], gamma), "offset": initial.constant(shape[-1:])}


@dataclass(frozen=True)
class Logits(NetworkLayer):
    """The last, fully connected layer, kernel [features, classes]; its output stays in float32."""

    classes: int
    kind: ClassVar[str] = "dense"

    def shape(self, shape: Shape) -> Shape:
        return (self.classes,)

    def parameters(self, shape: Shape) -> dict[str, Spec]:
        return {
            "kernel": initial.glorot_uniform((shape[0], self.classes)),
            "bias": initial.constant((self.classes,)),
        }

    def flops(self, shape: Shape) -> int:
        return 2 * shape[0] * self.classes

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        sums = product(xs[0], leaves["kernel"])
        return with_bias(sums, leaves["bias"].astype(sums.dtype))
