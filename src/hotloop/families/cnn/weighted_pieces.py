"""The pieces with parameters: convolution, batch and group normalisation, and the dense layer that ends a network."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import jax
from jax import Array, lax

from hotloop.families.cnn.piece import Leaves, Plain, Shape
from hotloop.layers import conv, initial, norm
from hotloop.layers.dense import product, with_bias


@dataclass(frozen=True)
class Conv:
    """A square convolution, padded by a number of pixels on each side or by a rule; bias and ReLU go together."""

    filters: int
    size: int
    stride: int = 1
    padding: conv.Padding | int = "SAME"
    start: Literal["truncated", "glorot"] = "truncated"
    biased_relu: bool = False
    kind: ClassVar[str] = "conv"

    def shape(self, *shapes: Shape) -> Shape:
        """Rows and columns by padding and stride, and the filters."""
        rows, columns = (
            (size + low + high - self.size) // self.stride + 1
            for size, (low, high) in zip(shapes[0], self._pads(shapes[0]), strict=False)
        )
        return rows, columns, self.filters

    def values(self, shape: Shape) -> dict[str, initial.Spec]:
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
        """Convolve."""
        y = conv.conv2d_padded(xs[0], leaves["kernel"], self.stride, self._pads(xs[0].shape[1:3]))
        return jax.nn.relu(with_bias(y, leaves["bias"])) if self.biased_relu else y

    def _pads(self, shape: Shape) -> conv.Pads:
        if isinstance(self.padding, int):
            return (self.padding, self.padding), (self.padding, self.padding)
        window, strides = (self.size, self.size), (self.stride, self.stride)
        rows, columns = lax.padtype_to_pads(shape[:2], window, strides, self.padding)
        return rows, columns


@dataclass(frozen=True)
class BatchNorm(Plain):
    """Batch normalisation; called, it uses the batch and hands its statistics back too."""

    gamma: float
    epsilon: float
    kind: ClassVar[str] = "batch norm"

    def values(self, shape: Shape) -> dict[str, initial.Spec]:
        """A scale and an offset for each channel."""
        return _scale_and_offset(shape, self.gamma)

    def __call__(self, leaves: Leaves, *xs: Array) -> tuple[Array, Leaves]:
        """Normalise by the batch; also its float32 mean and biased variance."""
        y, mean, variance = norm.batch_norm(xs[0], leaves["scale"], leaves["offset"], self.epsilon)
        return y, {"mean": mean, "variance": variance}

    def by(self, statistics: Leaves, leaves: Leaves, x: Array) -> Array:
        """Normalise by given statistics."""
        mean, variance = statistics["mean"], statistics["variance"]
        return norm.normalise(x, leaves["scale"], leaves["offset"], mean, variance, self.epsilon)

    def shifted(self, leaves: Leaves, x: Array) -> Array:
        """What is left of a norm whose slope is in the kernel before it: added in the images' own type."""
        return x + leaves["bias"].astype(x.dtype)


@dataclass(frozen=True)
class GroupNorm(Plain):
    """Group normalisation."""

    groups: int
    gamma: float
    epsilon: float
    kind: ClassVar[str] = "group norm"

    def values(self, shape: Shape) -> dict[str, initial.Spec]:
        """A scale and an offset for each channel."""
        return _scale_and_offset(shape, self.gamma)

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        """Normalise each image by its groups."""
        return norm.group_norm(xs[0], leaves["scale"], leaves["offset"], self.groups, self.epsilon)


def _scale_and_offset(shape: Shape, gamma: float) -> dict[str, initial.Spec]:
    return {"scale": initial.constant(shape[-1:], gamma), "offset": initial.constant(shape[-1:])}


@dataclass(frozen=True)
class Logits:
    """The last, fully connected piece; its output stays in float32."""

    classes: int
    kind: ClassVar[str] = "dense"

    def shape(self, *shapes: Shape) -> Shape:
        """The classes."""
        return (self.classes,)

    def values(self, shape: Shape) -> dict[str, initial.Spec]:
        """Kernel [features, classes] and bias."""
        return {
            "kernel": initial.glorot_uniform((shape[0], self.classes)),
            "bias": initial.constant((self.classes,)),
        }

    def flops(self, shape: Shape) -> int:
        """One matrix product."""
        return 2 * shape[0] * self.classes

    def __call__(self, leaves: Leaves, *xs: Array) -> Array:
        """`x @ kernel + bias`."""
        sums = product(xs[0], leaves["kernel"])
        return with_bias(sums, leaves["bias"].astype(sums.dtype))
