"""Batch norms by the handlers of `hotloop-native`, with the sum and the ReLU that follow one in a residual network, in
the arguments that the operations of `norm.py` have.
"""

from typing import Any

import numpy as np
from jax import Array

from hotloop.layers import native
from hotloop.layers.native import UNLESS_SLOWER, empty, like
from hotloop.layers.paths import Rival


def forward(
    x: Array, scale: Array, offset: Array, *residual: Array, epsilon: float, relu: bool
) -> tuple[Array, Array, Array]:
    results = (like(x), like(scale), like(scale))
    operands = (x, scale, offset, *(residual or (empty(),)))
    y, mean, variance = native.call("hotloop_norm_forward", results, *operands, **_attributes(epsilon, relu))
    return y, mean, variance


def backward(
    dy: Array, dmean: Array, dvariance: Array, *saved: Array, epsilon: float, relu: bool
) -> tuple[Array, ...]:
    x, scale, offset, mean, variance, *output = saved
    results = (like(x), like(x) if output else like(empty()), like(scale), like(scale))
    operands = (dy, x, output[0] if output else empty(), scale, offset, mean, variance, dmean, dvariance)
    dx, dresidual, dscale, doffset = native.call(
        "hotloop_norm_backward", results, *operands, **_attributes(epsilon, relu)
    )
    return (dx, dscale, doffset, dresidual) if output else (dx, dscale, doffset)


def _attributes(epsilon: float, relu: bool) -> dict[str, Any]:
    return {"epsilon": np.float32(epsilon), "relu": relu}


FORWARD = Rival("norm forward", "hotloop_norm_forward", forward, margin=UNLESS_SLOWER)
BACKWARD = Rival("norm backward", "hotloop_norm_backward", backward, margin=UNLESS_SLOWER)
